"""LPT keeps its bound, and the simulation adds up."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comb.bench.parallel import replay
from comb.engine.workers.executor import Deadline, Plan, lpt

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
