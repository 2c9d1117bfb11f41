"""`Method.compile`, spread over workers."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from comb.cache.picache import PICache
from comb.engine.workers.pool import WorkerPool
from comb.engine.workers.run import Run
from comb.engine.workers.scheduling import Deadline
from comb.methods.base import Method, MethodSpec


@dataclass(frozen=True)
class ExecutorStats:
    """Counts since the executor was made.

    Args:
        requests: compiles that were spread over workers.
        by_workers: segments that workers compiled.
        locally: segments compiled here in a worker's stead.
        died: workers that ended while they had work.
        late: workers given up because a deadline had passed.
        damaged: results that could not be used: a checksum, a key, a fingerprint or a length that was wrong.
        failed: segments for which a worker raised an error.
        refused: segments that a worker refused because its model or method is another one.
        restarted: workers started anew.
    """

    requests: int = 0
    by_workers: int = 0
    locally: int = 0
    died: int = 0
    late: int = 0
    damaged: int = 0
    failed: int = 0
    refused: int = 0
    restarted: int = 0

    def to_dict(self) -> dict[str, int]:
        """Plain values, for JSON."""
        return asdict(self)

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {count}" for name, count in self.to_dict().items() if count)


@dataclass(frozen=True)
class Compiled:
    """PICaches in the order of the segments, and where the time went (HYPIC Fig. 14).

    Args:
        seconds: from the call to the last PICache.
        dispatch_s: computing, of the busiest worker.
        transfer_s: the rest of `seconds`: what serialising, sending and checking could not hide behind computing.
        decode_s: checking and unpacking here, hidden behind computing or not.
        segment_s: compile seconds per segment, in order; a segment given twice is compiled once.
    """

    picaches: list[PICache]
    seconds: float
    dispatch_s: float
    transfer_s: float = 0.0
    decode_s: float = 0.0
    segment_s: tuple[float, ...] = ()


class CompileExecutor:
    """`Method.compile` spread over a pool of workers, longest segments first (HYPIC sec. 4.4).

    Whatever happens to a worker, every segment is compiled: a result that is lost, late or damaged, or that the worker
    refuses to make, is made here. Safe under threads; calls take turns.

    Args:
        pool: whose workers it owns from now on.
        deadline: when a worker is late.
    """

    def __init__(self, pool: WorkerPool, *, deadline: Deadline | None = None) -> None:
        self.pool = pool
        self.deadline = Deadline() if deadline is None else deadline
        self._lock = threading.RLock()
        self._counts: dict[str, int] = asdict(ExecutorStats())
        self._numbers = 0
        self.outstanding: dict[int, deque[tuple[int, int]]] = {}
        """Per worker, (task number, tokens) of what it hasn't answered, oldest first; outlives a failed request."""
        self._closed = False

    @property
    def workers(self) -> int:
        """Workers that there are meant to be."""
        return self.pool.size

    @property
    def stats(self) -> ExecutorStats:
        """What has happened so far."""
        return ExecutorStats(**self._counts)

    def check(self, method: Method) -> None:
        """Asks every worker whether it would compile as `method` does.

        Raises:
            ValueError: the workers' model, adapter, dtype or parameters are others, or they can't make the method.
        """
        recipe, fingerprint = spec_of(method), method.fingerprint
        with self._lock:
            run = Run(self, method, recipe, fingerprint, [])
            refusal = run.ask_all()
        if refusal:
            raise ValueError(
                f"the workers don't compile what method {method.name!r} compiles here: {refusal}. They load their "
                "model by name, so it must be what the engine has, unchanged; or give an executor with its ModelSource"
            )

    def compile(self, method: Method, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """What ``method.compile(segments)`` returns, computed by the workers.

        Raises:
            ValueError: `method` was not made by `comb.methods.create`, so that no worker could make it.
            Exception: what ``method.compile`` raises for bad segments.
        """
        return self.run(method, segments).picaches

    def run(self, method: Method, segments: Sequence[Sequence[int]], *, workers: int | None = None) -> Compiled:
        """`compile`, with where the time went; `workers` of them at most take part."""
        start = time.perf_counter()
        recipe = spec_of(method)
        unique = list(dict.fromkeys(tuple(segment) for segment in segments))
        # nothing to spread; an empty segment is an error that the method words best
        if method.keeps_tokens_only or len(unique) < 2 or not all(unique) or self._closed:
            return _local(method, segments, start)
        with self._lock:
            self.count("requests")
            run = Run(self, method, recipe, method.fingerprint, unique)
            run.finish(workers)
        seconds = time.perf_counter() - start
        places = {segment: index for index, segment in enumerate(unique)}
        order = [places[tuple(segment)] for segment in segments]
        dispatch_s = min(seconds, max(run.busy_s.values(), default=0.0))
        return Compiled(
            [run.picaches[index] for index in order],
            seconds, dispatch_s, seconds - dispatch_s, run.decode_s,
            tuple(run.segment_s[index] for index in order),
        )  # fmt: skip

    def count(self, name: str, by: int = 1) -> None:
        """Adds to a field of `stats`."""
        self._counts[name] += by

    def next_number(self) -> int:
        """A task number that was never used before."""
        self._numbers += 1
        return self._numbers

    def close(self) -> None:
        """Ends all workers. Compiles that follow are done here; one under way is finished first."""
        with self._lock:
            self._closed = True
            self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def spec_of(method: Method) -> MethodSpec:
    """How a worker makes `method`. Raises ValueError if nobody knows."""
    if method.spec is None:
        raise ValueError(
            f"workers make their own copy of method {method.name!r}, and can't know how this instance was made: give "
            "the engine its name and parameters, or make it with comb.methods.create()"
        )
    return method.spec


def _local(method: Method, segments: Sequence[Sequence[int]], start: float) -> Compiled:
    picaches = method.compile(segments)
    seconds = time.perf_counter() - start
    return Compiled(picaches, seconds, seconds)
