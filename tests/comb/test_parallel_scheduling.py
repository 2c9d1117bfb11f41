"""LPT keeps its bound, the optimum is one, and the simulation adds up."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comb.bench.simulate import (
    CostModel,
    lower_bound,
    makespan,
    optimum,
    random_trace,
    read_trace,
    replay,
    round_robin,
    simulate,
)
from comb.engine.workers.scheduling import Deadline, lpt

COSTS = st.lists(st.integers(1, 4000), min_size=1, max_size=8)
WORKERS = st.integers(1, 5)


def best_of_all(costs: list[int], workers: int) -> float:
    """The naive twin of `optimum`: every assignment there is."""
    return min(
        max(
            sum(cost for cost, place in zip(costs, places, strict=True) if place == worker) for worker in range(workers)
        )
        for places in itertools.product(range(workers), repeat=len(costs))
    )


@given(COSTS, WORKERS)
def test_a_plan_holds_every_segment_once_and_is_deterministic(costs: list[int], workers: int) -> None:
    for policy in (lpt, round_robin):
        plan = policy(costs, workers)
        assert len(plan) == workers
        assert sorted(index for indices in plan for index in indices) == list(range(len(costs)))
        assert plan == policy(costs, workers)
    for indices in lpt(costs, workers):  # each worker has its longest first
        assert [costs[index] for index in indices] == sorted((costs[index] for index in indices), reverse=True)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 60), min_size=1, max_size=7), st.integers(1, 3))
def test_optimum_is_the_best_of_all_plans_and_lpt_is_within_its_bound(costs: list[int], workers: int) -> None:
    least = best_of_all(costs, workers)
    assert optimum(costs, workers) == (least, True)
    assert lower_bound(costs, workers) <= least
    assert makespan(costs, lpt(costs, workers)) <= (4 / 3 - 1 / (3 * workers)) * least + 1e-9


def test_lpt_reaches_its_bound_and_round_robin_exceeds_it() -> None:
    costs = [5, 5, 4, 4, 3, 3, 3]  # Graham's worst case for three workers: 11 against 9
    assert makespan(costs, lpt(costs, 3)) == 11
    assert optimum(costs, 3)[0] == 9
    uneven = [10, 1, 10, 1, 10, 1]
    assert makespan(uneven, round_robin(uneven, 2)) == 30
    assert makespan(uneven, round_robin(uneven, 2)) > (4 / 3) * optimum(uneven, 2)[0]
    assert lpt([2, 2, 2, 2], 2) == [[0, 2], [1, 3]]


def test_where_the_search_gives_up_the_optimum_is_a_bound() -> None:
    generator = random.Random(3)
    costs = [generator.randint(100, 200) for _ in range(40)]
    value, exact = optimum(costs, 7, max_nodes=50)
    assert not exact
    assert value == lower_bound(costs, 7) <= makespan(costs, lpt(costs, 7))


def test_plans_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one worker"):
        lpt([1], 0)
    with pytest.raises(ValueError, match="at least 0"):
        lpt([1, -1], 2)
    with pytest.raises(ValueError, match="first_s"):
        Deadline(first_s=0)


def test_a_deadline_follows_the_slowest_segment() -> None:
    deadline = Deadline(floor_s=2, factor=3, first_s=50)
    assert deadline.seconds(1000) == 50
    deadline.observe(100, 1.0)
    deadline.observe(1000, 1.0)  # a faster one doesn't shorten it
    assert deadline.seconds(200) == pytest.approx(2 + 3 * 0.01 * 200)


def test_replay_overlaps_transfers_with_computing() -> None:
    costs = CostModel(per_token_s=1.0, transfer_per_token_s=0.1, combine_s=5.0)
    serial = replay([10, 10, 10], [[0, 1, 2]], costs)
    # the last one's only
    assert serial == {"dispatch_s": 30, "transfer_s": pytest.approx(1), "combine_s": 5, "ttft_s": pytest.approx(36)}
    burst = replay([10, 10, 10], [[0], [1], [2]], costs)
    assert (burst["dispatch_s"], burst["transfer_s"]) == (10, pytest.approx(3))  # all at once, taken in one by one
    assert burst["ttft_s"] == pytest.approx(18)
    assert CostModel(1.0, 0.5).compile_s(4) == 12


def test_simulation_with_equal_segments_is_the_papers_formula() -> None:
    """O(ceil(n / m) |C| + c), HYPIC sec. 4.4."""
    results = simulate([[100] * 11], [1, 2, 4, 8, 16, 64], CostModel(per_token_s=0.01, combine_s=0.5))
    by_workers = {row["workers"]: row for row in results if row["policy"] == "lpt"}
    for workers, parts in ((1, 11), (2, 6), (4, 3), (8, 2), (16, 1), (64, 1)):
        assert by_workers[workers]["ttft_s"] == pytest.approx(parts * 1.0 + 0.5)
        assert by_workers[workers]["speedup"] == pytest.approx(11.5 / (parts + 0.5))
        assert by_workers[workers]["over_optimum"] == pytest.approx(1.0)


def test_simulation_of_uneven_segments_prefers_lpt() -> None:
    trace = random_trace(20, 11, 480, seed=1)
    assert trace == random_trace(20, 11, 480, seed=1)
    results = simulate(trace, [2, 4, 8], CostModel(per_token_s=1e-3))
    for workers in (2, 4, 8):
        ours, theirs = (row for row in results if row["workers"] == workers)
        assert (ours["policy"], theirs["policy"]) == ("lpt", "round-robin")
        assert 1 <= ours["over_optimum"] < theirs["over_optimum"]
        assert ours["worst_over_optimum"] <= 4 / 3 - 1 / (3 * workers) + 1e-9 or ours["exact"] < 1
        assert ours["speedup"] > theirs["speedup"]


def test_a_cost_model_is_fitted_to_what_was_measured() -> None:
    square = CostModel.fitted([(n, 0.01 * n + 0.0001 * n * n) for n in (50, 100, 200, 400)], 0.0, 1.0)
    assert square.per_token_s == pytest.approx(0.01)
    assert square.per_token2_s == pytest.approx(0.0001)
    flat = CostModel.fitted([(100, 1.0), (100, 3.0)], 0.0, 1.0)
    assert (flat.per_token_s, flat.per_token2_s) == (pytest.approx(0.02), 0.0)
    with pytest.raises(ValueError, match="at least one"):
        CostModel.fitted([], 0.0, 0.0)


def test_traces_are_read_and_checked(tmp_path: Path) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text("[512, 80]\n\n[7]\n")
    assert read_trace(file) == [[512, 80], [7]]
    for bad in ("[512, 0]", "[]", "512", "[1.5]", "no", "[true]"):
        file.write_text(f"[5]\n{bad}\n")
        with pytest.raises(ValueError, match="line 2"):
            read_trace(file)
    file.write_text("\n")
    with pytest.raises(ValueError, match="no request"):
        read_trace(file)
    for trace, workers in (([], [1]), ([[]], [1]), ([[1]], [65]), ([[1]], []), ([[0]], [1])):
        with pytest.raises(ValueError):
            simulate(trace, workers, CostModel())
