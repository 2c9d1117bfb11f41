"""`comb bench parallel` and `comb ask --workers`: what is measured adds up, and the commands run once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from comb.bench.parallel import ParallelOptions, measure_parallel, panels, simulate, tables
from comb.cli import main as cli
from comb.engine.workers import CompileExecutor
from comb.engine.workers.executor import lpt
from comb.evaluation.plot import draw
from comb.evaluation.random_prompts import RandomPrompt
from comb.model.source import ModelSource
from tests.comb.test_parallel_scheduling import makespan
from tests.helpers.parallel import Inside
from tests.helpers.tiny_engine import make_backbone, make_tokenizer

pytestmark = pytest.mark.usefixtures("one_thread")

runner = CliRunner()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench")
    make_backbone().save_pretrained(path)
    make_tokenizer().save_pretrained(path)
    return path


def inside(folder: Path, workers: int, *, lost: bool = False) -> CompileExecutor:
    return CompileExecutor(lambda: Inside(ModelSource(str(folder)), lost=lost), workers, str(folder), restarts=0)


def test_stages_add_up_and_are_simulated(folder: Path, tmp_path: Path) -> None:
    model = ModelSource(str(folder)).load()
    options, prompt = ParallelOptions(repeats=3), RandomPrompt.random(250, 90, 20, 4)
    lengths = [len(segment) for segment in prompt.segments]
    rows = measure_parallel(model, inside(folder, 3), ["naive", "legolink:2"], [1, 3], prompt, options)
    assert [(row["method"], row["workers"]) for row in rows] == [
        ("naive", 1), ("naive", 3), ("legolink:2", 1), ("legolink:2", 3),
    ]  # fmt: skip
    for row in rows:
        stages = row["dispatch_s"].low + row["transfer_s"].low + row["combine_s"].low
        assert 0 < stages <= row["ttft_s"].high
        if row["workers"] == 1:
            assert (row["speedup"].low, row["speedup"].high) == (1.0, 1.0)
            assert 0 < row["combine_share"].median < 1
            assert row["segments_s"] == pytest.approx([1e-6 * length for length in lengths])
        assert row["dispatch_s"].median == pytest.approx(1e-6 * makespan(lengths, lpt(lengths, row["workers"])))
    simulated = list(simulate(rows, [1, 4]))
    assert [(row["method"], row["workers"]) for row in simulated] == [
        ("naive", 1), ("naive", 4), ("legolink:2", 1), ("legolink:2", 4),
    ]  # fmt: skip
    assert simulated[0]["speedup"] == 1 <= simulated[1]["speedup"]
    assert simulated[1]["dispatch_s"] == pytest.approx(1e-6 * makespan(lengths, lpt(lengths, 4)))
    text = "".join(table.markdown() for table in tables([*rows, *simulated]))
    assert "| naive | 3 |" in text
    assert "| naive | 4 |" in text
    pytest.importorskip("matplotlib")
    assert draw(panels([*rows, *simulated]), tmp_path / "plot.png").stat().st_size > 1000


def test_no_time_is_shown_when_workers_are_lost_or_wrong(folder: Path) -> None:
    model = ModelSource(str(folder)).load()
    prompt = RandomPrompt.random(250, 30, 10, 4)

    def measure(executor: CompileExecutor, workers: list[int]) -> Any:
        return measure_parallel(model, executor, ["naive"], workers, prompt, ParallelOptions(repeats=1))

    with pytest.raises(ValueError, match="no times of workers"):
        measure(inside(folder, 2, lost=True), [1, 2])
    for workers in ([2], [1, 3], []):
        with pytest.raises(ValueError, match="from 1 to 2"):
            measure(inside(folder, 2), workers)
    with torch.no_grad():
        model.get_input_embeddings().weight[:100] += 1.0
    with pytest.raises(ValueError, match="workers don't compile"):
        measure(inside(folder, 2), [1, 2])
    for wrong in (["--segments", "1"], ["--segment-tokens", "0"], ["--query-tokens", "0"]):
        assert "Invalid value" in runner.invoke(cli.app, ["bench", "parallel", *wrong]).output


def test_the_commands(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers in this process; over Ray: test_parallel_ray.py."""

    def executor(source: ModelSource, workers: int, **options: Any) -> CompileExecutor:
        return CompileExecutor(lambda: Inside(source), workers, source.name)

    monkeypatch.setattr("comb.engine.workers.ray_actors.ray_executor", executor)
    monkeypatch.setattr("comb.engine.workers.ray_actors.ray_executor", executor)
    out = tmp_path / "out.json"
    result = runner.invoke(
        cli.app,
        [
            "bench", "parallel", "--layers", "2", "--hidden", "32", "--heads", "4", "--kv-heads", "2", "--vocab", "64",
            "--segment-tokens", "16", "--segments", "4", "--repeats", "1", "--methods", "naive", "--beyond", "1,4",
            "--out", str(out),
        ],
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    content = json.loads(out.read_text())
    measured = [r for r in content["results"] if r["kind"] == "measured"]
    assert [(r["method"], r["workers"]) for r in measured] == [("naive", 1), ("naive", 2)]
    assert len(content["load_before"]) == 3
    (tmp_path / "a.txt").write_text("The lake is deep.")
    (tmp_path / "b.txt").write_text("Rill is a city.")
    documents = ["--doc", str(tmp_path / "a.txt"), "--doc", str(tmp_path / "b.txt")]
    asked = runner.invoke(
        cli.app,
        ["ask", str(folder), "How?", *documents, "--method=naive", "--workers=2", "--max-new-tokens=3"],
    )
    assert asked.exit_code == 0, asked.output
    assert "workers 2: requests 1, by workers 2" in asked.output
