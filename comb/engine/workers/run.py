"""One request on its way: its segments handed to workers, what they send checked, what is lost made good here."""

from __future__ import annotations

import logging
import secrets
import time
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from comb.cache.picache import PICache, content_key
from comb.cache.picache_file import PICacheError, deserialize
from comb.engine.workers.pool import Reply, Task
from comb.engine.workers.scheduling import lpt
from comb.methods.base import Method, MethodSpec

if TYPE_CHECKING:
    from comb.engine.workers.executor import CompileExecutor

logger = logging.getLogger(__name__)

_WINDOW = 2  # segments that a worker has at once: one to compile, and the next, so that it never waits for us


@dataclass
class Run:
    """One request's segments on their way; `executor`'s lock is held."""

    executor: CompileExecutor
    method: Method
    recipe: MethodSpec
    fingerprint: str
    segments: Sequence[tuple[int, ...]]
    picaches: dict[int, PICache] = field(default_factory=dict)
    segment_s: dict[int, float] = field(default_factory=dict)
    busy_s: dict[int, float] = field(default_factory=dict)
    decode_s: float = 0.0
    refusal: str = ""
    _keys: list[str] = field(default_factory=list)
    _queues: dict[int, deque[int]] = field(default_factory=dict)  # worker -> segments not submitted yet
    _flights: dict[int, int] = field(default_factory=dict)  # task -> segment, or -1 for a question
    _due: dict[int, float] = field(default_factory=dict)  # worker -> when its oldest task is late
    _lost: list[int] = field(default_factory=list)  # segments to compile here, the longest last

    # ---- the two things to do ----

    def finish(self, most: int | None = None) -> None:
        """Every segment has its PICache after this, by `most` workers. Raises what ``method.compile`` raises."""
        made_by = self.method.compile_name or self.method.name
        # of this request only: a result that was sent for another one can't be taken for ours
        fields = {"fingerprint": self.fingerprint, "method": made_by, "dtype": self.method.dtype}
        salt = secrets.token_hex(8)
        self._keys = [content_key(segment, salt=salt, **fields) for segment in self.segments]
        self._begin()
        workers = self.executor.pool.ready[:most]
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
        self._hear(0)
        for worker, tasks in self.executor.outstanding.items():
            if tasks:
                self._set_due(worker)

    def _refill(self) -> None:
        for worker in list(self._queues):
            outstanding = self.executor.outstanding.setdefault(worker, deque())
            while worker in self._queues and self._queues[worker] and len(outstanding) < _WINDOW:
                self._submit(worker, self._queues[worker].popleft())

    def _submit(self, worker: int, index: int) -> None:
        executor = self.executor
        outstanding = executor.outstanding.setdefault(worker, deque())
        task = Task(executor.next_number(), self.recipe, self.fingerprint)
        if index >= 0:
            task = replace(task, key=self._keys[index], token_ids=self.segments[index])
        self._flights[task.number] = index
        outstanding.append((task.number, len(task.token_ids)))
        if len(outstanding) == 1:
            self._set_due(worker)
        try:
            executor.pool.submit(worker, task)
        except Exception as error:  # WorkerLostError, or anything that keeps the task from getting there
            self._give_up(worker, "died", f"{type(error).__name__}: {error}")

    def _listen(self) -> None:
        """Takes what has come, waiting for it unless there is something to do meanwhile; gives up who is late."""
        now = time.monotonic()
        wait_s = 0.0 if self._lost else max(0.0, min(self._due.values(), default=now) - now)
        self._hear(wait_s)
        now = time.monotonic()
        for worker in [worker for worker, due in self._due.items() if due <= now]:
            self._give_up(worker, "late", "its deadline has passed")

    def _hear(self, wait_s: float) -> None:
        try:
            replies = self.executor.pool.wait(wait_s)
        except Exception as error:  # a cluster that is gone, say: no reason to abort a request
            busy = {*self._queues, *(worker for worker, tasks in self.executor.outstanding.items() if tasks)}
            replies = [Reply(worker, None, error=f"{type(error).__name__}: {error}") for worker in sorted(busy)]
        for reply in replies:
            self._take(reply)

    def _take(self, reply: Reply) -> None:
        worker = reply.worker
        if reply.number is None:
            self._give_up(worker, "died", reply.error)
            return
        outstanding = self.executor.outstanding.setdefault(worker, deque())
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

    def _lose(self, indices: Iterable[int]) -> None:
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
        """Everything that a worker still had is compiled here, and another worker takes its place."""
        executor = self.executor
        had = [self._flights.pop(number, -1) for number, _ in executor.outstanding.pop(worker, ())]
        self._due.pop(worker, None)
        mine = [index for index in [*had, *self._queues.pop(worker, ())] if index >= 0]
        executor.count(how)
        try:
            restarted = executor.pool.replace(worker)
        except Exception:
            logger.exception("worker %d could not be replaced", worker)
            restarted = False
        executor.count("restarted", restarted)
        logger.warning(
            "worker %d is %s (%s): compiling %d segments here, %s", worker, "late" if how == "late" else "dead", why,
            len(mine), "starting another worker" if restarted else "and going on without it",
        )  # fmt: skip
        self._lose(mine)

    def _set_due(self, worker: int) -> None:
        """The clock of a worker's oldest task starts now."""
        outstanding: Any = self.executor.outstanding.get(worker)
        if outstanding:
            self._due[worker] = time.monotonic() + self.executor.deadline.seconds(outstanding[0][1])
        else:
            self._due.pop(worker, None)


def _device_of(method: Method) -> Any:
    return method.backbone.get_input_embeddings().weight.device
