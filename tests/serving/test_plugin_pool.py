"""The pool in fp8 and the interpreted kernels, each in a real engine."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from tests.helpers.engines import checkpoint, served

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("plugin")]


def test_answers_over_a_pool_in_fp8_are_near_the_librarys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COMB_POOL_DTYPE", "fp8")
    prompt = list(range(5, 25))
    with served(tmp_path, checkpoint(tmp_path, "nano")) as found:
        (pool,) = found.pools
        assert pool.tensor.dtype == torch.float8_e4m3fn
        assert pool.layout.nbytes <= 2**20
        names = ("", "A", "CAB")
        for name, (_, logs) in zip(names, found.ask([(prompt, name) for name in names], tokens=1), strict=True):
            error = abs(logs[0] - found.reference(prompt, name, tokens=1)[1][0])
            assert error < (0.1 if name else 1e-5)
            assert (error > 1e-6) is bool(name)
        assert abs(found.ask([(prompt, "B")], tokens=1)[0][1][0] - found.reference(prompt, "A", tokens=1)[1][0]) > 0.1


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_interpreted_kernels_serve_the_librarys_answers() -> None:
    """Triton decides at its import whether kernels are interpreted, so this runs in a process of its own."""
    file = str(Path(__file__).with_name("interpreted_plugin.py"))
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", file],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTEST_ADDOPTS": ""}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
    assert "2 passed" in done.stdout
