"""What an executor needs of its workers, whatever they are: processes here, or actors on other machines."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from comb.methods.base import MethodSpec

if TYPE_CHECKING:
    from comb.engine.workers.worker import WorkerSpec


class WorkerLostError(RuntimeError):
    """A worker that can't be reached any more."""


@dataclass(frozen=True)
class Task:
    """One segment to compile.

    Args:
        number: unique within a pool; replies carry it.
        recipe: how the worker makes the method.
        fingerprint: that the worker's method must have, or it refuses.
        key: that the result is serialised under, so that it can't be taken for another segment's.
        token_ids: of the segment; empty: nothing is compiled, the worker only says whether it would.
    """

    number: int
    recipe: MethodSpec
    fingerprint: str
    key: str = ""
    token_ids: Sequence[int] = ()


@dataclass(frozen=True)
class Reply:
    """What a worker says to a task.

    Args:
        worker: its index in the pool.
        number: of the task; None: the worker died.
        data: the serialised PICache; None when there is none.
        seconds: of compiling.
        error: why there is no PICache; "" when all is well.
        refused: the worker's model or method isn't the one that was asked for.
    """

    worker: int
    number: int | None
    data: bytes | None = None
    seconds: float = 0.0
    error: str = ""
    refused: bool = False


class WorkerPool(ABC):
    """Workers by index, each answering its tasks in the order in which they were submitted.

    Used by one thread at a time.
    """

    @property
    @abstractmethod
    def size(self) -> int:
        """Workers that there are meant to be."""

    @property
    @abstractmethod
    def ready(self) -> list[int]:
        """Workers that have loaded their model. A replacement appears here once `wait` has heard of it."""

    @abstractmethod
    def submit(self, worker: int, task: Task) -> None:
        """Hands over a task without waiting for it. Raises WorkerLostError."""

    @abstractmethod
    def wait(self, timeout_s: float) -> list[Reply]:
        """All replies that are there; waits for the first one for at most `timeout_s`. A death is told once."""

    @abstractmethod
    def replace(self, worker: int) -> bool:
        """Ends a worker, however busy it is, and starts another in its place; False when that happened too often."""

    @abstractmethod
    def close(self) -> None:
        """Ends all workers; harmless when called again."""


class StartedPool(WorkerPool):
    """A pool that starts its workers itself, and lost ones anew: so many `restarts` in all.

    Raises:
        ValueError: fewer than one worker.
    """

    def __init__(self, spec: WorkerSpec, workers: int, restarts: int) -> None:
        if workers < 1:
            raise ValueError(f"segment parallelism needs at least one worker, got {workers}")
        self._spec = spec
        self._restarts = restarts

    @abstractmethod
    def _start(self, worker: int) -> None:
        """Starts a worker, the first one of its index or one in place of another, without waiting for it."""

    @abstractmethod
    def _end(self, worker: int) -> None:
        """Ends a worker, however busy it is; harmless when it has ended."""

    @abstractmethod
    def _hear_of_starts(self, timeout_s: float) -> str:
        """Marks who has loaded the model as ready, waiting for at most `timeout_s`; returns why one could not."""

    def replace(self, worker: int) -> bool:
        self._end(worker)
        if self._restarts < 1:
            return False
        self._restarts -= 1
        self._start(worker)
        return True

    def _wait_until_ready(self, timeout_s: float, hint: str = "") -> None:
        """Returns when all workers are ready. Raises RuntimeError, with `hint` if it is late."""
        end = time.monotonic() + timeout_s
        while missing := self.size - len(self.ready):
            failure = self._hear_of_starts(0.1)
            if failure:
                raise RuntimeError(f"a worker could not load {self._spec.source.name!r}: {failure}")
            if time.monotonic() >= end:
                raise RuntimeError(
                    f"{missing} of {self.size} workers have not loaded {self._spec.source.name!r} within "
                    f"{timeout_s:g} s{hint}"
                )
