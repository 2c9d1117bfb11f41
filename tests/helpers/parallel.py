"""Segment parallelism in the tests' own process, without Ray."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from comb.engine.workers import CompileExecutor
from comb.engine.workers.actor import Reply
from comb.model.source import ModelSource


class RayError(Exception):
    """Ray's own names."""


class ActorUnavailableError(RayError): ...


class ActorDiedError(RayError): ...


class GetTimeoutError(RayError): ...


def at_once(compile: Callable[..., Reply], *call: Any) -> Reply | None:
    """A worker's reply, which says that it needs a microsecond per token."""
    return replace(compile(*call), seconds=1e-6 * len(call[-1]))


class InsideRay:
    """What the executor takes of Ray: a ref is a future that is done at once, or never.

    Args:
        answer: what `Compiler.compile` becomes, which it is given; None: nothing is ever said.
    """

    __spec__ = ModuleSpec("ray", None)
    exceptions = SimpleNamespace(RayError=RayError, ActorDiedError=ActorDiedError, GetTimeoutError=GetTimeoutError)

    def __init__(self, answer: Callable[..., Reply | None] = at_once) -> None:
        self.answer = answer
        self.killed: list[bool] = []

    def is_initialized(self) -> bool:
        return True

    def get_runtime_context(self) -> Any:
        return SimpleNamespace(get_job_id=lambda: "job", get_node_id=lambda: "node")

    def remote(self, **settings: Any) -> Any:
        return lambda made: SimpleNamespace(remote=lambda *arguments: self._actor(made, *arguments))

    def _actor(self, made: Callable[..., Any], *arguments: Any) -> Any:
        compiler: Any = None

        def loaded() -> None:
            nonlocal compiler
            compiler = compiler or made(*arguments)

        def compiled(*call: Any) -> Reply | None:
            return self.answer(compiler.compile, *call)

        load = SimpleNamespace(remote=lambda: ref_of(loaded), options=lambda **_: load)
        return SimpleNamespace(loaded=load, compile=SimpleNamespace(remote=lambda *call: ref_of(compiled, *call)))

    def wait(self, refs: Sequence[Any], num_returns: int = 1, timeout: float = 0) -> tuple[list[Any], list[Any]]:
        done = [ref for ref in refs if ref.done()][:num_returns]
        return done, [ref for ref in refs if ref not in done]

    def get(self, ref: Any, timeout: float) -> Any:
        if isinstance(ref, list):
            return [self.get(each, timeout) for each in ref]
        if not ref.done():
            raise GetTimeoutError("not ready")
        return ref.result()

    def kill(self, actor: Any, no_restart: bool = True) -> None:
        self.killed.append(no_restart)


def ref_of(call: Callable[..., Any], *arguments: Any) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        if (result := call(*arguments)) is not None or not arguments:
            future.set_result(result)
    except Exception as error:
        died = ActorDiedError(f"{type(error).__name__}: {error}")  # the model can't be loaded
        future.set_exception(error if isinstance(error, RayError) else died)
    return future


def inside(source: ModelSource, workers: int, answer: Callable[..., Reply | None] = at_once) -> CompileExecutor:
    """An executor whose workers are in this process."""
    with patch.dict(sys.modules, ray=InsideRay(answer)):
        return CompileExecutor(source, workers)
