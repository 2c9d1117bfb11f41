"""Hands the cold segments of a request to workers, collects and checks what they send, and makes good what is lost."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

from comb.methods.base import Method, Recipe
from comb.parallel.pool import Reply, Task, WorkerLostError, WorkerPool
from comb.parallel.scheduling import Deadline, lpt
from comb.picache import PICache, PICacheError, content_key, deserialize

logger = logging.getLogger(__name__)

_WINDOW = 2  # segments that a worker has at once: one to compile, and the next, so that it never waits for us


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
        encode_s, decode_s: serialising in all workers, and checking and unpacking here; hidden or not.
        segment_s: compile seconds per segment, in order; a segment given twice is compiled once.
    """

    picaches: list[PICache]
    seconds: float
    dispatch_s: float
    transfer_s: float = 0.0
    encode_s: float = 0.0
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
        self._outstanding: dict[int, deque[tuple[int, int]]] = {}  # worker -> (task, tokens), oldest first
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
        recipe, fingerprint = recipe_of(method), method.fingerprint
        with self._lock:
            run = _Run(self, method, recipe, fingerprint, [])
            refusal = run.ask_all()
        if refusal:
            raise ValueError(
                f"the workers don't compile what method {method.name!r} compiles here: {refusal}. They load their model by "
                "name, so it must be the one that the engine has, unchanged; or give an executor with its ModelSource"
            )

    def compile(self, method: Method, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """What ``method.compile(segments)`` returns, computed by the workers.

        Raises:
            ValueError: `method` was not made by `comb.methods.create`, so that no worker could make it.
            Exception: what ``method.compile`` raises for bad segments.
        """
        return self.run(method, segments).picaches

    def run(self, method: Method, segments: Sequence[Sequence[int]]) -> Compiled:
        """`compile`, with where the time went."""
        start = time.perf_counter()
        recipe = recipe_of(method)
        unique = list(dict.fromkeys(tuple(segment) for segment in segments))
        # nothing to spread; an empty segment is an error that the method words best
        if method.keeps_tokens_only or len(unique) < 2 or not all(unique) or self._closed:
            return _local(method, segments, start)
        with self._lock:
            self.count("requests")
            run = _Run(self, method, recipe, method.fingerprint, unique)
            run.finish()
        seconds = time.perf_counter() - start
        places = {segment: index for index, segment in enumerate(unique)}
        order = [places[tuple(segment)] for segment in segments]
        dispatch_s = min(seconds, max(run.busy_s.values(), default=0.0))
        return Compiled(
            [run.picaches[index] for index in order],
            seconds, dispatch_s, seconds - dispatch_s, run.encode_s, run.decode_s,
            tuple(run.segment_s[index] for index in order),
        )  # fmt: skip

    def count(self, name: str, by: int = 1) -> None:
        """Adds to a field of `stats`."""
        self._counts[name] += by

    def close(self) -> None:
        """Ends all workers. Compiles that follow are done here; one under way is finished first."""
        with self._lock:
            self._closed = True
            self.pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def recipe_of(method: Method) -> Recipe:
    """How a worker makes `method`. Raises ValueError if nobody knows."""
    if method.recipe is None:
        raise ValueError(
            f"workers make their own copy of method {method.name!r}, and can't know how this instance was made: give the "
            "engine its name and parameters, or make it with comb.methods.create()"
        )
    return method.recipe


def _local(method: Method, segments: Sequence[Sequence[int]], start: float) -> Compiled:
    picaches = method.compile(segments)
    seconds = time.perf_counter() - start
    return Compiled(picaches, seconds, seconds)


@dataclass
class _Run:
    """One request's segments on their way; `executor`'s lock is held."""

    executor: CompileExecutor
    method: Method
    recipe: Recipe
    fingerprint: str
    segments: Sequence[tuple[int, ...]]
    picaches: dict[int, PICache] = field(default_factory=dict)
    segment_s: dict[int, float] = field(default_factory=dict)
    busy_s: dict[int, float] = field(default_factory=dict)
    encode_s: float = 0.0
    decode_s: float = 0.0
    refusal: str = ""
    _keys: list[str] = field(default_factory=list)
    _queues: dict[int, deque[int]] = field(default_factory=dict)  # worker -> segments not submitted yet
    _flights: dict[int, int] = field(default_factory=dict)  # task -> segment, or -1 for a question
    _due: dict[int, float] = field(default_factory=dict)  # worker -> when its oldest task is late
    _lost: list[int] = field(default_factory=list)  # segments to compile here, the longest last

    # ---- the two things to do ----

    def finish(self) -> None:
        """Every segment has its PICache after this. Raises what ``method.compile`` raises."""
        made_by = self.method.compile_name or self.method.name
        # of this request only: a result that was sent for another one can't be taken for ours
        fields = {"fingerprint": self.fingerprint, "method": made_by, "dtype": self.method.dtype}
        salt = secrets.token_hex(8)
        self._keys = [content_key(segment, salt=salt, **fields) for segment in self.segments]
        self._begin()
        workers = self.executor.pool.ready
        plan = lpt([len(segment) for segment in self.segments], len(workers)) if workers else []
        self._queues = {worker: deque(indices) for worker, indices in zip(workers, plan, strict=True)}
        if not workers:
            logger.warning("no worker is there: all %d segments are compiled here", len(self.segments))
            self._lose(range(len(self.segments)))
        while len(self.picaches) < len(self.segments):
            self._refill()
            self._listen()
            if self._lost:
                self._compile_one()

    def ask_all(self) -> str:
        """Why a worker would refuse, "" if none does."""
        self._begin()
        for worker in self.executor.pool.ready:
            self._submit(worker, -1)
        while self._flights:
            self._listen()
        return self.refusal

    # ---- steps ----

    def _begin(self) -> None:
        """Hears what came since the last run: workers that are back, and results that nobody wants any more."""
        for reply in self.executor.pool.wait(0):
            self._take(reply)
        for worker, tasks in self.executor._outstanding.items():
            if tasks:
                self._set_due(worker)

    def _refill(self) -> None:
        for worker in list(self._queues):
            outstanding = self.executor._outstanding.setdefault(worker, deque())
            while worker in self._queues and self._queues[worker] and len(outstanding) < _WINDOW:
                self._submit(worker, self._queues[worker].popleft())

    def _submit(self, worker: int, index: int) -> None:
        executor = self.executor
        outstanding = executor._outstanding.setdefault(worker, deque())
        executor._numbers += 1
        task = Task(executor._numbers, self.recipe, self.fingerprint)
        if index >= 0:
            task = replace(task, key=self._keys[index], token_ids=self.segments[index])
        self._flights[task.number] = index
        outstanding.append((task.number, len(task.token_ids)))
        if len(outstanding) == 1:
            self._set_due(worker)
        try:
            executor.pool.submit(worker, task)
        except WorkerLostError as error:
            self._give_up(worker, "died", str(error))

    def _listen(self) -> None:
        """Takes what has come, waiting for it unless there is something to do meanwhile; gives up who is late."""
        now = time.monotonic()
        wait_s = 0.0 if self._lost else max(0.0, min(self._due.values(), default=now) - now)
        for reply in self.executor.pool.wait(wait_s):
            self._take(reply)
        now = time.monotonic()
        for worker in [worker for worker, due in self._due.items() if due <= now]:
            self._give_up(worker, "late", "its deadline has passed")

    def _take(self, reply: Reply) -> None:
        worker = reply.worker
        if reply.number is None:
            self._give_up(worker, "died", reply.error)
            return
        outstanding = self.executor._outstanding.setdefault(worker, deque())
        remaining = [task for task in outstanding if task[0] != reply.number]
        outstanding.clear()
        outstanding.extend(remaining)
        self._set_due(worker)
        index = self._flights.pop(reply.number, None)
        if index is None:
            return  # of a request that ended without it
        if reply.refused or (index < 0 and reply.error):
            self._refused(worker, index, reply.error)
        elif reply.error:
            logger.warning("worker %d could not compile a segment (%s): compiling it here", worker, reply.error)
            self.executor.count("failed")
            self._lose([index])
        elif index >= 0:
            self._accept(worker, index, reply)

    def _accept(self, worker: int, index: int, reply: Reply) -> None:
        start = time.perf_counter()
        try:
            picache = self._checked(index, reply.data)
        except PICacheError as error:
            logger.warning("worker %d sent a result that can't be used (%s): compiling it here", worker, error)
            self.executor.count("damaged")
            self._lose([index])
            return
        self.decode_s += time.perf_counter() - start
        self.encode_s += reply.encode_s
        self.executor.count("by_workers")
        self.executor.deadline.observe(len(self.segments[index]), reply.seconds)
        self._done(worker, index, picache, reply.seconds)

    def _checked(self, index: int, data: bytes | None) -> PICache:
        if data is None:
            raise PICacheError("it holds nothing")
        picache = deserialize(data, self._keys[index], _device_of(self.method))
        if picache.fingerprint != self.fingerprint or picache.num_tokens != len(self.segments[index]):
            raise PICacheError(
                f"{len(self.segments[index])} tokens with fingerprint {self.fingerprint} expected, got {picache!r}"
            )
        return picache

    def _done(self, worker: int, index: int, picache: PICache, seconds: float) -> None:
        self.picaches[index] = picache
        self.segment_s[index] = seconds
        self.busy_s[worker] = self.busy_s.get(worker, 0.0) + seconds

    def _compile_one(self) -> None:
        """The longest of the lost segments, here."""
        index = self._lost.pop()
        start = time.perf_counter()
        (picache,) = self.method.compile([self.segments[index]])
        self.executor.count("locally")
        self._done(-1, index, picache, time.perf_counter() - start)

    # ---- what goes wrong ----

    def _lose(self, indices: Sequence[int]) -> None:
        self._lost = sorted({*self._lost, *indices}, key=lambda index: (len(self.segments[index]), -index))

    def _refused(self, worker: int, index: int, why: str) -> None:
        self.refusal = self.refusal or why
        if index < 0:
            return
        mine = [index, *self._queues.pop(worker, ())]  # it would refuse the others too
        logger.warning("worker %d refuses to compile (%s): compiling %d segments here", worker, why, len(mine))
        self.executor.count("refused", len(mine))
        self._lose(mine)

    def _give_up(self, worker: int, how: str, why: str) -> None:
        """Everything that a worker still had is compiled here, and another worker takes its place for later requests."""
        executor = self.executor
        had = [self._flights.pop(number, -1) for number, _ in executor._outstanding.pop(worker, ())]
        self._due.pop(worker, None)
        mine = [index for index in [*had, *self._queues.pop(worker, ())] if index >= 0]
        executor.count(how)
        restarted = executor.pool.replace(worker)
        executor.count("restarted", restarted)
        logger.warning(
            "worker %d is %s (%s): compiling %d segments here, %s", worker, "late" if how == "late" else "dead", why,
            len(mine), "starting another worker" if restarted else "and going on without it",
        )  # fmt: skip
        self._lose(mine)

    def _set_due(self, worker: int) -> None:
        """The clock of a worker's oldest task starts now."""
        outstanding: Any = self.executor._outstanding.get(worker)
        if outstanding:
            self._due[worker] = time.monotonic() + self.executor.deadline.seconds(outstanding[0][1])
        else:
            self._due.pop(worker, None)


def _device_of(method: Method) -> Any:
    return method.backbone.get_input_embeddings().weight.device
