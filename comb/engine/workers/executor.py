"""`Method.compile`, spread over workers: who compiles what, when one is late, and what of the answers can be used."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, FIRST_EXCEPTION, Future, wait
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any, Self

import numpy as np

from comb.cache.picache import PICache, PICacheError, deserialize
from comb.methods.base import Method, MethodSpec

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutorStats:
    """Counts since the executor was made."""

    requests: int = 0  # compiles that were spread over workers
    by_workers: int = 0  # segments that workers compiled
    locally: int = 0  # segments compiled here in a worker's stead
    died: int = 0  # workers that ended while they had work
    late: int = 0  # workers given up because a deadline had passed
    damaged: int = 0  # results with a wrong checksum, key, fingerprint or length
    failed: int = 0  # segments for which a worker raised an error
    refused: int = 0  # segments that a worker refused because its model or method is another one
    restarted: int = 0  # workers started anew

    def __str__(self) -> str:
        counted = (f"{name.replace('_', ' ')} {count}" for name, count in asdict(self).items() if count)
        return ", ".join(counted) or "nothing to compile"


@dataclass(frozen=True)
class Compiled:
    """PICaches in the order of the segments, and where the time went (HYPIC Fig. 14)."""

    picaches: list[PICache]
    seconds: float  # from the call to the last PICache
    dispatch_s: float  # computing, of the busiest worker
    transfer_s: float = 0.0  # the rest: what serialising, sending and checking could not hide behind computing


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


@dataclass(frozen=True)
class Reply:
    """What a worker says to a segment."""

    data: Any = None  # [bytes] uint8 (numpy), the PICache as a file holds it, checksum included; None if there is none
    seconds: float = 0.0  # of compiling
    error: str = ""  # why there is no PICache
    refused: bool = False  # the worker's model or method isn't the one that was asked for


class SegmentWorker(ABC):
    """One worker, and what it still has to do.

    Args:
        loaded: done when the worker has its model; raises why it can't have it.
    """

    def __init__(self, loaded: Future[None]) -> None:
        self.loaded = loaded
        self.unanswered: dict[Future[Reply], int] = {}  # oldest first, with the tokens of each; also of failed requests
        self.since = 0.0  # when it began with the oldest of them, by ``time.monotonic``

    @abstractmethod
    def submit(self, spec: MethodSpec, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Future[Reply]:
        """`Compiler.compile` in the worker, in the order of calls. Call or future raise if the worker is lost."""

    @abstractmethod
    def end(self) -> None:
        """Ends it, however busy it is; harmless when called again."""


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
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by worker; -1: here

    def __post_init__(self) -> None:
        self.fingerprint = self.method.fingerprint
        self.keys = self.method.keys_of(self.segments)

    def take(self, worker: int, index: int, reply: Reply) -> bool:
        """Keeps what a worker says to a segment; False if it can't be used, and the segment is lost."""
        tokens = self.method.sink_tokens + len(self.segments[index])
        try:
            if reply.error:
                raise PICacheError(reply.error)
            device = self.method.backbone.get_input_embeddings().weight.device
            # copied: a store that kept the array would keep it in Ray's object store
            picache = deserialize(np.asarray(reply.data, np.uint8).tobytes(), self.keys[index], device)
            if picache.fingerprint != self.fingerprint or picache.num_tokens != tokens:
                raise PICacheError(f"{tokens} tokens with fingerprint {self.fingerprint} expected, got {picache!r}")
        except PICacheError as error:
            kind = "refused" if reply.refused else "failed" if reply.error else "damaged"
            logger.warning("worker %d: a segment is %s (%s): compiling it here", worker, kind, error)
            self.counts[kind] += 1
            self.lost.append(index)
            return False
        self.keep(worker, index, picache, reply.seconds)
        self.counts["by_workers"] += 1
        return True

    def keep(self, worker: int, index: int, picache: PICache, seconds: float) -> None:
        """Takes a segment's PICache, which `worker` has made in so many seconds."""
        self.picaches[index] = picache
        self.busy_s[worker] += seconds


