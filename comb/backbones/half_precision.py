"""Does this CPU multiply 16-bit numbers, or does torch do it for it, several times slower than in float32?

Most CPUs without AVX512-BF16 or AMX don't, and most checkpoints on the Hub are in bfloat16. Measured, not looked up:
names of instructions say little of what torch makes of them.
"""

from __future__ import annotations

import functools
import logging
import time

import torch
from torch import nn

logger = logging.getLogger(__name__)

NOTICED = 10_000_000
"""Parameters from which on a model is slow enough for it to matter."""


@functools.cache
def slowdown(dtype: torch.dtype, size: int = 256) -> float:
    """How many times as long a linear layer takes a core of this CPU in `dtype` as in float32; best of eight each."""

    def seconds(of: torch.dtype) -> float:
        a = torch.ones(size, size, dtype=of)
        took = []
        for _ in range(8):
            start = time.perf_counter()
            nn.functional.linear(a, a)
            took.append(time.perf_counter() - start)
        return min(took)

    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other where a machine is busy, which is as long in any dtype
    try:
        return seconds(dtype) / seconds(torch.float32)
    finally:
        torch.set_num_threads(threads)


def is_slow(dtype: torch.dtype) -> bool:
    """Whether this CPU is several times faster in float32."""
    return dtype in (torch.bfloat16, torch.float16) and slowdown(dtype) > 4


def warn_if_slow(model: nn.Module) -> None:
    """Says once per dtype and process that a model on the CPU would be several times faster in float32."""
    first = next(model.parameters(), None)
    if first is None or first.device.type != "cpu" or sum(weight.numel() for weight in model.parameters()) < NOTICED:
        return
    if is_slow(first.dtype):
        _warn(first.dtype)


@functools.cache
def _warn(dtype: torch.dtype) -> None:
    logger.warning("this CPU multiplies %s some %.0f times slower than float32: load the model with dtype=float32 "
                   "(--dtype float32; model.dtype=float32 when training)",
                   str(dtype).removeprefix("torch."), slowdown(dtype))  # fmt: skip
