"""Workers as processes on this machine: the embedded default.

`concurrent.futures` pickles calls and replies over pipes that only this process and its own children hold. A PICache
lies in torch's shared memory meanwhile, which on Linux has no name: a crash leaves nothing in /dev/shm.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import suppress
from typing import Any

import torch.multiprocessing
from transformers.utils import logging as transformers_logging

from comb.engine.workers.executor import CompileExecutor, SegmentWorker
from comb.engine.workers.worker import Compiler, Reply
from comb.methods.base import MethodSpec
from comb.model.source import ModelSource

_compiler: Compiler | None = None
"""In a worker, its own: a pool's process has no other place for what outlives a call."""


def process_executor(
    source: ModelSource, workers: int, *, threads: int = 1, imports: Iterable[str] = (), **options: Any
) -> CompileExecutor:
    """An executor over `workers` processes, each with a model of its own from `source`; returns when all are ready.

    Processes are spawned, so a script that calls this does so under ``if __name__ == "__main__":``.

    Args:
        threads: that torch may use in each process.
        imports: modules to import in them first, for methods that don't come with the package.
        options: of `CompileExecutor`, with what it raises.
    """
    return CompileExecutor(lambda: ProcessWorker(source, threads, tuple(imports)), workers, source.name, **options)


class ProcessWorker(SegmentWorker):
    """One process in a pool of its own: when it dies, a pool is broken, and the others' aren't."""

    def __init__(self, source: ModelSource, threads: int, imports: tuple[str, ...]) -> None:
        self._pool = ProcessPoolExecutor(1, mp_context=torch.multiprocessing.get_context("spawn"))
        self._process_id = self._pool.submit(os.getpid)
        super().__init__(self._pool.submit(_load, source, threads, imports))

    @property
    def process_id(self) -> int:
        """Waits until the process has started. Raises BrokenExecutor if it has ended before."""
        return self._process_id.result()

    def submit(self, spec: MethodSpec, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Future[Reply]:
        return self._pool.submit(_compile, spec, fingerprint, key, token_ids)

    def end(self) -> None:
        with suppress(BrokenExecutor):
            for process in multiprocessing.active_children():  # those that run: another's number is never hit
                if process.pid == self.process_id:
                    process.kill()
        self._pool.shutdown(cancel_futures=True)


def _load(source: ModelSource, threads: int, imports: tuple[str, ...]) -> None:
    global _compiler
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # at a terminal it is for the engine, which ends its workers itself
    threading.Thread(target=_end_with_parent, daemon=True).start()
    transformers_logging.disable_progress_bar()  # the engine has shown one for this model
    _compiler = Compiler(source, threads, imports)


def _end_with_parent() -> None:
    """A pool's processes would wait for work for ever if the engine's process was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _compile(spec: MethodSpec, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Reply:
    assert _compiler is not None, "_load comes first"
    reply = _compiler.compile(spec, fingerprint, key, token_ids)
    try:
        if reply.data is not None:
            reply.data.share_memory_()
    except RuntimeError as error:  # there is no room: a container's /dev/shm may be small
        return Reply(error=f"{type(error).__name__}: {error}")
    return reply
