"""Workers: Ray actors, on this machine or others (the optional extra `ray`), and what runs inside one.

Ray pickles the call and the reply, but no tensor: a PICache lies in Ray's object store as the bytes of its file.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from typing import Any

import numpy as np
import torch

from comb import methods
from comb.cache.picache import serialize
from comb.engine.workers.executor import CompileExecutor, Reply, SegmentWorker
from comb.methods.base import Method, MethodSpec
from comb.model.source import ModelSource

logger = logging.getLogger(__name__)


class Compiler:
    """What runs in Ray's process: a model, and the methods made on it so far.

    Args:
        threads: that torch may use.
        imports: modules to import first, for methods that don't come with the package.

    Raises:
        Exception: whatever loading the model raises.
    """

    def __init__(self, source: ModelSource, threads: int, imports: Iterable[str]) -> None:
        torch.set_num_threads(threads)
        for module in imports:
            import_module(module)
        self._model = source.load()
        self._methods: dict[str, Method] = {}

    def loaded(self) -> None:
        """Answered when the model is there."""

    def compile(self, spec: MethodSpec, fingerprint: str, key: str, token_ids: Sequence[int]) -> Reply:
        """Compiles one segment. Never raises an Exception: the engine's own method will say it better.

        Args:
            spec: how the method is made.
            fingerprint: that it must have then, or the worker refuses.
            key: that the result is serialised under, so that it can't be taken for another segment's.
            token_ids: of the segment; empty: nothing is compiled, the worker only says whether it would.
        """
        try:
            name = json.dumps(asdict(spec), sort_keys=True)
            if name not in self._methods:
                self._methods[name] = methods.create(spec.name, self._model, **spec.parameters)
            method = self._methods[name]
            if method.fingerprint != fingerprint:
                why = f"this worker's method has the fingerprint {method.fingerprint}, not {fingerprint}"
                return Reply(error=why, refused=True)
            if not token_ids:
                return Reply()
            start = time.perf_counter()
            (picache,) = method.compile([token_ids])
            if any(tensor.is_cuda for tensor in picache.tensors().values()):
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            # an array: Ray's object store shares it instead of copying
            return Reply(np.frombuffer(serialize(picache, key), np.uint8), seconds)
        except Exception as error:
            logger.debug("could not compile", exc_info=True)
            return Reply(error=f"{type(error).__name__}: {error}")


def ray_executor(
    source: ModelSource,
    workers: int,
    *,
    threads: int = 1,
    imports: Iterable[str] = (),
    resources: Mapping[str, Any] | None = None,
    **options: Any,
) -> CompileExecutor:
    """An executor over `workers` Ray actors; returns when all have loaded the model.

    Connects to the cluster that ``ray.init`` has connected to, else starts or finds one as ``ray.init()`` does. Every
    machine must be able to load `source`, and to import `imports`.

    Args:
        threads: that torch may use in each actor.
        imports: modules to import in them first, for methods that don't come with the package.
        resources: options of the actors, such as ``{"num_gpus": 1}``; `threads` CPUs each by default.
        options: of `CompileExecutor`, with what it raises.

    Raises:
        ValueError: Ray isn't installed, or has fewer CPUs here.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("workers are Ray's: pip install 'comb-pic[ray]', or leave workers out") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
        # a cluster that somebody else has connected to may grow
        if (cpus := ray.cluster_resources().get("CPU", 0)) < workers * threads and not resources:
            raise ValueError(
                f"{workers} workers of {threads} CPUs each are more than Ray has here ({cpus:g}): take fewer"
            )
    environment = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
    settings = {"num_cpus": threads, "max_restarts": 0, "runtime_env": environment, **(resources or {})}
    actor_class: Any = ray.remote(**settings)(Compiler)
    hint = f": does the cluster have {threads} free CPUs for each?"
    return CompileExecutor(
        lambda: RayWorker(ray, actor_class.remote(source, threads, tuple(imports))), workers, source.name,
        late_hint=hint, **options,
    )  # fmt: skip


class RayWorker(SegmentWorker):
    """One actor."""

    def __init__(self, ray: Any, actor: Any) -> None:
        super().__init__(actor.loaded.remote().future())
        self._ray, self.actor = ray, actor

    def submit(self, spec: MethodSpec, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Future[Reply]:
        result: Future[Reply] = self.actor.compile.remote(spec, fingerprint, key, token_ids).future()
        return result

    def end(self) -> None:
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):  # it may be gone already
                self._ray.kill(self.actor)
