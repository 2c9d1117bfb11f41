"""The kernels that serving launches, compiled by the triton that came with this vLLM, against their plain twins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from comb.cli import main as cli
from tests.helpers.gpu_engines import EngineDevice

pytestmark = pytest.mark.gpu


def test_kernels_are_right_and_wrong_ones_are_noticed(device: EngineDevice, tmp_path: Path) -> None:
    """Small sizes; larger ones, and times, are `scripts/bench-gpu`'s."""
    if device.kind == "cpu":
        pytest.skip("a CPU interprets them: scripts/bench-gpu --tiny --device cpu")
    result = CliRunner().invoke(cli.app, ["bench", "kernels", "--tiny", "--out", str(tmp_path / "kernels.json")])
    assert result.exit_code == 0, (result.output, result.exception)
    rows = json.loads((tmp_path / "kernels.json").read_text())["results"]
    assert len(rows) == 12
    assert all(row["error"] < row["bound"] < row["least_wrong"] / 2 for row in rows)
