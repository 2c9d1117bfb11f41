"""`comb bench parallel` and `comb ask --workers`: what is measured adds up, and the commands run once."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from comb.bench.parallel import ParallelOptions, measure_parallel, panels, replay, simulate, tables
from comb.cli import main as cli
from comb.engine.workers import CompileExecutor
from comb.engine.workers.executor import Deadline, Plan, lpt
from comb.evaluation.plot import draw
from comb.evaluation.random_prompts import RandomPrompt
from comb.model.source import ModelSource
from tests.helpers.parallel import Inside

pytestmark = pytest.mark.usefixtures("one_thread")
runner = CliRunner()


def inside(folder: Path, workers: int, *, lost: bool = False) -> CompileExecutor:
    return CompileExecutor(lambda: Inside(ModelSource(str(folder)), lost=lost), workers, str(folder), restarts=0)


def test_stages_add_up_and_are_simulated(backbone_folder: Path, tmp_path: Path) -> None:
    model = ModelSource(str(backbone_folder)).load()
    options, prompt = ParallelOptions(repeats=3), RandomPrompt.random(250, 90, 20, 4)
    lengths = [len(segment) for segment in prompt.segments]
    rows = measure_parallel(model, inside(backbone_folder, 3), ["naive", "legolink:2"], [1, 3], prompt, options)
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


def test_no_time_is_shown_when_workers_are_lost_or_wrong(backbone_folder: Path) -> None:
    model = ModelSource(str(backbone_folder)).load()
    prompt = RandomPrompt.random(250, 30, 10, 4)

    def measure(executor: CompileExecutor, workers: list[int]) -> Any:
        return measure_parallel(model, executor, ["naive"], workers, prompt, ParallelOptions(repeats=1))

    with pytest.raises(ValueError, match="no times of workers"):
        measure(inside(backbone_folder, 2, lost=True), [1, 2])
    for workers in ([2], [1, 3], []):
        with pytest.raises(ValueError, match="from 1 to 2"):
            measure(inside(backbone_folder, 2), workers)
    with torch.no_grad():
        model.get_input_embeddings().weight[:100] += 1.0
    with pytest.raises(ValueError, match="workers don't compile"):
        measure(inside(backbone_folder, 2), [1, 2])
    for wrong in (["--segments", "1"], ["--segment-tokens", "0"], ["--query-tokens", "0"]):
        assert "Invalid value" in runner.invoke(cli.app, ["bench", "parallel", *wrong]).output


def test_the_commands(backbone_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With workers in this process; over Ray: test_parallel_ray.py."""

    def executor(source: ModelSource, workers: int, **options: Any) -> CompileExecutor:
        return CompileExecutor(lambda: Inside(source), workers, source.name)

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
        ["ask", str(backbone_folder), "How?", *documents, "--method=naive", "--workers=2", "--max-new-tokens=3"],
    )
    assert asked.exit_code == 0, asked.output
    assert "workers 2: requests 1, by workers 2" in asked.output


# ---- LPT keeps its bound, and the simulation adds up.


COSTS = st.lists(st.integers(1, 4000), min_size=1, max_size=8)
WORKERS = st.integers(1, 5)


def makespan(costs: list[int], plan: Plan) -> int:
    """The load of the busiest worker."""
    return max(sum(costs[index] for index in indices) for indices in plan)


def best_of_all(costs: list[int], workers: int) -> float:
    """The least load of the busiest worker, over every assignment there is."""
    return min(
        max(
            sum(cost for cost, place in zip(costs, places, strict=True) if place == worker) for worker in range(workers)
        )
        for places in itertools.product(range(workers), repeat=len(costs))
    )


@given(COSTS, WORKERS)
def test_a_plan_holds_every_segment_once_and_is_deterministic(costs: list[int], workers: int) -> None:
    plan = lpt(costs, workers)
    assert len(plan) == workers
    assert sorted(index for indices in plan for index in indices) == list(range(len(costs)))
    assert plan == lpt(costs, workers)
    for indices in plan:  # each worker has its longest first
        assert [costs[index] for index in indices] == sorted((costs[index] for index in indices), reverse=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_lpt_is_within_its_bound_of_the_best_of_all_plans(costs: list[int], workers: int) -> None:
    least = best_of_all(costs, workers)
    assert makespan(costs, lpt(costs, workers)) <= (4 / 3 - 1 / (3 * workers)) * least + 1e-9


def test_lpt_reaches_its_bound() -> None:
    costs = [5, 5, 4, 4, 3, 3, 3]  # Graham's worst case for three workers: 11 against 9
    assert makespan(costs, lpt(costs, 3)) == 11
    assert best_of_all(costs, 3) == 9
    assert lpt([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]


def test_a_deadline_follows_the_slowest_segment() -> None:
    deadline = Deadline(floor_s=2, factor=3, first_s=50)
    assert deadline.seconds(1000) == 50
    deadline.observe(100, 1.0)
    deadline.observe(1000, 1.0)  # a faster one doesn't shorten it
    assert deadline.seconds(200) == pytest.approx(2 + 3 * 0.01 * 200)


def test_replay_overlaps_transfers_with_computing() -> None:
    serial = replay([[0, 1, 2]], [10, 10, 10], 1.0, 5.0)
    # the last one's only
    assert serial == {"dispatch_s": 30, "transfer_s": pytest.approx(1), "combine_s": 5, "ttft_s": pytest.approx(36)}
    burst = replay([[0], [1], [2], []], [10, 10, 10], 1.0, 5.0)
    assert (burst["dispatch_s"], burst["transfer_s"]) == (10, pytest.approx(3))  # all at once, taken in one by one
    assert burst["ttft_s"] == pytest.approx(18)


def test_equal_segments_are_the_papers_formula() -> None:
    """O(ceil(n / m) |C| + c), HYPIC sec. 4.4."""
    for workers, parts in ((1, 11), (2, 6), (4, 3), (8, 2), (16, 1), (64, 1)):
        assert replay(lpt([1.0] * 11, workers), [1.0] * 11, 0.0, 0.5)["ttft_s"] == pytest.approx(parts + 0.5)
