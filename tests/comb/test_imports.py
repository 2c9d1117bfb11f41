"""Imports go one way, and the library stays light."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
from pathlib import Path

import pytest

import comb

ROOT = Path(__file__).parents[2]
HEAVY = ("vllm", "deepspeed", "datasets", "triton", "peft", "matplotlib", "wandb", "ray")


def imported(folder: Path) -> dict[str, set[str]]:
    """Every package that a file below `folder` imports, anywhere in it, and by which files."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
            for name in names:
                found.setdefault(name.split(".")[0], set()).add(str(path.relative_to(ROOT)))
    return found


@pytest.mark.parametrize(
    ("folder", "forbidden"),
    [
        ("comb", ("comb_training", "comb_serving")),
        ("training/comb_training", ("comb_serving",)),
        ("serving/comb_serving", ("comb_training",)),
    ],
)
def test_imports_go_one_way(folder: str, forbidden: tuple[str, ...]) -> None:
    found = imported(ROOT / folder)
    assert found or folder.startswith("serving")
    assert {name: found[name] for name in forbidden if name in found} == {}


def test_importing_comb_pulls_in_nothing_heavy() -> None:
    # torch imports triton wherever it is installed: here it can't, and comb must do without
    code = f"import sys; sys.modules['triton'] = None; import comb; print([n for n in {HEAVY} if sys.modules.get(n)])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("[]"), result.stdout


def test_no_pickle_anywhere() -> None:
    for folder in ("comb", "serving", "training"):
        found = imported(ROOT / folder)
        assert not {"pickle", "dill", "cloudpickle", "marshal"} & found.keys()


def test_errors_that_the_engine_names_can_be_imported_from_comb() -> None:
    methods = (getattr(comb.PICEngine, name).__doc__ or "" for name in vars(comb.PICEngine) if name[0] != "_")
    named = {name for text in methods for name in re.findall(r"\w+Error", text)}
    assert "UnknownDocumentError" in named
    assert not [name for name in named if not hasattr(comb, name) and not hasattr(builtins, name)]
