"""What runs inside a worker: the model, the methods asked for, and, in a process, the loop around them."""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from importlib import import_module

import torch
from transformers.utils import logging as transformers_logging

from comb import methods
from comb.cache.picache import PICache
from comb.cache.picache_file import serialize
from comb.engine.workers import wire
from comb.engine.workers.pool import Reply, Task
from comb.methods.base import Method, MethodSpec
from comb.model.source import ModelSource

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class WorkerSpec:
    """What a worker is started with.

    Args:
        source: of its model.
        threads: that torch may use in it.
        imports: modules to import first, for methods that don't come with the package.
    """

    source: ModelSource
    threads: int = 1
    imports: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ValueError(f"a worker needs at least one thread, got {self.threads}")

    def to_json(self) -> str:
        """For another process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> WorkerSpec:
        """The inverse of `to_json`."""
        values = json.loads(text)
        return cls(ModelSource(**values["source"]), values["threads"], tuple(values["imports"]))


class Compiler:
    """A model, and the methods made on it so far.

    Raises:
        Exception: whatever loading the model raises.
    """

    def __init__(self, spec: WorkerSpec) -> None:
        torch.set_num_threads(spec.threads)
        for module in spec.imports:
            import_module(module)
        self._model = spec.source.load()
        self._methods: dict[str, Method] = {}

    def compile(self, worker: int, task: Task) -> tuple[Reply, PICache | None]:
        """A reply without data, and the PICache, not serialised yet. Never raises an Exception."""
        try:
            method = self._method(task.recipe)
            if method.fingerprint != task.fingerprint:
                return Reply(
                    worker, task.number, refused=True,
                    error=f"this worker's method has the fingerprint {method.fingerprint}, not {task.fingerprint}",
                ), None  # fmt: skip
            if not task.token_ids:
                return Reply(worker, task.number), None
            start = time.perf_counter()
            (picache,) = method.compile([task.token_ids])
            if picache.tensors() and next(iter(picache.tensors().values())).is_cuda:
                torch.cuda.synchronize()
            return Reply(worker, task.number, seconds=time.perf_counter() - start), picache
        except Exception as error:  # the engine's own method will say it better
            logger.debug("could not compile", exc_info=True)
            return Reply(worker, task.number, error=f"{type(error).__name__}: {error}"), None

    def _method(self, recipe: MethodSpec) -> Method:
        name = json.dumps(asdict(recipe), sort_keys=True)
        if name not in self._methods:
            self._methods[name] = methods.create(recipe.name, self._model, **recipe.parameters)
        return self._methods[name]


def encoded(reply: Reply, picache: PICache | None, key: str) -> Reply:
    """The reply with the PICache serialised under `key`."""
    return replace(reply, data=None if picache is None else serialize(picache, key))


def encode_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian int64."""
    return _little(array("q", token_ids)).tobytes()


def decode_ids(data: bytes) -> list[int]:
    """The inverse of `encode_ids`."""
    ids = array("q")
    ids.frombytes(data)
    return _little(ids).tolist()


def _little(ids: array[int]) -> array[int]:
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def main(descriptor: int) -> None:
    """The life of a worker process: load, say so, then compile until the other side closes the channel."""
    channel = socket.socket(fileno=descriptor)
    transformers_logging.disable_progress_bar()  # the engine has shown one for this model
    try:
        message, _ = wire.receive(channel)
        try:
            compiler = Compiler(WorkerSpec.from_json(message["spec"]))
        except Exception as error:  # the engine tells the user
            wire.send(channel, {"failed": f"{type(error).__name__}: {error}"})
            return
        wire.send(channel, {"ready": True})
    except (EOFError, OSError):
        return  # closed before we were ready
    tasks: queue.SimpleQueue[Task] = queue.SimpleQueue()
    results: queue.SimpleQueue[tuple[Reply, PICache | None, str]] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(channel, tasks), daemon=True).start()
    threading.Thread(target=_send, args=(channel, results), daemon=True).start()
    while True:
        task = tasks.get()
        results.put((*compiler.compile(0, task), task.key))


def _read(channel: socket.socket, tasks: queue.SimpleQueue[Task]) -> None:
    try:
        while True:
            message, payload = wire.receive(channel)
            recipe = MethodSpec(**message.pop("recipe"))
            tasks.put(Task(**message, recipe=recipe, token_ids=decode_ids(payload or b"")))
    except EOFError:
        pass
    finally:
        # nobody wants what is being computed, and there is nothing to tidy up: shared memory has no names
        os._exit(0)


def _send(channel: socket.socket, results: queue.SimpleQueue[tuple[Reply, PICache | None, str]]) -> None:
    """Serialises and sends while the next segment is computed (HYPIC sec. 4.4, pipelining)."""
    try:
        while True:
            reply = encoded(*results.get())
            message = vars(reply) | {"data": None}
            wire.send(channel, message, reply.data)
    finally:
        os._exit(1)  # can't be heard any more: the engine compiles what is missing
