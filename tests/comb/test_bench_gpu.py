"""All sections of `scripts/bench-gpu` at small sizes, interpreted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "bench-gpu"


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed: pip install triton")
def test_the_gpu_benchmarks_run_from_end_to_end(tmp_path: Path) -> None:
    result = subprocess.run(
        [str(SCRIPT), "--tiny", "--device", "cpu"],
        env={**os.environ, "OUT": str(tmp_path), "PYTHON": sys.executable}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    for name, checked, timed in (("mac", 4, 2), ("paged", 4, 4)):
        rows = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        times = [row for row in rows if "kernel_s" in row]
        assert len(rows) == checked + timed
        assert all(row["error"] < row["bound"] < row["least_wrong"] / 2 for row in rows)
        assert not any("fault" in row for row in rows)
        assert len(times) == timed
        assert all(row["bytes_per_s"] > 0 for row in times)
    checks = json.loads((tmp_path / "exact.json").read_text())["results"]
    assert {"encoder", "naive", "cacheblend", "primed"} < {row["method"] for row in checks}
    sections = {"seams": 2, "ipc": 2, "tiers": 2, "decode": 3, "context-length": 4, "hybrid": 2}
    for name, lines in sections.items():
        rows = json.loads((tmp_path / f"{name}.json").read_text())["results"]
        assert len(rows) == lines, name
        assert not any(row.get("refused") for row in rows), name
    judged = json.loads((tmp_path / "summary.json").read_text())
    proven = {one["claim"]: one["proven"] for one in judged}
    exact = ("are right", "attend rightly", "as it was written", "the plain model", "their promises")
    assert [proven[claim] for claim in proven if any(one in claim for one in exact)] == [True] * 6
