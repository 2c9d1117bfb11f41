"""What `scripts/test-gpu` runs on a GPU runs here on a CPU, as far as that goes: it tests the tests, not the claims."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-gpu"


def test_they_run_on_a_cpu() -> None:
    environment = {**os.environ, "PYTHON": sys.executable, "COMB_GPU_TESTS_DEVICE": "cpu", "PYTEST_ADDOPTS": ""}
    done = subprocess.run(
        [str(SCRIPT), "-p", "no:cacheprovider", "-p", "no:xdist"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    # adapters in two shapes, linked documents, the server; left out are kernels, graphs, IPC and two ranks
    assert "3 passed, 11 skipped" in done.stdout, done.stdout[-3000:]
