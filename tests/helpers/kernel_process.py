"""Kernels in processes of their own, as triton decides at its import whether they are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")


def run_interpreted(file: str) -> None:
    """Runs the tests of `file` beside this one under Triton's interpreter: all must pass, none may be skipped."""
    run_alone(file, TRITON_INTERPRET="1")


def run_alone(file: str, **environment: str) -> None:
    """Runs the tests of `file` beside this one in a process of their own: all must pass, none may be skipped."""
    command = ["-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / file)]
    printed = _run(*command, **environment)
    assert " passed" in printed
    assert "skipped" not in printed


def compiled_kernels(file: str) -> str:
    """What the program `file` beside this one prints of the kernels that it compiles for a GPU."""
    return _run(str(HERE / file), TRITON_INTERPRET="0")


def _run(*command: str, **environment: str) -> str:
    path = os.pathsep.join([str(HERE.parents[1]), str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
    result = subprocess.run(
        [sys.executable, *command],
        env={**os.environ, "PYTHONPATH": path, "PYTEST_ADDOPTS": "", **environment},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    return result.stdout
