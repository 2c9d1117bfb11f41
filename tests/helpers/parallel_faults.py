"""A method whose compile goes wrong in a worker, and only there; `register_fragile` makes it known to workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from comb.cache.picache import PICache, serialize
from comb.engine.workers import actor
from comb.methods.presets import Naive

FAULT_TOKEN = 99


class Fragile(Naive):
    """`naive`, but in any process other than `home` a segment that holds `FAULT_TOKEN` meets `fault`."""

    name = "fragile"

    def __init__(self, model: Any, *, home: int, fault: str) -> None:
        super().__init__(model)
        self.home, self.fault = home, fault

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        if os.getpid() != self.home and any(FAULT_TOKEN in segment for segment in segments):
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            elif self.fault == "hang":
                time.sleep(3600)
            elif self.fault == "raise":
                raise RuntimeError("out of memory")
            elif self.fault == "damage":
                actor.serialize = _damaged
            elif self.fault == "swap":  # another segment's PICache, whole and well
                return super().compile([segment[:-1] for segment in segments])
        return super().compile(segments)


def _damaged(picache: PICache, key: str) -> bytes:
    """Serialised as it should be, but for one bit in the middle of the tensors."""
    actor.serialize = serialize
    data = bytearray(serialize(picache, key))
    data[-len(data) // 4] ^= 16
    return bytes(data)
