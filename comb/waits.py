"""What makes the host wait for a GPU, as rarely as can be: numbers going there, and truth values coming back.

A host that waits hands the device no work meanwhile, and a pass of a few tokens takes the device less time than the
host takes to queue it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor (token ids, positions) on `device`, without a wait: it goes by way of pinned memory."""
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def truths(*flags: Tensor) -> list[bool]:
    """The values of single truth values, with one wait for each device that they are on."""
    return [value for together in _by_device(flags) for value in together]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity, with one wait for each device that they are on."""
    return all(truths(*(torch.isfinite(tensor).all() for tensor in tensors)))


def _by_device(flags: Sequence[Tensor]) -> Iterable[list[bool]]:
    """In order, neighbours on one device together."""
    start = 0
    for end in range(1, len(flags) + 1):
        if end == len(flags) or flags[end].device != flags[start].device:
            found: list[bool] = torch.stack(list(flags[start:end])).tolist()
            yield found
            start = end
