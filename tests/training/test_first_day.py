"""A person's first day in a fresh checkout, with rows of their own: every command as docs/training.md prints it.

The adapter that `comb train` wrote is served, and asked over HTTP, in tests/serving/test_docs_served.py.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.doc_blocks import ROOT, blocks, mine, write_rows
from tests.helpers.processes import wait_for

SIZES = [
    "data=mine.jsonl", "train.max_seconds=null", "train.steps=24", "train.batch_size=8", "train.logging_steps=1",
    "eval.limit=4",
]  # fmt: skip
"""A run that is long enough to be interrupted."""


def printed(command: str) -> str:
    """A command, which docs/training.md has."""
    shown = [block for block in blocks(ROOT / "docs/training.md") if block.language == "bash"]
    assert command in [re.sub(r" +#.*$", "", each.text) for block in shown for each in block.commands()]
    return command


class Day:
    """A checkout of what is in this one, a shell in it, and nothing in any cache."""

    def __init__(self, home: Path) -> None:
        self.folder = home / "checkout"
        listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
        for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
            if (ROOT / name).is_file():
                (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, self.folder / name)
        programs = home / "bin"
        programs.mkdir()
        (programs / "comb").write_text(f"#!{sys.executable}\nfrom comb.cli.main import main\nmain()\n")
        (programs / "comb").chmod(0o755)
        places = [self.folder, self.folder / "training", self.folder / "serving"]
        self.environment = {
            **os.environ, "PYTHONPATH": os.pathsep.join(map(str, places)), "HF_HOME": str(home / "hf"),
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]), "COLUMNS": "200", "HF_HUB_OFFLINE": "1",
        }  # fmt: skip

    def start(self, command: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            ["bash", "-c", f"exec {command}"], cwd=self.folder, env=self.environment, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a test in the background ignores Ctrl-C
        )  # fmt: skip

    def run(self, command: str, status: int = 0) -> str:
        """What it wrote."""
        process = self.start(command)
        output, _ = process.communicate()
        assert process.returncode == status, f"{command}\n{output[-3000:]}"
        return output


@pytest.mark.slow
def test_the_first_day(tmp_path: Path) -> None:
    day = Day(tmp_path)
    write_rows(day.folder / "mine.jsonl", mine(200))
    for name in ("a", "b"):
        (day.folder / f"{name}.txt").write_text("Ada Berg1 keeps bees and lives in Oslo.")
    train = f"{printed('comb train configs/nano.yaml')} {' '.join(SIZES)}"
    assert "frozen" in day.run(printed("comb train configs/nano.yaml --dry-run"))

    run = day.start(train)
    log = day.folder / "out/nano/log.jsonl"
    wait_for(lambda: run.poll() is not None or (log.exists() and log.read_text().count('"loss"') > 3), seconds=300)
    run.send_signal(signal.SIGINT)
    said, _ = run.communicate()
    assert run.returncode == 130, said[-3000:]
    (go_on,) = re.findall(r"comb train .*--resume auto", re.sub(r"\s+", " ", said))
    day.run(go_on)
    steps = [int(step) for step in re.findall(r'"step": (\d+)', log.read_text())]
    assert max(steps) == 24
    assert "is finished" in day.run(go_on, status=1)

    assert "held" in day.run(
        printed("comb eval out/nano --methods full,comb,none --out out/nano/results.json") + " --limit 4"
    )
    pushed = day.run(printed("comb push out/nano me/comb-nano --dry-run"))
    assert "nothing was uploaded to me/comb-nano" in pushed
    assert str(tmp_path) not in pushed
    (program,) = re.findall(r"```python\n(.*?)```", pushed, re.DOTALL)  # of the card
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "use.py").write_text(program.replace("me/comb-nano", str(day.folder / "out/nano")))
    answer = day.run(f"{sys.executable} {elsewhere / 'use.py'}")
    assert answer.splitlines()[-1].strip()
    asked = day.run(printed('comb ask out/nano --doc a.txt --doc b.txt "question"'))
    assert asked.count(".txt: compiled") == 2
