"""`Method.compile` over Ray actors (the optional extra `ray`): who compiles what, and what of it can be used."""

from __future__ import annotations

import heapq
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Self

import numpy as np

from comb.backbones.forward import count_tokens
from comb.cache.picache import PICache, PICacheError, deserialize
from comb.engine.workers.actor import Compiler, Reply
from comb.methods.base import Method, MethodSpec
from comb.model.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ExecutorStats:
    """Segments since the executor was made, and in how many requests."""

    requests: int = 0  # compiles that were spread over workers
    by_workers: int = 0  # compiled by workers
    locally: int = 0  # compiled here in a worker's stead: those of the next lines, and all while no worker is there
    died: int = 0  # their worker ended, or its reply was lost
    late: int = 0  # no worker said anything for `timeout_s`
    damaged: int = 0  # results with a wrong checksum, key, fingerprint or length
    failed: int = 0  # the worker raised an error
    refused: int = 0  # the worker's model or method is another one

    def __str__(self) -> str:
        counted = (f"{name.replace('_', ' ')} {count}" for name, count in asdict(self).items() if count)
        return ", ".join(counted) or "nothing to compile"


@dataclass(frozen=True)
class Compiled:
    """PICaches in the order of the segments, and where the time went (HYPIC Fig. 14)."""

    picaches: list[PICache]
    dispatch_s: float  # computing, of the busiest worker
    transfer_s: float = 0.0  # the rest: what serialising, sending and checking could not hide behind computing


