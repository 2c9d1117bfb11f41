"""Times of GPU work, and the exact attention that MAC is measured against.

A call is captured in a CUDA graph where it can be (so no launch waits for Python, as in a serving engine's decode), and
the device's cache is overwritten before each replay: in a model, another layer's keys come in between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_CACHE_BYTES = 2**28


@dataclass(frozen=True)
class Time:
    """Median and quartiles of `repeats` calls, in seconds; `graph`: whether it was a captured graph."""

    median_s: float
    low_s: float
    high_s: float
    repeats: int
    graph: bool


class Clock:
    """Times calls on one device; on a CPU by the wall clock, which shows that they run and nothing else."""

    def __init__(self, device: torch.device, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        size = _CACHE_BYTES if device.type == "cuda" else 0
        self._flush = torch.empty(size, dtype=torch.int8, device=device)

    def time(self, call: Callable[[], object], *, graph: bool = True) -> Time:
        """Times `call`, which must not depend on what it changes.

        Raises:
            RuntimeError: where it can't be captured, which a call that waits for the device can't; `graph` False
                times it as it is.
        """
        if self.device.type != "cuda":
            call()
            return _summary([self._wall(call) for _ in range(self.repeats)], graph=False)
        run = self._captured(call) if graph else call
        for _ in range(3):
            run()
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(self.repeats)]
        for first, last in events:
            self._flush.zero_()
            first.record()
            run()
            last.record()
        torch.cuda.synchronize()
        return _summary([first.elapsed_time(last) / 1000 for first, last in events], graph=graph)

    @staticmethod
    def _captured(call: Callable[[], object]) -> Callable[[], None]:
        aside = torch.cuda.Stream()
        aside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(aside):  # compiles, and fills the allocator
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            call()
        return graph.replay

    @staticmethod
    def _wall(call: Callable[[], object]) -> float:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start


def _summary(seconds: list[float], *, graph: bool) -> Time:
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return Time(median, low, high, len(seconds), graph)
