"""Times of GPU work, and the exact attention that MAC is measured against.

A call is captured in a CUDA graph where it can be (so no launch waits for Python, as in a serving engine's decode), and
the device's cache is overwritten before each replay: in a model, another layer's keys come in between.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


def exact_attentions(device: torch.device, *, flex: bool) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Ways to compute exact attention of query [B, H, D] to keys [B, G, L, D] and values: each gives [B, H, V].

    Query heads that share keys are handed over as queries of one head: no mask is needed, keys are read once, and every
    backend of SDPA can do it.
    """

    def grouped(query: Tensor, keys: Tensor) -> Tensor:
        heads: Tensor = query.unflatten(1, (keys.shape[1], -1))
        return heads

    def sdpa(backend: SDPBackend, expand: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
        def call(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            with sdpa_kernel(backend):
                if expand:
                    own = F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)
                    return own[:, :, 0]
                return F.scaled_dot_product_attention(grouped(query, keys), keys, values).flatten(1, 2)

        return call

    if device.type != "cuda":
        # one that works here and one that is left out
        return {
            "math, grouped": sdpa(SDPBackend.MATH, False),
            "cudnn, grouped": sdpa(SDPBackend.CUDNN_ATTENTION, False),
        }
    ways = {
        "flash, grouped": sdpa(SDPBackend.FLASH_ATTENTION, False),
        "flash, gqa": sdpa(SDPBackend.FLASH_ATTENTION, True),
        "cudnn, grouped": sdpa(SDPBackend.CUDNN_ATTENTION, False),
        "cudnn, gqa": sdpa(SDPBackend.CUDNN_ATTENTION, True),
        "efficient, grouped": sdpa(SDPBackend.EFFICIENT_ATTENTION, False),
    }
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        # of dynamic sizes: one compilation for all points, not one each
        compiled: Any = torch.compile(flex_attention, dynamic=True)

        def flex_call(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
            output: Tensor = compiled(query[:, :, None], keys, values, enable_gqa=True)
            return output[:, :, 0]

        ways["flex, gqa"] = flex_call
    return ways


def working(
    ways: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]], inputs: tuple[Tensor, Tensor, Tensor], wanted: Tensor,
    bound: float,
) -> Iterator[tuple[str, str]]:  # fmt: skip
    """Per way, why it isn't measured: it fails here, or is off by more than `bound`; empty if it is."""
    for name, way in ways.items():
        try:
            error = float((way(*inputs).float() - wanted).abs().max())
        except Exception as failure:  # a backend refuses, or its compiler is missing: any kind of error
            yield name, f"{type(failure).__name__}: {str(failure)[:200]}"
            continue
        yield name, "" if error < bound else f"off by {error:.3g}"


def _summary(seconds: list[float], *, graph: bool) -> Time:
    low, median, high = statistics.quantiles(seconds, n=4) if len(seconds) > 1 else seconds * 3
    return Time(median, low, high, len(seconds), graph)
