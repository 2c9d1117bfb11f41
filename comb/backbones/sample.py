"""A sample of a model's weights, by which writes are noticed that nobody counts: bytes, compared with those of before.

Of each tensor, all where that is little, else runs of 64 bytes (what a CPU fetches at once), spread over its rows and
columns. What writes a matrix through ``.data`` (an adapter exchanged in place, an average, weights sent by a trainer)
changes some of them, even in 16 bits where most small updates round to nothing. Single elements may be missed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

_RUN = 64  # bytes
_RUNS = 2**12  # of a model, about
_LEAST, _MOST = 8, 256  # of one tensor
_SLICE = 4096  # bytes of an expert's matrix, which may be exchanged alone, or more


class Sample:
    """What some tensors hold at some places, and whether they still do.

    Args:
        tensors: strided ones; those without data (on the meta device) aren't looked at.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        runs = min(max(_RUNS // max(len(tensors), 1), _LEAST), _MOST)
        groups: dict[tuple[torch.device, torch.dtype, tuple[int, int], tuple[int, int]], list[int]] = defaultdict(list)
        for index, tensor in enumerate(tensors):
            if tensor.numel() and not tensor.is_meta:
                groups[tensor.device, tensor.dtype, *_places(tensor, runs)].append(index)
        # tensors of a group are read by one operator, those of a device compared by one
        self._groups = [(device, len(members)) for (device, *_), members in groups.items()]
        self._order = [index for members in groups.values() for index in members]
        self._sizes = [size for (_, _, size, _), members in groups.items() for _ in members]
        self._strides = [stride for (*_, stride), members in groups.items() for _ in members]
        self._kept = self._read(tensors)

    def holds(self, tensors: Sequence[Tensor]) -> bool:
        """Whether the same tensors hold the same bytes. One wait for each GPU."""
        return all(map(torch.equal, self._read(tensors), self._kept))

    def _read(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        with torch.inference_mode(False), torch.no_grad():
            views = map(torch.as_strided, map(tensors.__getitem__, self._order), self._sizes, self._strides)
            found: dict[torch.device, list[Tensor]] = defaultdict(list)
            for device, members in self._groups:
                found[device].append(torch.cat(list(islice(views, members))).flatten().view(torch.uint8))
            return [_in_words(torch.cat(parts)) for parts in found.values()]


def _in_words(data: Tensor) -> Tensor:
    """Bytes as numbers of eight, which are compared faster."""
    return torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64)


def _places(tensor: Tensor, runs: int) -> tuple[tuple[int, int], tuple[int, int]]:
    """Size and stride of a view [runs, elements of each]."""
    # from the first to the last element: a view's others lie between
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    run, row = max(_RUN // tensor.element_size(), 1), tensor.shape[-1] if tensor.ndim > 1 else 0
    slices = math.prod(tensor.shape[:-2])
    if tensor.nbytes >= slices * _SLICE:
        runs = max(runs, 2 * slices)
    if length <= runs * run:
        return (1, length), (length, 1)
    step = (length - run) // (runs - 1)
    if 0 < row <= step:
        # a whole number of rows would look at the same columns again and again, the golden section at all of them
        golden = max(round(0.618 * row), 1)
        step = golden + (step - golden) // row * row
    return ((length - run) // step + 1, run), (step, 1)