def lpt(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Longest processing time first: per worker the indices of its segments in the order in which it compiles them.

    Each segment goes, longest first, onto the worker with the least load. The busiest one's load is at most
    4/3 - 1/(3 workers) times the least possible (Graham 1969). Ties go to the segment and to the worker with the lower
    index, so equal input gives an equal plan.

    Source: HYPIC sec. 4.4, eq. 9.
    """
    plan: list[list[int]] = [[] for _ in range(workers)]
    loads = [(0.0, worker) for worker in range(workers)]
    for index in sorted(range(len(costs)), key=lambda index: (-costs[index], index)):
        load, worker = loads[0]
        plan[worker].append(index)
        heapq.heapreplace(loads, (load + costs[index], worker))
    return plan


class CompileExecutor:
    """`Method.compile` spread over Ray actors, longest segments first (HYPIC sec. 4.4).

    Whatever happens to a worker, every segment is compiled: what is lost, late or damaged, or what a worker refuses, is
    made here, with a warning. Ray starts a worker that has ended anew, three times. Safe under threads; calls take
    turns.

    Connects to the cluster that ``ray.init`` has connected to, else starts or finds one as ``ray.init()`` does. Every
    machine must be able to load `source`, and to import `imports`.

    Args:
        workers: how many; the constructor returns when all have loaded the model.
        threads: that torch may use in each.
        imports: modules to import in them first, for methods that don't come with the package.
        resources: options of the actors, such as ``{"num_gpus": 1}``; `threads` CPUs each by default.
        timeout_s: how long all may take to load, and how long no segment may come back from anybody before those who
            still owe one are ended. It is there for workers that hang, as those that die are seen at once; so it is
            long: one CPU thread takes minutes for a long segment of a large model, and what is cut short is lost.

    Raises:
        ValueError: fewer than one worker, or more than Ray has CPUs here; Ray isn't installed.
        RuntimeError: a worker couldn't load the model, or not in time.
    """

    def __init__(
        self,
        source: ModelSource,
        workers: int,
        *,
        threads: int = 1,
        imports: Iterable[str] = (),
        resources: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"segment parallelism needs at least one worker, got {workers}")
        try:
            import ray
        except ImportError as error:
            raise ValueError("workers are Ray's: pip install 'comb-pic[ray]', or leave workers out") from error
        if not ray.is_initialized():
            ray.init(include_dashboard=False, log_to_driver=False)
            # a cluster that somebody else has connected to may grow
            if (cpus := ray.cluster_resources().get("CPU", 0)) < workers * threads and not resources:
                ray.shutdown()
                raise ValueError(
                    f"{workers} workers of {threads} CPUs each are more than Ray has here ({cpus:g}): take fewer"
                )
        self.workers, self.timeout_s = workers, timeout_s
        self._ray: Any = ray
        self._session = self._session_now()
        self._lock = threading.RLock()
        self._counts: Counter[str] = Counter()
        self._actors: dict[Any, Any] = {}  # by what is done once they have their model; without those gone for good
        settings: dict[str, Any] = {
            "num_cpus": threads, "runtime_env": {"env_vars": {"OMP_NUM_THREADS": str(threads)}},
            "max_restarts": 3, "max_task_retries": 0,  # no call is made again: its segment is compiled here
        }  # fmt: skip
        try:
            for _ in range(workers):
                actor = ray.remote(**settings | dict(resources or {}))(Compiler).remote(source, threads, tuple(imports))
                self._actors[actor.loaded.remote()] = actor
            ray.get(list(self._actors), timeout=timeout_s)  # the first error is raised at once
        except BaseException as error:
            late = workers - len(self.ready)
            self.close()
            if isinstance(error, ray.exceptions.GetTimeoutError):
                raise RuntimeError(
                    f"{late} of {workers} workers have not loaded {source.name!r} in {timeout_s:g} s: does the cluster "
                    f"have {threads} free CPUs for each?"
                ) from error
            if isinstance(error, ray.exceptions.RayError):
                raise RuntimeError(f"a worker could not load {source.name!r}: {error}") from error
            raise

    @property
    def ready(self) -> dict[Any, Any]:
        """Actors, without those that Ray is starting anew."""
        if not self._actors or (session := self._session_now()) is None:
            return {}
        if session != self._session:
            logger.warning("the workers have gone with the Ray that they were started in: make another executor")
            self._actors.clear()
            return {}
        done, _ = self._ray.wait(list(self._actors), num_returns=len(self._actors), timeout=0)
        return {loaded: self._actors[loaded] for loaded in done}

    def _session_now(self) -> tuple[str, str] | None:
        """Of the Ray that this process is connected to: a new cluster has another node, a new driver another job."""
        if not self._ray.is_initialized():
            return None
        context = self._ray.get_runtime_context()
        return context.get_job_id(), context.get_node_id()

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
        with self._lock:
            for ref in [actor.compile.remote(spec, fingerprint, "", ()) for actor in self.ready.values()]:
                with suppress(self._ray.exceptions.RayError):  # who is lost is noticed when there is work for it
                    if why := self._ray.get(ref, timeout=self.timeout_s).error:
                        raise ValueError(
                            f"the workers don't compile what method {method.name!r} compiles here: {why}. They load "
                            "their model by name, so it must be what the engine has, unchanged; or give an executor "
                            "with its ModelSource"
                        )

    def compile(self, method: Method, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """What ``method.compile(segments)`` returns or raises, computed by the workers.

        Raises:
            ValueError: `method` was not made by `comb.methods.create`, so that no worker could make it.
        """
        return self.run(method, segments).picaches

    def run(self, method: Method, segments: Sequence[Sequence[int]], *, workers: int | None = None) -> Compiled:
        """`compile`, with where the time went; `workers` of them at most take part."""
        start, ray, spec = time.perf_counter(), self._ray, spec_of(method)
        unique = list(dict.fromkeys(map(tuple, segments)))
        # a single one is nothing to spread, and an empty one is an error that the method words best
        if method.keeps_tokens_only or len(unique) < 2 or not all(unique) or not self._actors:
            picaches = method.compile(segments)
            return Compiled(picaches, time.perf_counter() - start)
        fingerprint, keys = method.fingerprint, dict(zip(unique, method.keys_of(unique), strict=True))
        made: dict[tuple[int, ...], PICache] = {}
        busy_s: Counter[Any] = Counter()  # by worker
        asked: dict[Any, tuple[Any, tuple[int, ...]]] = {}  # who owes which segment
        with self._lock:
            self._counts["requests"] += 1
            if ready := list(self.ready.items())[:workers]:
                for (worker, actor), own in zip(ready, lpt([len(ids) for ids in unique], len(ready)), strict=True):
                    for ids in (unique[index] for index in own):
                        asked[actor.compile.remote(spec, fingerprint, keys[ids], ids)] = worker, ids
            else:
                logger.warning("no worker is there: %d segments are compiled here", len(unique))
            while asked:
                done, late = ray.wait(list(asked), timeout=self.timeout_s)
                for ref in done or late:
                    worker, ids = asked.pop(ref)
                    try:
                        reply = ray.get(ref, timeout=self.timeout_s if done else 0)
                        made[ids] = picache_of(reply, keys[ids], fingerprint, method, len(ids))
                        busy_s[worker] += reply.seconds
                        count_tokens(reply.tokens)
                        self._counts["by_workers"] += 1
                    except (PICacheError, ray.exceptions.RayError) as error:
                        lost = isinstance(error, ray.exceptions.RayError)
                        counted_as = self._restart(worker, error) if lost else reply.counted_as
                        self._counts[counted_as] += 1
                        why = str(error).partition("\n")[0]
                        logger.warning("a worker's segment is %s (%s): compiling it here", counted_as, why)
            for ids in unique:
                if ids not in made:
                    (made[ids],) = method.compile([ids])  # alone, as a worker does
                    self._counts["locally"] += 1
        seconds = time.perf_counter() - start
        dispatch_s = min(seconds, max(busy_s.values(), default=seconds))
        return Compiled([made[tuple(ids)] for ids in segments], dispatch_s, seconds - dispatch_s)

    def _restart(self, worker: Any, error: Exception) -> str:
        """Gives a worker nothing to do before it has its model again; says what its segment is counted as."""
        late = isinstance(error, self._ray.exceptions.GetTimeoutError)
        if (actor := self._actors.pop(worker, None)) is not None:  # once for all that it owed
            if late:
                self._ray.kill(actor, no_restart=False)
            if not isinstance(error, self._ray.exceptions.ActorDiedError):  # who has died for good
                self._actors[actor.loaded.options(max_task_retries=-1).remote()] = actor
        return "late" if late else "died"

    def close(self) -> None:
        """Ends all workers. Compiles that follow are done here; one under way is finished first."""
        with self._lock:
            while self._actors:
                _, actor = self._actors.popitem()
                if self._session_now() == self._session:  # or they have gone with it
                    with suppress(self._ray.exceptions.RayError):
                        self._ray.kill(actor)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def picache_of(reply: Reply, key: str, fingerprint: str, method: Method, tokens: int) -> PICache:
    """What a worker has made of a segment of so many tokens. Raises PICacheError if it isn't that."""
    if reply.error:
        raise PICacheError(reply.error)
    device = method.backbone.get_input_embeddings().weight.device
    # copied: a store that kept the array would keep it in Ray's object store
    picache = deserialize(np.asarray(reply.data, np.uint8).tobytes(), key, device)
    tokens += method.sink_tokens
    if picache.fingerprint != fingerprint or picache.num_tokens != tokens:
        raise PICacheError(f"{tokens} tokens with fingerprint {fingerprint} expected, got {picache!r}")
    return picache


def spec_of(method: Method) -> MethodSpec:
    """How a worker makes `method`. Raises ValueError if nobody knows."""
    if method.spec is None:
        raise ValueError(
            f"workers make their own copy of method {method.name!r}, and can't know how this instance was made: give "
            "the engine its name and parameters, or make it with comb.methods.create()"
        )
    return method.spec
