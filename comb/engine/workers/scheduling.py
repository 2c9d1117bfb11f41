"""Who compiles what, and when a worker is late."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field

Plan = list[list[int]]
"""Per worker, the indices of its segments in the order in which it compiles them."""


def lpt(costs: Sequence[float], workers: int) -> Plan:
    """Longest processing time first: each segment, longest first, onto the worker with the least load.

    The busiest worker's load is at most 4/3 - 1/(3 workers) times the least possible (Graham 1969). Ties go to the
    segment and to the worker with the lower index, so equal input gives an equal plan.

    Source: HYPIC sec. 4.4, eq. 9.
    """
    plan: Plan = [[] for _ in range(workers)]
    loads = [(0.0, worker) for worker in range(workers)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, worker = loads[0]
        plan[worker].append(index)
        heapq.heapreplace(loads, (load + costs[index], worker))
    return plan


@dataclass
class Deadline:
    """How long a worker may take for a segment: a floor, and a multiple of what the slowest one so far has needed.

    A worker that exceeds it is given up and its segments are compiled locally, so a deadline that is too short costs
    time, never an answer.
    """

    floor_s: float = 30.0  # added to every deadline
    factor: float = 4.0  # times the slowest seconds per token seen so far
    first_s: float = 600.0  # used until one segment has come back
    _seconds_per_token: float = field(default=0.0, repr=False)

    def seconds(self, tokens: int) -> float:
        """Seconds after which a segment of so many tokens is late."""
        if not self._seconds_per_token:
            return self.first_s
        return self.floor_s + self.factor * self._seconds_per_token * tokens

    def observe(self, tokens: int, seconds: float) -> None:
        """Learns from a segment that came back."""
        self._seconds_per_token = max(self._seconds_per_token, seconds / tokens)
