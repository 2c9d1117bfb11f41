"""Costly tests run when what they test has changed: `scripts/test` runs those, `scripts/test --all` every one.

`costly.json` names, for each costly file, the files and folders it is `of`, and the digest that these had when the file
last `passed`. A plain `pytest` runs everything.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
from collections import defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "costly.json"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costly", choices=["changed", "record"],
        help="changed: not those whose sources are as when they passed; record: all, and write down what passed",
    )  # fmt: skip


def digest(file: str, sources: list[str]) -> str:
    """Of the test's own file, what it is of, and the versions that all are tested with."""
    total = hashlib.sha256()
    for name in (file, "constraints.txt", *sources):
        path = ROOT / name
        if not path.exists():
            raise pytest.UsageError(f"{TABLE}: {file} is of {name}, which isn't there")
        for each in sorted(path.rglob("*")) if path.is_dir() else [path]:
            if each.is_file() and each.suffix != ".pyc":
                total.update(each.relative_to(ROOT).as_posix().encode() + b"\0" + each.read_bytes() + b"\0")
    return total.hexdigest()[:16]


def pytest_configure(config: pytest.Config) -> None:
    costly: dict[str, dict[str, str | list[str]]] = json.loads(TABLE.read_text())
    plugin = Costly(config, costly)
    config.pluginmanager.register(plugin, "costly")
    config.args[:] = [name for name in config.args if name not in plugin.unchanged]  # those are never ignored


class Costly:
    def __init__(self, config: pytest.Config, costly: dict[str, dict[str, str | list[str]]]) -> None:
        self.mode, self.costly = config.getoption("--costly"), costly
        self.outcomes: defaultdict[str, set[str]] = defaultdict(set)
        self.unchanged = {
            name for name, known in costly.items()
            if self.mode == "changed" and known.get("passed") == digest(name, list(known["of"]))
        }  # fmt: skip

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Nothing is left out in silence."""
        if self.unchanged:
            terminalreporter.write_line(
                f"not run, as nothing of theirs has changed: {', '.join(sorted(self.unchanged))}"
            )

    def pytest_ignore_collect(self, collection_path: Path) -> bool | None:
        inside = collection_path.is_relative_to(ROOT)
        return True if inside and collection_path.relative_to(ROOT).as_posix() in self.unchanged else None

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.outcomes[report.nodeid.partition("::")[0]].add(report.outcome)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """In the process that hears of all reports: a file of which every test passed, and none was left out."""
        option = session.config.option
        if self.mode != "record" or option.keyword or option.markexpr or hasattr(session.config, "workerinput"):
            return
        in_part = {name.partition("::")[0] for name in session.config.args if "::" in name}
        passed = {name for name in self.costly if self.outcomes.get(name) == {"passed"}} - in_part
        with TABLE.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            known = json.load(file)
            for name in passed & known.keys():
                known[name]["passed"] = digest(name, known[name]["of"])
            file.seek(0)
            file.truncate()
            file.write(json.dumps(known, indent=1) + "\n")
