"""A worker of segment parallelism in the tests' own process."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from comb.engine.workers.executor import SegmentWorker
from comb.engine.workers.ray_actors import Compiler, Reply
from comb.model.source import ModelSource


class Inside(SegmentWorker):
    """It says that it needs a microsecond per token; a `lost` one takes no segment."""

    def __init__(self, source: ModelSource, *, lost: bool = False) -> None:
        super().__init__(Future())
        self.loaded.set_result(None)
        self.compiler, self.lost = Compiler(source, 1, ()), lost

    def submit(self, spec: Any, fingerprint: str, key: str, token_ids: tuple[int, ...]) -> Future[Reply]:
        if self.lost and token_ids:
            raise ConnectionError("lost")
        future: Future[Reply] = Future()
        reply = self.compiler.compile(spec, fingerprint, key, token_ids)
        future.set_result(replace(reply, seconds=1e-6 * len(token_ids)))
        return future

    def end(self) -> None:
        pass
