"""`scripts/test-gpu` where there is no GPU: it fails, and says why in one line."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[1] / "scripts" / "test-gpu"


def refusal(device: str) -> str:
    """What it prints, if that is one line on stderr and it fails."""
    done = subprocess.run(
        [str(SCRIPT)], env={**os.environ, "PYTHON": sys.executable, "COMB_GPU_TESTS_DEVICE": device},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    return line


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_without_a_gpu_it_fails() -> None:
    assert refusal("cuda").startswith("scripts/test-gpu: no CUDA device for ")
    assert refusal("tpu").endswith("COMB_GPU_TESTS_DEVICE is cuda or cpu, not 'tpu'")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="here is vLLM")
def test_without_vllm_it_fails() -> None:
    assert " has no vLLM: " in refusal("cpu")
