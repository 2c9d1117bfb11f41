"""Who does what of a step's attention to paged documents: worked out on the host, where all lengths are known.

Query tokens of a row are cut into tiles, the row's list of blocks into shares; one pair of them is an item, and per
key/value head a program. Rows with few query tokens (decoding) and rows with many (prefill) have tiles of their own
size, so there are up to two lists. A tile that sees its row's documents in one share writes its output; the others
write partial sums, which a second kernel merges.

Source: FlashAttention's split over keys (Flash-Decoding); here shares are of equal length over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comb.kernels.launch import Launch, power_of_two
from comb.kernels.paged.layout import PagedBatch


@dataclass(frozen=True)
class PagedLaunch:
    """Sizes of the launches; they change rounding and speed, nothing else.

    Args:
        decode, prefill: for rows with few and with many query tokens.
        prefill_rows: of a tile's matrix product, heads included, in prefill; in decoding as few as can be.
        least_keys: that a program takes: shorter shares cost more in merging than they bring.
    """

    decode: Launch = field(default_factory=partial(Launch, per_processor=4))
    prefill: Launch = field(default_factory=Launch)
    prefill_rows: int = 64
    least_keys: int = 256


def launch_for(dtype: torch.dtype, width: int) -> PagedLaunch:
    """What is taken for queries [T, H, `width`], so that no program's registers overflow (tests/helpers/compiled_*)."""
    if dtype == torch.float32:  # products without tensor cores take many more registers
        return PagedLaunch(Launch(32, 32), Launch(32, 32), prefill_rows=16)
    if width > 128:
        return PagedLaunch(Launch(key_tile=32), Launch(key_tile=32, warps=8))
    return PagedLaunch()


@dataclass(frozen=True)
class PlanItems:
    """One launch.

    Args:
        numbers: [items, 5] int32: first query token, how many, first and last + 1 of the entries in the list of all
            tables, and the first of its rows of partial sums (-1: it writes the output).
        tokens: query tokens of a tile, at most. rows: of its matrix product, heads included.
    """

    numbers: Tensor
    tokens: int
    rows: int
    launch: Launch


@dataclass(frozen=True)
class PagedPlan:
    """A step's work.

    Args:
        table: [entries] int32, all rows' `BlockTable.last` behind one another.
        launches: none of them empty.
        merges: [tokens, 4] int32: query token, its first row of partial sums, the step to its next, how many.
        partial_rows: of partial sums, all together.
    """

    table: Tensor
    launches: tuple[PlanItems, ...]
    merges: Tensor
    partial_rows: int


def make_plan(batch: PagedBatch, *, heads: int, groups: int, device: torch.device, sizes: PagedLaunch) -> PagedPlan:
    """The plan of a batch: every tile sees each entry of its row once, and entries of no other row."""
    decode, prefill = sizes.decode, sizes.prefill
    shared, block = heads // groups, batch.tables[0].block_size
    few = power_of_two(shared, 16)
    many = max(sizes.prefill_rows, few)
    counts = np.array(batch.counts, dtype=np.int64)
    lengths = np.array([len(table.last) for table in batch.tables], dtype=np.int64)
    first_token, first_entry = counts.cumsum() - counts, lengths.cumsum() - lengths
    is_few = counts * shared <= few
    tile = np.where(is_few, few // shared, many // shared)
    tiles = -(-counts // tile)
    # one share for everybody, so that programs end together; both launches run at once at best
    programs = decode.count(device) if is_few.all() else prefill.count(device)
    share = max(-(-int((tiles * lengths).sum()) * groups // programs), -(-sizes.least_keys // block), 1)

    numbers, merges, partial_rows = [], [], 0
    for chosen, rows in ((is_few, few), (~is_few, many)):
        made, merged, partial_rows = _items(
            counts[chosen],
            lengths[chosen],
            first_token[chosen],
            first_entry[chosen],
            rows // shared,
            share,
            partial_rows,
        )
        numbers.append(made)
        merges.append(merged)
    tensors = to_device(
        [np.concatenate([table.last for table in batch.tables]), *numbers, np.concatenate(merges)], device
    )
    lists = (PlanItems(tensors[1], few // shared, few, decode), PlanItems(tensors[2], many // shared, many, prefill))
    return PagedPlan(tensors[0], tuple(items for items in lists if len(items.numbers)), tensors[3], partial_rows)


def _items(
    counts: NDArray[np.int64], lengths: NDArray[np.int64], first_token: NDArray[np.int64],
    first_entry: NDArray[np.int64], tile: int, share: int, partial_rows: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:  # fmt: skip
    """Items and merges of rows that are cut into tiles of `tile` query tokens and shares of `share` entries."""
    tiles = -(-counts // tile)
    row = np.repeat(np.arange(len(counts)), tiles)
    place = (np.arange(len(row)) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile
    token, size = first_token[row] + place, np.minimum(counts[row] - place, tile)
    shares = -(-lengths[row] // share)
    rows = np.where(shares > 1, size * shares, 0)
    part = partial_rows + rows.cumsum() - rows

    item = np.repeat(np.arange(len(row)), shares)
    number = np.arange(len(item)) - np.repeat(shares.cumsum() - shares, shares)
    begin, end = first_entry[row], first_entry[row] + lengths[row]
    low = begin[item] + number * share
    columns = (
        token[item], size[item], low, np.minimum(low + share, end[item]),
        np.where(shares[item] > 1, part[item] + number * size[item], -1),
    )  # fmt: skip

    split = np.flatnonzero(shares > 1)
    owner = np.repeat(split, size[split])
    inside = np.arange(len(owner)) - np.repeat(size[split].cumsum() - size[split], size[split])
    merged = (token[owner] + inside, part[owner] + inside, size[owner], shares[owner])
    items, merges = (np.stack(found, axis=1).astype(np.int32) for found in (columns, merged))
    return items, merges, partial_rows + int(rows.sum())


def to_device(arrays: list[NDArray[np.int32]], device: torch.device) -> list[Tensor]:
    """The arrays on `device`, in one copy that the host doesn't wait for."""
    joined = torch.from_numpy(np.concatenate([array.ravel() for array in arrays]))
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    sizes = [array.size for array in arrays]
    return [part.view(array.shape) for part, array in zip(joined.split(sizes), arrays, strict=True)]
