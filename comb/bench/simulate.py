"""What other numbers of workers, and other ways to share out segments, would do: pure Python on segment lengths.

A trace is one list of segment lengths per request. Times come from a `CostModel`, which `comb bench parallel` fits to
what it has measured.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import fmean

import numpy

from comb.engine.workers.scheduling import Plan, lpt
from comb.evaluation.table import Row

Trace = Sequence[Sequence[int]]
Policy = Callable[[Sequence[float], int], Plan]


def round_robin(costs: Sequence[float], workers: int) -> Plan:
    """Segments in the order given, to the workers in turn."""
    return [list(range(worker, len(costs), workers)) for worker in range(workers)]


def makespan(costs: Sequence[float], plan: Plan) -> float:
    """The load of the busiest worker."""
    return max((sum(costs[index] for index in indices) for indices in plan), default=0.0)


POLICIES: dict[str, Policy] = {"lpt": lpt, "round-robin": round_robin}


@dataclass(frozen=True)
class CostModel:
    """Seconds of the three stages (HYPIC Fig. 14).

    Args:
        per_token_s, per_token2_s: compiling n tokens takes ``per_token_s * n + per_token2_s * n**2``.
        transfer_per_token_s: taking a finished segment in, one after the other, at the combiner.
        combine_s: linking and the first token, once all is there.
    """

    per_token_s: float = 1.0
    per_token2_s: float = 0.0
    transfer_per_token_s: float = 0.0
    combine_s: float = 0.0

    def compile_s(self, tokens: int) -> float:
        """Seconds to compile a segment."""
        return self.per_token_s * tokens + self.per_token2_s * tokens**2

    @classmethod
    def fitted(cls, measured: Sequence[tuple[int, float]], transfer_per_token_s: float, combine_s: float) -> CostModel:
        """The least-squares line through (tokens, compile seconds) and the origin, with a square term if that helps.

        Raises:
            ValueError: nothing measured.
        """
        if not measured:
            raise ValueError("a cost model is fitted to at least one measured segment, got none")
        tokens, seconds = numpy.array(measured, dtype=float).T
        linear = float(tokens @ seconds / (tokens @ tokens))
        scale = tokens.max()
        powers = numpy.stack([tokens / scale, (tokens / scale) ** 2], axis=1)
        (first, second), _, rank, _ = numpy.linalg.lstsq(powers, seconds, rcond=1e-5)
        if rank == 2 and first > 0 and second > 0:  # else all lengths are alike, and one number is all there is
            return cls(float(first / scale), float(second / scale**2), transfer_per_token_s, combine_s)
        return cls(linear, 0.0, transfer_per_token_s, combine_s)


def replay(lengths: Sequence[int], plan: Plan, costs: CostModel) -> dict[str, float]:
    """One request's seconds to the first token, in all and by stage.

    Workers compile side by side, the combiner takes results in one by one as they come: ``dispatch_s`` is the busiest
    worker, ``transfer_s`` what then still waits to be taken in.
    """
    finished: list[tuple[float, int]] = []
    for indices in plan:
        ends = accumulate(costs.compile_s(lengths[index]) for index in indices)
        finished += zip(ends, (lengths[index] for index in indices), strict=True)
    busiest = max((end for end, _ in finished), default=0.0)
    clock = 0.0
    for end, tokens in sorted(finished):
        clock = max(clock, end) + costs.transfer_per_token_s * tokens
    stages = {"dispatch_s": busiest, "transfer_s": clock - busiest, "combine_s": costs.combine_s}
    return {"ttft_s": clock + costs.combine_s, **stages}


def lower_bound(costs: Sequence[float], workers: int) -> float:
    """No plan's busiest worker has less than the mean load, the longest segment, or two of the workers + 1 longest."""
    ordered = sorted(costs, reverse=True)
    pairs = [ordered[workers - 1] + ordered[workers]] if len(ordered) > workers else []
    return max([sum(costs) / workers, *ordered[:1], *pairs])


