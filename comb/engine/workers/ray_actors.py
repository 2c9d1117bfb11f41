"""Workers as Ray actors, on this machine or others: the optional extra `ray`.

Ray pickles the call around a task, but no tensor: a PICache travels as the bytes of a safetensors file in Ray's object
store, and is checked like one that comes from a process.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Any

import numpy as np

from comb.engine.workers.executor import CompileExecutor
from comb.engine.workers.pool import Reply, StartedPool, Task, WorkerLostError
from comb.engine.workers.scheduling import Deadline
from comb.engine.workers.worker import Compiler, WorkerSpec, encoded
from comb.methods.base import MethodSpec
from comb.model.source import ModelSource


def ray_executor(
    source: ModelSource,
    workers: int,
    *,
    threads: int = 1,
    imports: tuple[str, ...] = (),
    deadline: Deadline | None = None,
    restarts: int = 3,
    start_timeout_s: float = 600.0,
    resources: dict[str, Any] | None = None,
) -> CompileExecutor:
    """An executor over `workers` Ray actors; returns when all have loaded the model.

    Connects to the cluster that ``ray.init`` has connected to, else starts or finds one as ``ray.init()`` does. Every
    machine must be able to load `source`, and to import `imports`.

    Args:
        threads, imports, deadline, restarts: as for `process_executor`.
        resources: options of the actors, such as ``{"num_gpus": 1}``; `threads` CPUs each by default.

    Raises:
        ImportError: Ray isn't installed.
        RuntimeError: an actor couldn't load the model, or not in time.
    """
    pool = RayPool(WorkerSpec(source, threads, imports), workers, restarts, start_timeout_s, resources or {})
    return CompileExecutor(pool, deadline=deadline)


class _Actor:
    """What runs in Ray's process."""

    def __init__(self, spec: str) -> None:
        self._compiler = Compiler(WorkerSpec.from_json(spec))

    def ready(self) -> bool:
        return True

    def compile(self, number: int, name: str, parameters: dict[str, Any], fingerprint: str, key: str, ids: Any) -> Any:
        """The reply's fields, and the PICache's bytes as an array, which Ray shares instead of copying."""
        task = Task(number, MethodSpec(name, parameters), fingerprint, key, ids.tolist())
        reply, picache = self._compiler.compile(0, task)
        reply = encoded(reply, picache, key)
        data = None if reply.data is None else np.frombuffer(reply.data, np.uint8)
        return vars(reply) | {"data": None}, data


class RayPool(StartedPool):
    """See `ray_executor`."""

    def __init__(
        self, spec: WorkerSpec, workers: int, restarts: int, start_timeout_s: float, resources: dict[str, Any]
    ) -> None:
        try:
            import ray
        except ImportError as error:
            raise ImportError("workers on several machines need Ray: pip install 'comb-pic[ray]'") from error
        super().__init__(spec, workers, restarts)
        self._ray: Any = ray
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
        environment = {"env_vars": {"OMP_NUM_THREADS": str(spec.threads)}}
        options = {"num_cpus": spec.threads, "max_restarts": 0, "runtime_env": environment, **resources}
        self._class = ray.remote(**options)(_Actor)
        self._actors: list[Any] = []
        self._starting: dict[int, Any] = {}
        self._tasks: dict[int, deque[tuple[Any, int]]] = {}  # worker -> its results to come, oldest first
        try:
            for worker in range(workers):
                self._actors.append(None)
                self._start(worker)
            self._wait_until_ready(start_timeout_s, f": does the cluster have {spec.threads} free CPUs for each?")
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        return len(self._actors)

    @property
    def ready(self) -> list[int]:
        return [i for i, actor in enumerate(self._actors) if actor is not None and i not in self._starting]

    def submit(self, worker: int, task: Task) -> None:
        actor = self._actors[worker]
        if actor is None or worker in self._starting:
            raise WorkerLostError(f"worker {worker} is not there")
        try:
            result = actor.compile.remote(
                task.number, task.recipe.name, dict(task.recipe.parameters), task.fingerprint, task.key,
                np.array(task.token_ids, np.int64),
            )  # fmt: skip
        except self._ray.exceptions.RayError as error:
            raise WorkerLostError(f"worker {worker} takes no tasks: {error}") from error
        self._tasks[worker].append((result, task.number))

    def wait(self, timeout_s: float) -> list[Reply]:
        self._hear_of_starts(0.0)
        end = time.monotonic() + timeout_s
        replies: list[Reply] = []
        while True:
            pending = {result: worker for worker, tasks in self._tasks.items() for result, _ in tasks}
            left = 0.0 if replies else max(0.0, end - time.monotonic())
            done = self._ray.wait(list(pending), num_returns=1, timeout=left)[0] if pending else []
            if not done:
                if not pending and left:
                    time.sleep(min(left, 0.05))
                if replies or time.monotonic() >= end:
                    return replies
                continue
            replies.append(self._result(pending[done[0]], done[0]))

    def _result(self, worker: int, result: Any) -> Reply:
        number = next(number for pending, number in self._tasks[worker] if pending == result)
        self._tasks[worker] = deque(task for task in self._tasks[worker] if task[0] != result)
        try:
            fields, data = self._ray.get(result)
        except self._ray.exceptions.RayActorError as error:
            self._tasks[worker].clear()
            self._actors[worker] = None
            return Reply(worker, None, error=f"{type(error).__name__}: the actor has died")
        except self._ray.exceptions.RayError as error:  # the result was lost on its way
            return Reply(worker, number, error=f"{type(error).__name__}: {error}")
        return Reply(**{**fields, "worker": worker, "data": None if data is None else data.tobytes()})

    def close(self) -> None:
        for worker in range(len(self._actors)):
            self._end(worker)

    def _start(self, worker: int) -> None:
        self._actors[worker] = self._class.remote(self._spec.to_json())
        self._starting[worker] = self._actors[worker].ready.remote()
        self._tasks[worker] = deque()

    def _end(self, worker: int) -> None:
        actor, self._actors[worker] = self._actors[worker], None
        self._starting.pop(worker, None)
        self._tasks.pop(worker, None)
        if actor is not None and self._ray.is_initialized():
            with contextlib.suppress(self._ray.exceptions.RayError):  # it may be gone already
                self._ray.kill(actor)

    def _hear_of_starts(self, timeout_s: float) -> str:
        failure = ""
        if self._starting:
            self._ray.wait(list(self._starting.values()), timeout=timeout_s)
        for worker, started in list(self._starting.items()):
            if not self._ray.wait([started], timeout=0)[0]:
                continue
            del self._starting[worker]
            try:
                self._ray.get(started)
            except self._ray.exceptions.RayError as error:
                failure = str(error)
                self._end(worker)
        return failure
