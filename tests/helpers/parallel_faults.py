"""A method whose compile goes wrong in a worker, and only there; `register_fragile` makes it known to workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

from comb.cache.picache import PICache
from comb.methods.presets import Naive

FAULT_TOKEN = 99


class Fragile(Naive):
    """`naive`, but in any process other than `home` a segment that holds `FAULT_TOKEN` meets `fault`: kill or hang."""

    name = "fragile"

    def __init__(self, model: Any, *, home: int, fault: str) -> None:
        super().__init__(model)
        self.home, self.fault = home, fault

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        if os.getpid() != self.home and any(FAULT_TOKEN in segment for segment in segments):
            if self.fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(3600)
        return super().compile(segments)
