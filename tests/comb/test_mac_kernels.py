"""The kernels of MAC attention where there is no GPU: interpreted, compiled for one, and when they aren't taken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.dispatch import why_plain
from comb.kernels.mac.state import MacState
from tests.helpers.kernel_process import compiled_kernels, needs_triton, run_interpreted

HERE = Path(__file__).parent


@needs_triton
@pytest.mark.slow
def test_interpreted_kernels_equal_the_plain_step() -> None:
    run_interpreted("interpreted_mac_kernels.py")


@needs_triton
@pytest.mark.slow
def test_kernels_compile_for_a_gpu() -> None:
    printed = compiled_kernels("compiled_mac_kernels.py")
    for name in ("match", "select", "schedule", "attend", "merge"):
        assert f"_{name}_kernel" in printed


def test_reasons_for_the_plain_step(monkeypatch: pytest.MonkeyPatch) -> None:
    def why(dtype: torch.dtype, keys: torch.dtype | None = None, *, width: int = 8, heads: int = 2) -> str:
        query = torch.zeros(1, heads, width, dtype=dtype)
        state = MacState.empty(1, heads, width, width, MacConfig(window=4), query)
        some = torch.zeros(1, 1, 3, width, dtype=keys or dtype)
        return why_plain(state, query, some, some)

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


def benchmarked(out: Path, *options: str) -> tuple[dict[str, Any], str]:
    """What the benchmark writes at small sizes, interpreted, and what it says."""
    command = [str(HERE.parents[1] / "scripts" / "bench-mac-gpu"), "--tiny", "--device", "cpu", *options]
    result = subprocess.run(
        command, env={**os.environ, "OUT": str(out), "PYTHON": sys.executable}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads((out / "mac-gpu.json").read_text()), result.stdout


@needs_triton
@pytest.mark.slow
def test_the_gpu_benchmark_runs_from_end_to_end(tmp_path: Path) -> None:
    content, _ = benchmarked(tmp_path)
    assert [item["failed"] for item in content["checks"]] == [""] * len(content["checks"])
    points = {(item["context"], item["rows"], item["hit_rate"]): item for item in content["results"]}
    assert points.keys() == {(c, b, rate) for c in (48, 96) for b in (1, 2) for rate in (0.0, 1.0)}
    for (context, _, rate), point in points.items():
        assert point["read_share"] == 1 if rate == 0 else 8 / context < point["read_share"] <= 23 / context
        assert (point["skip_ratio"] > 0) is (rate == 1)
    assert list(content["left_out"]) in (["cudnn, grouped"], ["cudnn, grouped", "costs"])
    assert [item["context"] for item in content["stages"]] == [48, 96]
    assert (tmp_path / "mac-gpu.png").stat().st_size > 1000


@needs_triton
@pytest.mark.slow
def test_the_gpu_benchmark_says_what_it_had_no_time_for(tmp_path: Path) -> None:
    content, printed = benchmarked(tmp_path, "--seconds", "0")
    assert content["results"] == content["stages"] == []
    assert {"stages at 48", "1 x 48", "1 x 96", "2 x 48", "2 x 96"} <= content["left_out"].keys()
    assert "left out: 2 x 96: time is up after 0 s" in printed
    assert not (tmp_path / "mac-gpu.png").exists()
