"""Workers: Ray actors, on this machine or others: the optional extra `ray`.

Ray pickles the call and the reply, but no tensor: a PICache lies in Ray's object store as the bytes of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from typing import Any

from comb.engine.workers.executor import CompileExecutor, SegmentWorker
from comb.engine.workers.worker import Compiler, Reply
from comb.methods.base import MethodSpec
from comb.model.source import ModelSource


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
        ValueError: Ray isn't installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ValueError("workers are Ray's: pip install 'comb-pic[ray]', or leave workers out") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    environment = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
    settings = {"num_cpus": threads, "max_restarts": 0, "runtime_env": environment, **(resources or {})}
    actor_class: Any = ray.remote(**settings)(_Actor)
    hint = f": does the cluster have {threads} free CPUs for each?"
    return CompileExecutor(
        lambda: RayWorker(ray, actor_class.remote(source, threads, tuple(imports))), workers, source.name,
        late_hint=hint, **options,
    )  # fmt: skip


class _Actor(Compiler):
    """What runs in Ray's process."""

    def loaded(self) -> None:
        """Answered when the model is there."""

    def compile(self, *arguments: Any) -> Reply:
        """The PICache's bytes as an array, which Ray's object store shares instead of copying."""
        reply = super().compile(*arguments)
        return reply if reply.data is None else replace(reply, data=reply.data.numpy())


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
