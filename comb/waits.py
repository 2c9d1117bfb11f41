"""What makes the host wait for a GPU, as rarely as can be: copies there and back, and truth values coming back.

A host that waits hands the device no work meanwhile, and a pass of a few tokens takes the device less time than the
host takes to queue it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from itertools import accumulate, groupby
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16  # bytes: no dtype is wider, and kernels read so much at once


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


def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors of one device on `device`: between the host and a GPU as one buffer, so by one copy, not one each.

    To a device nothing is waited for, to the host once.
    """
    source = next(iter(tensors.values())).device
    if (source.type == "cpu") == (device.type == "cpu"):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    starts = list(accumulate((-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors.values()), initial=0))
    packed = _packed(list(tensors.values()), starts, pin="cuda" in (source.type, device.type))
    buffer = _copied(packed, device)
    return {
        name: buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), start in zip(tensors.items(), starts, strict=False)
    }


def _packed(tensors: list[Tensor], starts: list[int], *, pin: bool) -> Tensor:
    """All of them as the bytes of one buffer, where they are; no copy if they are so already."""
    first = tensors[0]
    flat = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in tensors)
    if first.device.type != "cpu":
        gap = torch.zeros(_ALIGNED, dtype=torch.uint8, device=first.device)
        return torch.cat([part for row in flat for part in (row, gap[: -row.nbytes % _ALIGNED])])
    places = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    shared = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1 and (not pin or first.is_pinned())
    if shared and places == starts[:-1] and all(tensor.is_contiguous() for tensor in tensors):
        return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
    for row, start in zip(flat, starts, strict=False):
        buffer[start : start + row.nbytes] = row
    return buffer


@cache
def _copies(gpu: torch.device) -> Any:
    """The stream of copies, which run beside what the device computes."""
    return torch.cuda.Stream(gpu)


def _copied(packed: Tensor, device: torch.device) -> Tensor:
    if "cuda" not in (packed.device.type, device.type):
        return packed.to(device, non_blocking=device.type != "cpu")
    if device.type == "cpu":
        copies = _copies(packed.device)
        copies.wait_stream(torch.cuda.current_stream(packed.device))
        host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
        with torch.cuda.stream(copies):
            host.copy_(packed, non_blocking=True)
        packed.record_stream(copies)  # or its memory is given away before it is read
        copies.synchronize()
        return host
    gpu = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    copies, reader = _copies(gpu), torch.cuda.current_stream(gpu)
    with torch.cuda.stream(copies):
        buffer = packed.to(gpu, non_blocking=True)
    reader.wait_stream(copies)
    buffer.record_stream(reader)
    return buffer
