"""Workers as Ray actors, on this machine or others: the optional extra `ray`.

Ray pickles the call and the reply, but no tensor: a PICache lies in Ray's object store as the bytes of its file.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from comb.engine.workers.executor import CompileExecutor, SegmentWorker
from comb.engine.workers.ray_shared import RayShared
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
    share: str = "",
    share_bytes: int = 2**30,
    **options: Any,
) -> CompileExecutor:
    """An executor over `workers` Ray actors; returns when all have loaded the model.

    Connects to the cluster that ``ray.init`` has connected to, else starts or finds one as ``ray.init()`` does. Every
    machine must be able to load `source`, and to import `imports`.

    Args:
        threads, imports, options: as for `process_executor`.
        share: the name of an index that engines of this cluster share: what one of them has had compiled, the others
            fetch, at most `share_bytes` of it. Who shares it can tell by the time whether a document was compiled.
        resources: options of the actors, such as ``{"num_gpus": 1}``; `threads` CPUs each by default.

    Raises:
        ImportError: Ray isn't installed.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError("workers on several machines need Ray: pip install 'comb-pic[ray]'") from error
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False)
    environment = {"env_vars": {"OMP_NUM_THREADS": str(threads)}}
    settings = {"num_cpus": threads, "max_restarts": 0, "runtime_env": environment, **(resources or {})}
    actor_class: Any = ray.remote(**settings)(_Actor)
    shared = RayShared(ray, share, share_bytes) if share else None
    hint = f": does the cluster have {threads} free CPUs for each?"
    return CompileExecutor(
        lambda: RayWorker(ray, actor_class.remote(source, threads, tuple(imports)), shared), workers, source.name,
        late_hint=hint, shared=shared, **options,
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

    def __init__(self, ray: Any, actor: Any, shared: RayShared | None = None) -> None:
        super().__init__(actor.loaded.remote().future())
        self._ray, self.actor, self._shared = ray, actor, shared

    def submit(self, spec: MethodSpec, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Future[Reply]:
        reference = self.actor.compile.remote(spec, fingerprint, key, token_ids)
        result: Future[Reply] = reference.future()
        if self._shared is not None and token_ids:
            result.add_done_callback(partial(self._tell, key, reference))
        return result

    def _tell(self, key: str, reference: Any, done: Future[Reply]) -> None:
        """The reply's own object is what others fetch: nothing is copied for them."""
        if not done.cancelled() and done.exception() is None and done.result().data is not None:
            assert self._shared is not None, "submit asked for this"
            self._shared.add(key, reference, done.result().data.nbytes)

    def end(self) -> None:
        if self._ray.is_initialized():
            with suppress(self._ray.exceptions.RayError):  # it may be gone already
                self._ray.kill(self.actor)
