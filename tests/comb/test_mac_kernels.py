"""The kernels of MAC attention where there is no GPU: interpreted, compiled for one, and when they aren't taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from comb.kernels.mac.dispatch import why_plain
from tests.helpers.kernel_process import compiled_kernels, needs_triton, run_interpreted

HERE = Path(__file__).parent


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_equal_the_plain_step() -> None:
    run_interpreted("interpreted_mac_kernels.py")


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    assert "_ranges_kernel" in compiled_kernels("compiled_mac_kernels.py")


def test_reasons_for_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(dtype: torch.dtype, keys: torch.dtype | None = None, *, width: int = 8, heads: int = 2) -> str:
        query = torch.zeros(1, heads, width, dtype=dtype)
        some = torch.zeros(1, 1, 3, width, dtype=keys or dtype)
        return why_plain(query, some, some)

    monkeypatch.setattr("comb.kernels.mac.dispatch.has_triton", lambda: True)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert why(torch.float32) == "device cpu"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert why(torch.float32) == why(torch.bfloat16) == ""
    assert why(torch.float64) == "float64 queries, float64 keys"
    assert why(torch.float32, torch.bfloat16) == "float32 queries, bfloat16 keys"
    assert why(torch.float32, width=320) == "heads of more than 256 channels"
    assert why(torch.float32, heads=65) == "more than 64 query heads to a key/value head"
    monkeypatch.setattr("comb.kernels.mac.dispatch.has_triton", lambda: False)
    assert why(torch.float32) == "triton is not installed"


@needs_triton
@pytest.mark.slow
def test_the_gpu_benchmarks_run_from_end_to_end(tmp_path: Path) -> None:
    """All sections of `scripts/bench-gpu` at small sizes, interpreted."""
    result = subprocess.run(
        [str(HERE.parents[1] / "scripts" / "bench-gpu"), "--tiny", "--device", "cpu"],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for name, checked, timed in (("mac", 4, 2), ("paged", 6, 6)):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        times = [row for row in rows if "kernel_s" in row]
        assert len(rows) == checked + timed
        assert all(row["error"] < row["bound"] < row["least_wrong"] / 2 for row in rows)
        assert not any("fault" in row for row in rows)
        assert len(times) == timed
        assert all(row["bytes_per_s"] > 0 for row in times)
    sections = {"seams": 2, "ipc": 2, "tiers": 2, "decode": 3, "context-length": 4, "hybrid": 2}
    for name, lines in sections.items():
        rows = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        assert len(rows) == lines, name
        assert not any(row.get("refused") for row in rows), name
    judged = json.loads((tmp_path / "summary.json").read_text())
    proven = {one["claim"]: one["proven"] for one in judged}
    exact = ("are right", "attend rightly", "as it was written", "the plain model")
    assert [proven[claim] for claim in proven if any(one in claim for one in exact)] == [True] * 5