def optimum(costs: Sequence[float], workers: int, *, max_nodes: int = 100_000) -> tuple[float, bool]:
    """The least possible load of the busiest worker, and True; or a bound that no plan can be below, and False.

    Branch and bound from the longest segment down, starting from LPT; the bound is all there is where `max_nodes` don't
    suffice.
    """
    bound, best = lower_bound(costs, workers), makespan(costs, lpt(costs, workers))
    ordered, tolerance, nodes = sorted(costs, reverse=True), 1e-9 * max(best, 1.0), 0

    def search(position: int, loads: tuple[float, ...]) -> bool:
        """False if the nodes are used up."""
        nonlocal best, nodes
        nodes += 1
        if nodes > max_nodes:
            return False
        if position == len(ordered):
            best = min(best, max(loads))
            return True
        for load in dict.fromkeys(loads):  # workers with equal loads are the same
            raised = load + ordered[position]
            if raised < best - tolerance:
                rest = list(loads)
                rest.remove(load)
                if not search(position + 1, tuple(sorted([*rest, raised]))):
                    return False
            if best <= bound + tolerance:
                return True
        return True

    if best <= bound + tolerance or search(0, (0.0,) * workers):
        return best, True
    return bound, False


def simulate(trace: Trace, workers: Sequence[int], costs: CostModel, *, max_nodes: int = 20_000) -> list[Row]:
    """Every policy at every number of workers. Policies see token counts, as the executor does; times are `costs`'.

    Returns:
        Means over the requests of the stages and ``ttft_s``; ``speedup`` over one worker; ``over_optimum``, the busiest
        worker's load over the least possible (or its bound), mean and worst; ``exact``, the share of exact optima.

    Raises:
        ValueError: an empty trace or request, a length below 1, or workers outside of 1..64.
    """
    if not trace or not all(trace) or min(map(min, trace)) < 1:
        raise ValueError("a trace needs at least one request, a request one segment, and a segment one token")
    if not workers or not all(1 <= count <= 64 for count in workers):
        raise ValueError(f"the simulation takes 1 to 64 workers, got {list(workers)}")
    rows: list[Row] = []
    serial_s = fmean(replay(lengths, lpt(lengths, 1), costs)["ttft_s"] for lengths in trace)
    for count in workers:
        least = [optimum(lengths, count, max_nodes=max_nodes) for lengths in trace]
        for name, policy in POLICIES.items():
            plans = [policy(lengths, count) for lengths in trace]
            stages = [replay(lengths, plan, costs) for lengths, plan in zip(trace, plans, strict=True)]
            loads = (makespan(lengths, plan) for lengths, plan in zip(trace, plans, strict=True))
            over = [load / best for load, (best, _) in zip(loads, least, strict=True)]
            means = {stage: fmean(request[stage] for request in stages) for stage in stages[0]}
            rows.append(
                {
                    "policy": name, "workers": count, **means, "speedup": serial_s / means["ttft_s"],
                    "over_optimum": fmean(over), "worst_over_optimum": max(over),
                    "exact": fmean(exact for _, exact in least),
                }
            )  # fmt: skip
    return rows


def random_trace(requests: int, segments: int, median: int, *, sigma: float = 0.7, seed: int = 0) -> list[list[int]]:
    """Requests of `segments` lengths drawn from a log-normal distribution, which is how passage lengths look."""
    generator = random.Random(seed)
    return [
        [max(1, round(median * math.exp(generator.gauss(0.0, sigma)))) for _ in range(segments)]
        for _ in range(requests)
    ]


def read_trace(path: str | Path) -> list[list[int]]:
    """A file with one JSON list of segment lengths per line. Raises ValueError naming the first bad line."""
    trace = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if line.strip():
            try:
                trace.append(json.loads(line))
                right = bool(trace[-1]) and all(type(length) is int and length >= 1 for length in trace[-1])
            except (ValueError, TypeError):
                right = False
            if not right:
                raise ValueError(
                    f"{path}, line {number}: expected a JSON list of segment lengths like [512, 80], got {line}"
                )
    if not trace:
        raise ValueError(f"{path} holds no request: expected one JSON list of segment lengths per line")
    return trace
