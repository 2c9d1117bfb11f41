"""What makes the host wait for a GPU, as rarely as can be: numbers going there, and truth values coming back.

A host that waits hands the device no work meanwhile, and a pass of a few tokens takes the device less time than the
host takes to queue it.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor (token ids, positions) on `device`, without a wait: it goes by way of pinned memory."""
    if tensor.device.type != "cpu" or device.type == "cpu":
        return tensor.to(device)
    return (tensor.pin_memory() if device.type == "cuda" else tensor).to(device, non_blocking=True)


def truths(*flags: Tensor) -> list[bool]:
    """The values of single truth values, with one wait for each device that neighbours are on."""
    together = (torch.stack(list(same)) for _, same in groupby(flags, lambda flag: flag.device))
    return [value for values in together for value in values.tolist()]


def all_finite(tensors: Iterable[Tensor]) -> bool:
    """Whether no tensor holds NaN or infinity, with one wait for each device that they are on."""
    return all(truths(*(torch.isfinite(tensor).all() for tensor in tensors)))
