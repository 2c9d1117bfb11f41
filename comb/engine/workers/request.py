"""One request on its way through workers: who compiles what, when one is late, and what of the answers can be used."""

from __future__ import annotations

import heapq
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from comb.cache.picache import PICache, PICacheError, deserialize
from comb.methods.base import Method, MethodSpec

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


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reply:
    """What a worker says to a segment."""

    data: Any = None  # [bytes] uint8 (numpy), the PICache as a file holds it, checksum included; None if there is none
    seconds: float = 0.0  # of compiling
    error: str = ""  # why there is no PICache
    refused: bool = False  # the worker's model or method isn't the one that was asked for


@dataclass
class CompileRequest:
    """Segments, each compiled once; what is lost on the way is compiled here."""

    method: Method
    spec: MethodSpec
    segments: Sequence[tuple[int, ...]]
    counts: Counter[str]  # of the executor's `stats`
    fingerprint: str = field(init=False)  # of the method as the request began
    keys: list[str] = field(init=False)  # results' own: another segment's, or method's, isn't taken for one
    sent: dict[Future[Reply], int] = field(default_factory=dict)  # which segment a worker answers
    lost: list[int] = field(default_factory=list)  # segments to compile here
    picaches: dict[int, PICache] = field(default_factory=dict)
    segment_s: dict[int, float] = field(default_factory=dict)  # of compiling each segment
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by worker; -1: here
    decode_s: float = 0.0  # of checking and unpacking

    def __post_init__(self) -> None:
        self.fingerprint = self.method.fingerprint
        self.keys = self.method.keys_of(self.segments)

    def take(self, worker: int, index: int, reply: Reply) -> bool:
        """Keeps what a worker says to a segment; False if it can't be used, and the segment is lost."""
        start = time.perf_counter()
        try:
            picache = self._checked(index, reply)
        except PICacheError as error:
            kind = "refused" if reply.refused else "failed" if reply.error else "damaged"
            logger.warning("worker %d: a segment is %s (%s): compiling it here", worker, kind, error)
            self.counts[kind] += 1
            self.lost.append(index)
            return False
        self.decode_s += time.perf_counter() - start
        self._keep(worker, index, picache, reply.seconds)
        self.counts["by_workers"] += 1
        return True

    def compile_one(self) -> None:
        """Compiles one of the lost segments here. Raises what ``method.compile`` raises."""
        index = self.lost.pop()
        start = time.perf_counter()
        (picache,) = self.method.compile([self.segments[index]])
        self._keep(-1, index, picache, time.perf_counter() - start)
        self.counts["locally"] += 1

    def _checked(self, index: int, reply: Reply) -> PICache:
        if reply.error:
            raise PICacheError(reply.error)
        device = self.method.backbone.get_input_embeddings().weight.device
        # copied: a store that kept the array would keep it in Ray's object store
        data = np.asarray(reply.data, np.uint8).tobytes()
        picache = deserialize(data, self.keys[index], device)
        if picache.fingerprint != self.fingerprint or picache.num_tokens != len(self.segments[index]):
            raise PICacheError(
                f"{len(self.segments[index])} tokens with fingerprint {self.fingerprint} expected, got {picache!r}"
            )
        return picache

    def _keep(self, worker: int, index: int, picache: PICache, seconds: float) -> None:
        self.picaches[index] = picache
        self.segment_s[index] = seconds
        self.busy_s[worker] += seconds
