"""Kernels compiled for a GPU where there is none: those of 16 bits spill nothing (the programs say what each takes)."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HELPERS = Path(__file__).parents[1] / "helpers"
pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")


@pytest.mark.parametrize(
    ("program", "kernels"),
    [
        ("compiled_mac_kernels.py", ["match", "ranges", "complete"]),
        ("compiled_paged_kernels.py", ["paged", "paged_merge"]),
    ],
)
def test_kernels_compile_for_a_gpu(program: str, kernels: list[str]) -> None:
    path = os.pathsep.join([str(HELPERS.parents[1]), str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, str(HELPERS / program)],
        env={**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    print(done.stdout)  # registers, spills, tiles in flight
    assert [name for name in kernels if f"_{name}_kernel" not in done.stdout] == []
