"""Between the host and a device in one copy: tensors lie behind one another in one buffer, on the host a pinned one.

A copy from ordinary memory is waited for, and a PICache has two tensors for each layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

_ALIGNED = 16  # bytes: no dtype is wider, and kernels read so much at once


def moved(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """The tensors on `device`, where all of them lie elsewhere on one device; from or to the host by one copy.

    To a device nothing is waited for, to the host once.
    """
    source = next(iter(tensors.values())).device
    if (source.type == "cpu") == (device.type == "cpu"):
        return {name: tensor.to(device) for name, tensor in tensors.items()}
    packed = _packed(list(tensors.values()), pin="cuda" in (source.type, device.type))
    buffer = _to_host(packed) if device.type == "cpu" else _to_device(packed, device)
    starts = _starts(tensors.values())
    return {
        name: buffer[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for (name, tensor), start in zip(tensors.items(), starts, strict=False)
    }


def is_on(tensor: Tensor, device: torch.device) -> bool:
    """Whether `tensor` lies there; a device without a number is any of its kind, as for ``Tensor.to``."""
    return tensor.device.type == device.type and device.index in (None, tensor.device.index)


def _starts(tensors: Any) -> list[int]:
    """Where each tensor begins in a buffer of them, in bytes, and its end."""
    return list(accumulate((-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in tensors), initial=0))


def _packed(tensors: list[Tensor], *, pin: bool) -> Tensor:
    """All of them as the bytes of one buffer, where they are; no copy if they are so already."""
    starts, first = _starts(tensors), tensors[0]
    if first.device.type != "cpu":
        gap = torch.zeros(_ALIGNED, dtype=torch.uint8, device=first.device)
        parts = [part for tensor in tensors for part in (_bytes(tensor), gap[: -tensor.nbytes % _ALIGNED])]
        return torch.cat(parts)
    places = [tensor.storage_offset() * tensor.element_size() for tensor in tensors]
    shared = len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1 and (not pin or first.is_pinned())
    if shared and places == starts[:-1] and all(tensor.is_contiguous() for tensor in tensors):
        return torch.empty(0, dtype=torch.uint8).set_(first.untyped_storage())
    buffer = torch.empty(starts[-1], dtype=torch.uint8, pin_memory=pin)
    for tensor, start in zip(tensors, starts, strict=False):
        buffer[start : start + tensor.nbytes] = _bytes(tensor)
    return buffer


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


@cache
def _stream(device: torch.device) -> Any:
    """Copies run beside what the device computes."""
    return torch.cuda.Stream(device)


def _to_host(packed: Tensor) -> Tensor:
    if packed.device.type != "cuda":
        return packed.to("cpu")
    stream = _stream(packed.device)
    stream.wait_stream(torch.cuda.current_stream(packed.device))
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    with torch.cuda.stream(stream):
        host.copy_(packed, non_blocking=True)
    packed.record_stream(stream)
    stream.synchronize()
    return host


def _to_device(packed: Tensor, device: torch.device) -> Tensor:
    if device.type != "cuda":
        return packed.to(device, non_blocking=True)
    device = torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
    stream, reader = _stream(device), torch.cuda.current_stream(device)
    with torch.cuda.stream(stream):
        buffer = packed.to(device, non_blocking=True)
    reader.wait_stream(stream)
    buffer.record_stream(reader)
    return buffer
