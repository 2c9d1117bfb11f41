"""One request on its way through workers: what has come, what of it can be used, what is to be compiled here."""

from __future__ import annotations

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np

from comb.cache.picache import PICache
from comb.cache.picache_file import PICacheError, deserialize
from comb.engine.workers.worker import Reply
from comb.methods.base import Method, MethodSpec

logger = logging.getLogger(__name__)


@dataclass
class CompileRequest:
    """Segments, each compiled once; what is lost on the way is compiled here."""

    method: Method
    spec: MethodSpec
    segments: Sequence[tuple[int, ...]]
    counts: Counter[str]  # of the executor's `stats`
    fingerprint: str = field(init=False)  # of the method as the request began
    keys: list[str] = field(init=False)  # results' own: another segment's, or method's, isn't taken for one
    sent: dict[Future[Reply], int] = field(default_factory=dict)  # which segment a worker answers
    lost: list[int] = field(default_factory=list)  # segments to compile here
    picaches: dict[int, PICache] = field(default_factory=dict)
    segment_s: dict[int, float] = field(default_factory=dict)  # of compiling each segment
    busy_s: dict[int, float] = field(default_factory=lambda: defaultdict(float))  # by worker; -1: here
    decode_s: float = 0.0  # of checking and unpacking

    def __post_init__(self) -> None:
        self.fingerprint = self.method.fingerprint
        self.keys = self.method.keys_of(self.segments)

    def take(self, worker: int, index: int, reply: Reply) -> bool:
        """Keeps what a worker says to a segment; False if it can't be used, and the segment is lost."""
        start = time.perf_counter()
        try:
            picache = self._checked(index, reply)
        except PICacheError as error:
            kind = "refused" if reply.refused else "failed" if reply.error else "damaged"
            logger.warning("worker %d: a segment is %s (%s): compiling it here", worker, kind, error)
            self.counts[kind] += 1
            self.lost.append(index)
            return False
        self.decode_s += time.perf_counter() - start
        self._keep(worker, index, picache, reply.seconds)
        self.counts["by_workers"] += 1
        return True

    def compile_one(self) -> None:
        """Compiles one of the lost segments here. Raises what ``method.compile`` raises."""
        index = self.lost.pop()
        start = time.perf_counter()
        (picache,) = self.method.compile([self.segments[index]])
        self._keep(-1, index, picache, time.perf_counter() - start)
        self.counts["locally"] += 1

    def _checked(self, index: int, reply: Reply) -> PICache:
        if reply.error:
            raise PICacheError(reply.error)
        device = self.method.backbone.get_input_embeddings().weight.device
        # copied: a store that kept the array would keep it in Ray's object store
        data = np.asarray(reply.data, np.uint8).tobytes()
        picache = deserialize(data, self.keys[index], device)
        if picache.fingerprint != self.fingerprint or picache.num_tokens != len(self.segments[index]):
            raise PICacheError(
                f"{len(self.segments[index])} tokens with fingerprint {self.fingerprint} expected, got {picache!r}"
            )
        return picache

    def _keep(self, worker: int, index: int, picache: PICache, seconds: float) -> None:
        self.picaches[index] = picache
        self.segment_s[index] = seconds
        self.busy_s[worker] += seconds
