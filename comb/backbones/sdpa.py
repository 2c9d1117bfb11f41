"""Which of torch's attention kernels a GPU is left with: cuDNN's, unless it plans anew for each length.

On Hopper torch tries cuDNN first, and a cuDNN plan holds for one shape. Making one takes 36 ms on an H200, and so does
every new number of keys, which is every token of an answer, once for all layers.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

logger = logging.getLogger(__name__)

SLOW_S = 0.005  # more than this for a new length, and a step of decoding is mostly that
_chosen: set[int] = set()


def choose_attention(
    device: torch.device, *, new_and_again: Callable[[torch.device], tuple[float, float]] | None = None,
    backend: Any = torch.backends.cuda,
) -> None:  # fmt: skip
    """Switches cuDNN's attention off for this process if it is what makes new lengths slow, and says so; once a GPU.

    Args:
        new_and_again: seconds of attention to a number of keys that is new, and to one that isn't.
    """
    if device.type != "cuda" or (device.index or 0) in _chosen:
        return
    _chosen.add(device.index or 0)
    measure = new_and_again or seconds_of_lengths
    if not backend.cudnn_sdp_enabled():
        return
    new, again = measure(device)
    if new - again <= SLOW_S:
        return
    backend.enable_cudnn_sdp(False)
    without, repeated = measure(device)
    if without - repeated > SLOW_S:  # something else is slow
        backend.enable_cudnn_sdp(True)
        return
    logger.warning(
        "cuDNN's attention takes %.0f ms for each new number of keys here, without it %.1f ms: switched off for this "
        "process; torch.backends.cuda.enable_cudnn_sdp(True) behind the first engine switches it on again",
        1e3 * new, 1e3 * without,
    )  # fmt: skip


def seconds_of_lengths(device: torch.device, first: int = 1000) -> tuple[float, float]:
    """The least of some new lengths, `first` and on, and of the same again; what all lengths share is made before."""
    lengths = range(first, first + 4)
    query, keys = (torch.zeros(1, 8, count, 128, dtype=torch.bfloat16, device=device) for count in (1, max(lengths)))

    def seconds(length: int) -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        F.scaled_dot_product_attention(query, keys[:, :, :length], keys[:, :, :length])
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds(first - 1)
    return min(map(seconds, lengths)), min(map(seconds, lengths))