class CompileExecutor:
    """`Method.compile` spread over workers, longest segments first (HYPIC sec. 4.4).

    Whatever happens to a worker, every segment is compiled: a result that is lost, late or damaged, or that the worker
    refuses to make, is made here. Safe under threads; calls take turns.

    Args:
        start: starts one worker, without waiting for it.
        workers: how many; the constructor returns when all have loaded `name`.
        deadline: when a worker is late.
        restarts: how many lost workers are started anew, in all.
        start_timeout_s: within which all must be ready; `late_hint` says what to look at if they aren't.

    Raises:
        ValueError: fewer than one worker.
        RuntimeError: a worker couldn't load the model, or not in time.
    """

    def __init__(
        self,
        start: Callable[[], SegmentWorker],
        workers: int,
        name: str,
        *,
        deadline: Deadline | None = None,
        restarts: int = 3,
        start_timeout_s: float = 600.0,
        late_hint: str = "",
    ) -> None:
        if workers < 1:
            raise ValueError(f"segment parallelism needs at least one worker, got {workers}")
        self.workers = workers
        self.deadline = Deadline() if deadline is None else deadline
        self._start = start
        self._restarts = restarts
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._closed = False
        self._workers: dict[int, SegmentWorker] = {}
        try:
            for index in range(workers):
                self._workers[index] = start()
            done, late = wait([worker.loaded for worker in self._workers.values()], start_timeout_s, FIRST_EXCEPTION)
            for error in filter(None, (future.exception() for future in done)):
                raise RuntimeError(f"a worker could not load {name!r}: {type(error).__name__}: {error}") from error
            if late:
                raise RuntimeError(
                    f"{len(late)} of {workers} workers have not loaded {name!r} in {start_timeout_s:g} s{late_hint}"
                )
        except BaseException:
            self.close()
            raise

    @property
    def ready(self) -> list[SegmentWorker]:
        """Workers that have loaded their model."""
        loaded = [worker for worker in self._workers.values() if worker.loaded.done()]
        return [worker for worker in loaded if worker.loaded.exception() is None]

    @property
    def stats(self) -> ExecutorStats:
        """What has happened so far."""
        return ExecutorStats(**self._counts)

    def check(self, method: Method) -> None:
        """Asks every worker whether it would compile as `method` does.

        Raises:
            ValueError: the workers' model, adapter, dtype or parameters are others, or they can't make the method.
        """
        spec, fingerprint = spec_of(method), method.fingerprint
        asked: list[Future[Reply]] = []
        with self._lock:
            for worker in self.ready:
                with suppress(Exception):  # who is lost is noticed, and replaced, when there is work for it
                    asked.append(worker.submit(spec, fingerprint, "", ()))
            answered = wait(asked, self.deadline.first_s).done
        refusals = [future.result().error for future in answered if future.exception() is None]
        if why := next(filter(None, refusals), ""):
            raise ValueError(
                f"the workers don't compile what method {method.name!r} compiles here: {why}. They load their model "
                "by name, so it must be what the engine has, unchanged; or give an executor with its ModelSource"
            )

    def compile(self, method: Method, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """What ``method.compile(segments)`` returns or raises, computed by the workers.

        Raises:
            ValueError: `method` was not made by `comb.methods.create`, so that no worker could make it.
        """
        return self.run(method, segments).picaches

    def run(self, method: Method, segments: Sequence[Sequence[int]], *, workers: int | None = None) -> Compiled:
        """`compile`, with where the time went; `workers` of them at most take part."""
        start = time.perf_counter()
        spec = spec_of(method)
        unique = list(dict.fromkeys(map(tuple, segments)))
        # a single one is nothing to spread, and an empty one is an error that the method words best
        if method.keeps_tokens_only or len(unique) < 2 or not all(unique) or self._closed:
            picaches = method.compile(segments)
            seconds = time.perf_counter() - start
            return Compiled(picaches, seconds, seconds)
        with self._lock:
            self._counts["requests"] += 1
            request = CompileRequest(method, spec, unique, self._counts)
            for index, worker in list(self._workers.items()):
                if worker.loaded.done() and (error := worker.loaded.exception()) is not None:  # one in another's place
                    logger.warning("worker %d could not be started again: %s", index, error)
                    self._workers.pop(index).end()
            ready = [index for index, worker in self._workers.items() if worker.loaded.done()][:workers]
            if not ready:
                logger.warning("no worker is there: %d segments are compiled here", len(unique))
                request.lost.extend(range(len(unique)))
            plan = lpt([len(segment) for segment in unique], len(ready)) if ready else []
            try:
                for index, own in zip(ready, plan, strict=True):
                    self._send(index, own, request)
                while len(request.picaches) < len(unique):
                    self._listen(request)
                    if request.lost:  # one at a time: workers' answers are looked at in between
                        index, began = request.lost.pop(), time.perf_counter()
                        (picache,) = method.compile([unique[index]])
                        request.keep(-1, index, picache, time.perf_counter() - began)
                        self._counts["locally"] += 1
            finally:
                for future in request.sent:  # nobody wants what is left of a request that fails
                    future.cancel()
        seconds = time.perf_counter() - start
        dispatch_s = min(seconds, max(request.busy_s.values()))
        picaches = [request.picaches[unique.index(tuple(segment))] for segment in segments]
        return Compiled(picaches, seconds, dispatch_s, seconds - dispatch_s)

    def close(self) -> None:
        """Ends all workers. Compiles that follow are done here; one under way is finished first."""
        with self._lock:
            self._closed = True
            while self._workers:
                self._workers.popitem()[1].end()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    # ---- a request's steps; the lock is held ----

    def _send(self, index: int, segments: Sequence[int], request: CompileRequest) -> None:
        worker = self._workers[index]
        for number, segment in enumerate(segments):
            token_ids = request.segments[segment]
            try:
                future = worker.submit(request.spec, request.fingerprint, request.keys[segment], token_ids)
            except Exception as error:  # whatever keeps the segment from getting there
                request.lost.extend(segments[number:])
                self._give_up(index, request, "died", error)
                return
            if not worker.unanswered:
                worker.since = time.monotonic()
            worker.unanswered[future] = len(token_ids)
            request.sent[future] = segment

    def _listen(self, request: CompileRequest) -> None:
        """Takes what has come, waiting for it unless there is something to do meanwhile; gives up who is late."""
        due = [self._due(worker) for worker in self._workers.values() if worker.unanswered]
        wait_s = 0.0 if request.lost else max(0.0, min(due, default=0.0) - time.monotonic())
        wait([future for worker in self._workers.values() for future in worker.unanswered], wait_s, FIRST_COMPLETED)
        for index, worker in list(self._workers.items()):
            for future in [future for future in worker.unanswered if future.done()]:
                if not future.cancelled() and (error := future.exception()) is not None:
                    self._give_up(index, request, "died", error)  # or what it said was lost
                    break
                tokens = worker.unanswered.pop(future)
                worker.since = time.monotonic()
                segment = request.sent.pop(future, None)
                if segment is None:
                    continue  # of a request that failed
                reply = future.result()
                if request.take(index, segment, reply):
                    self.deadline.observe(tokens, reply.seconds)
            else:
                if worker.unanswered and self._due(worker) <= time.monotonic():
                    self._give_up(index, request, "late", TimeoutError("its deadline has passed"))

    def _due(self, worker: SegmentWorker) -> float:
        """When a worker that has something to answer is late."""
        return worker.since + self.deadline.seconds(next(iter(worker.unanswered.values())))

    def _give_up(self, index: int, request: CompileRequest, how: str, why: BaseException) -> None:
        """Everything that a worker still had is compiled here, and another worker takes its place."""
        worker = self._workers.pop(index)
        request.lost += [request.sent.pop(future) for future in worker.unanswered if future in request.sent]
        self._counts[how] += 1
        try:
            worker.end()
            if self._restarts > 0:
                self._workers[index] = self._start()
                self._restarts -= 1
                self._counts["restarted"] += 1
        except Exception:
            logger.exception("worker %d could not be replaced", index)
        logger.warning(
            "worker %d is lost (%s): compiling what it still had here, %s", index, f"{type(why).__name__}: {why}",
            "starting another worker" if index in self._workers else "and going on without it",
        )  # fmt: skip


def spec_of(method: Method) -> MethodSpec:
    """How a worker makes `method`. Raises ValueError if nobody knows."""
    if method.spec is None:
        raise ValueError(
            f"workers make their own copy of method {method.name!r}, and can't know how this instance was made: give "
            "the engine its name and parameters, or make it with comb.methods.create()"
        )
    return method.spec
