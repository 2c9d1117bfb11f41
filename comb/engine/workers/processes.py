"""Workers as processes on this machine: the embedded default."""

from __future__ import annotations

import logging
import os
import selectors
import socket
import subprocess
import sys
import time
import weakref
from dataclasses import asdict
from pathlib import Path
from typing import Any

from comb.engine.workers import wire
from comb.engine.workers.executor import CompileExecutor
from comb.engine.workers.pool import Reply, StartedPool, Task, WorkerLostError
from comb.engine.workers.scheduling import Deadline
from comb.engine.workers.worker import WorkerSpec, encode_ids
from comb.model.source import ModelSource

logger = logging.getLogger(__name__)

_MAIN = "import sys; from comb.engine.workers.worker import main; main(int(sys.argv[1]))"
_STALLED_S = 30.0  # a message has some hundred bytes and fits into the channel: who doesn't take it is stuck


def process_executor(
    source: ModelSource,
    workers: int,
    *,
    threads: int = 1,
    imports: tuple[str, ...] = (),
    deadline: Deadline | None = None,
    restarts: int = 3,
    start_timeout_s: float = 600.0,
) -> CompileExecutor:
    """An executor over `workers` processes, each with a model of its own from `source`; returns when all are ready.

    Args:
        threads: that torch may use in each process.
        imports: modules to import in them first, for methods that don't come with the package.
        deadline: when a worker is late.
        restarts: how many lost workers are started anew, in all.

    Raises:
        ValueError: fewer than one worker or thread.
        RuntimeError: a worker couldn't load the model, or not in time.
    """
    pool = ProcessPool(WorkerSpec(source, threads, imports), workers, restarts, start_timeout_s)
    return CompileExecutor(pool, deadline=deadline)


class _Worker:
    """A process and our end of its channel."""

    def __init__(self, spec: WorkerSpec) -> None:
        self.channel, theirs = socket.socketpair()
        self.channel.settimeout(_STALLED_S)
        # what this process can import, the worker can; threads are set before torch is loaded
        threads = str(spec.threads)
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
            **dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS"), threads),
            "TOKENIZERS_PARALLELISM": "false",
        }
        try:
            # a session of its own: an interrupt at the terminal is for the engine, which ends its workers itself
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-c", _MAIN, str(theirs.fileno())],
                pass_fds=[theirs.fileno()], env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                start_new_session=True,
            )  # fmt: skip
        except BaseException:
            self.channel.close()
            raise
        finally:
            theirs.close()
        self.ready = False
        self.failure = ""
        try:
            wire.send(self.channel, {"spec": spec.to_json()})
        except BaseException:
            self.end()
            raise

    def end(self) -> None:
        """No process and no channel after this. Nothing is left to tidy up: shared memory has no names."""
        self.ready = False
        self.channel.close()
        self.process.kill()
        self.process.wait()


class ProcessPool(StartedPool):
    """See `process_executor`."""

    def __init__(self, spec: WorkerSpec, workers: int, restarts: int = 3, start_timeout_s: float = 600.0) -> None:
        super().__init__(spec, workers, restarts)
        self._selector = selectors.DefaultSelector()
        self._workers: list[_Worker] = []
        # also when the pool is forgotten, or the interpreter ends
        self._finalizer = weakref.finalize(self, _end_all, self._workers)
        try:
            for index in range(workers):
                self._start(index)
            self._wait_until_ready(start_timeout_s)
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._workers)

    @property
    def ready(self) -> list[int]:
        return [index for index, worker in enumerate(self._workers) if worker.ready]

    @property
    def process_ids(self) -> list[int]:
        """Of the processes that run."""
        return [worker.process.pid for worker in self._workers if worker.process.poll() is None]

    def submit(self, worker: int, task: Task) -> None:
        chosen = self._workers[worker]
        if not chosen.ready:
            raise WorkerLostError(f"worker {worker} is not there")
        message: dict[str, Any] = {
            "number": task.number, "recipe": asdict(task.recipe), "fingerprint": task.fingerprint, "key": task.key,
        }  # fmt: skip
        try:
            wire.send(chosen.channel, message, encode_ids(task.token_ids))
        except OSError as error:
            raise WorkerLostError(f"worker {worker} takes no messages: {error}") from error

    def wait(self, timeout_s: float) -> list[Reply]:
        replies: list[Reply] = []
        end = time.monotonic() + timeout_s
        while True:
            left = 0.0 if replies else max(0.0, end - time.monotonic())
            events = self._selector.select(left)
            for key, _ in events:
                replies += self._hear(key.data)
            if not events and (replies or time.monotonic() >= end):
                return replies

    def close(self) -> None:
        self._finalizer()
        self._selector.close()

    def _start(self, worker: int) -> None:
        started = _Worker(self._spec)
        self._workers[worker : worker + 1] = [started]  # in its place, or behind the others
        self._selector.register(started.channel, selectors.EVENT_READ, worker)

    def _end(self, worker: int) -> None:
        ended = self._workers[worker]
        if ended.channel.fileno() >= 0:
            self._selector.unregister(ended.channel)
        ended.end()

    def _hear(self, index: int) -> list[Reply]:
        """What one worker has to say, now that there is something."""
        worker = self._workers[index]
        try:
            message, payload = wire.receive(worker.channel)
            if "failed" in message:
                worker.failure = str(message["failed"])
            elif "ready" in message:
                worker.ready = True
                return []
            else:
                return [Reply(**{**message, "worker": index, "data": payload})]
        except (EOFError, OSError, wire.WireError, TypeError) as error:
            worker.failure = worker.failure or f"{type(error).__name__}: {error}"
        was_ready = worker.ready
        self._end(index)
        if was_ready:
            return [Reply(index, None, error=f"exit code {worker.process.returncode}")]
        logger.warning("worker %d of %d could not be started: %s", index + 1, self.size, worker.failure)
        return []

    def _hear_of_starts(self, timeout_s: float) -> str:
        self.wait(timeout_s)
        return next((worker.failure for worker in self._workers if worker.failure), "")


def _end_all(workers: list[_Worker]) -> None:
    for worker in workers:
        worker.end()
