"""A sample of a model's weights, by which writes are noticed that nobody counts: bytes, compared with those of before.

Of each tensor, all where that is little, else runs of 64 bytes (what a CPU fetches at once), spread over its rows and
columns. What writes a matrix through ``.data`` (an adapter exchanged in place, an average, weights sent by a trainer)
changes some of them, even in 16 bits where most small updates round to nothing. Single elements may be missed.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from comb.waits import on_device

_RUN = 64  # bytes
_RUNS = 2**12  # of a model, about
_LEAST, MOST = 8, 256  # of one tensor
_ODD = 0x1E3779B97F4A7C15
_SLICE = 4096  # bytes of an expert's matrix, which may be exchanged alone, or more


class Sample:
    """What some tensors hold at some places, and whether they still do.

    Args:
        tensors: strided ones; those without data (on the meta device) aren't looked at.
        closer: for some of them, by their index, how many runs at least.
    """

    def __init__(self, tensors: Sequence[Tensor], closer: Mapping[int, int]) -> None:
        runs = min(max(_RUNS // max(len(tensors), 1), _LEAST), MOST)
        places = {
            index: _places(tensor, max(runs, closer.get(index, 0)))
            for index, tensor in enumerate(tensors) if tensor.numel() and not tensor.is_meta
        }  # fmt: skip
        # what lies alike, and what is whole, is read by one operator, what is on one device compared by one
        groups: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for index, (size, stride) in places.items():
            alike = (size, stride) if len(size) > 1 else ()
            groups[tensors[index].device, tensors[index].dtype, *alike].append(index)
        self._groups = [(device, len(members)) for (device, *_), members in groups.items()]
        self._order = [index for members in groups.values() for index in members]
        self._sizes, self._strides = ([places[index][part] for index in self._order] for part in (0, 1))
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
            joined = map(torch.cat, found.values())
            # bytes as numbers of eight, which are compared faster
            return [torch.nn.functional.pad(data, (0, -len(data) % 8)).view(torch.int64) for data in joined]


class Rows:
    """What each row of a model's large tables holds at one place of 64 bytes, for looks at the rows of some tokens.

    Args:
        tables: [rows, width], of plain dtypes.
    """

    def __init__(self, tables: Sequence[Tensor]) -> None:
        self._kept = [_row_sums(table) for table in tables]

    def hold(self, tables: Sequence[Tensor], token_ids: Sequence[int]) -> bool:
        """Whether the rows of these tokens hold the same bytes, in tables that have them."""
        ids = torch.tensor(token_ids)
        for table, kept in zip(tables, self._kept, strict=True):
            own = on_device(ids[ids < len(table)], table.device)
            if not torch.equal(_row_sums(table.index_select(0, own)), kept[own]):
                return False
        return True


def _row_sums(rows: Tensor) -> Tensor:
    """[rows]: each one's bytes in the middle of it, put into a word."""
    run = min(_RUN // rows.element_size(), rows.shape[1])
    start = (rows.shape[1] - run) // 2
    with torch.inference_mode(False), torch.no_grad():
        data = rows[:, start : start + run].contiguous().view(torch.uint8)
        words = torch.nn.functional.pad(data, (0, -data.shape[1] % 8)).view(torch.int64)
        odd = torch.arange(1, 2 * words.shape[1], 2, device=words.device) * _ODD
        return (words * odd).sum(dim=1)


def _places(tensor: Tensor, runs: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Size and stride of a view [runs, elements of each], or [elements] for all."""
    # from the first to the last element: a view's others lie between
    length = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    run, row = max(_RUN // tensor.element_size(), 1), tensor.shape[-1] if tensor.ndim > 1 else 0
    slices = math.prod(tensor.shape[:-2])
    if tensor.nbytes >= slices * _SLICE:
        runs = max(runs, 2 * slices)
    if length <= runs * run:
        return (length,), (1,)
    step = (length - run) // (runs - 1)
    if 0 < row <= step:
        # a whole number of rows would look at the same columns again and again, the golden section at all of them
        golden = max(round(0.618 * row), 1)
        step = golden + (step - golden) // row * row
    return ((length - run) // step + 1, run), (step, 1)
