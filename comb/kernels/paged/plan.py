"""Who does what of a step's attention to paged documents: worked out on the host, where all lengths are known.

Query tokens of a row are cut into tiles, the row's list of blocks into even shares; one pair of them is an item, and
per key/value head a program. Rows with few query tokens (decoding) and rows with many (prefill) have tiles of their own
size, so there are up to two lists. A tile that sees its row's documents in one share writes its output; the others
write partial sums, which a second kernel merges.

Source: FlashAttention's split over keys (Flash-Decoding); here shares are of about equal length over all rows.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comb.kernels.launch import Launch, power_of_two
from comb.kernels.paged.attention import PagedBatch
from comb.waits import on_device

_WAVES = (1, 2, 3, 4, 6, 8)  # shares that a place of the device takes one after the other, as far as they are tried
_START = 2  # what a program's start and its merge take, in blocks


@dataclass(frozen=True)
class PagedLaunch:
    """Sizes of the launches for rows with few and with many query tokens; they change rounding and speed alone."""

    decode: Launch = field(default_factory=Launch)
    prefill: Launch = field(default_factory=Launch)
    prefill_rows: int = 64  # of a tile's matrix product, heads included; in decoding as few as can be
    least_keys: int = 256  # that a program takes: shorter shares cost more in merging than they bring


def launch_for(dtype: torch.dtype, width: int, *, fp8: bool = False) -> PagedLaunch:
    """What is taken for queries [T, H, `width`] over a pool in their dtype or in `fp8`.

    So that no program's registers overflow, and as many programs as a multiprocessor of an H100 or H200 has registers
    and shared memory for (tests/helpers/compiled_paged_kernels.py finds out both).
    """
    size = (width > 64) + (width > 128)
    if dtype == torch.float32:  # products without tensor cores take many more registers
        if not size:
            return PagedLaunch(Launch(32), Launch(32), prefill_rows=16)
        decode_keys = 32 if size == 1 else 16
        return PagedLaunch(Launch(key_tile=decode_keys, warps=8), Launch(key_tile=16, warps=8), prefill_rows=16)
    decode, prefill = ((3, 2, 2), (2, 2, 1)) if fp8 else ((5, 3, 3), (3, 2, 1))
    keys, warps = (64, 64, 32)[size], (4, 4, 8)[size]
    return PagedLaunch(
        Launch(key_tile=keys, per_processor=decode[size]),
        Launch(key_tile=keys, per_processor=prefill[size], warps=warps),
    )


@dataclass(frozen=True)
class PlanItems:
    """One launch."""

    # [items, 5] int32: first query token, how many, first and last + 1 of the entries in the list of all tables, and
    # the first of its rows of partial sums (-1: it writes the output)
    numbers: Tensor
    rows: int  # of a tile's matrix product, heads included
    launch: Launch


@dataclass(frozen=True)
class PagedPlan:
    table: Tensor  # [entries] int32, all rows' `BlockTable.last` behind one another
    launches: tuple[PlanItems, ...]  # none of them empty
    merges: Tensor  # [tokens, 4] int32: query token, its first row of partial sums, the step to its next, how many
    partial_rows: int  # of partial sums, all together


def make_plan(batch: PagedBatch, *, heads: int, groups: int, device: torch.device, sizes: PagedLaunch) -> PagedPlan:
    """The plan of a batch: every tile sees each entry of its row once, and entries of no other row."""
    decode, prefill = sizes.decode, sizes.prefill
    shared, block = heads // groups, batch.tables[0].block_size
    few = power_of_two(shared, 16)
    many = max(sizes.prefill_rows, few)
    counts = np.array(batch.counts, dtype=np.int64)
    lengths = np.array([len(table.last) for table in batch.tables], dtype=np.int64)
    is_few = counts * shared <= few
    tile = np.where(is_few, few // shared, many // shared)
    tiles = -(-counts // tile)
    # one choice for everybody: both launches run at once at best; with many heads decoding takes as much as prefill
    programs = (decode if is_few.all() and few == 16 else prefill).count(device)
    shares = even_shares(lengths, tiles * groups, programs, least=max(-(-sizes.least_keys // block), 1))

    numbers, merges, partial_rows = [], [], 0
    for chosen, rows in ((is_few, few), (~is_few, many)):
        made, merged, partial_rows = _items(counts, lengths, shares, chosen, rows // shared, partial_rows)
        numbers.append(made)
        merges.append(merged)
    tensors = to_device(
        [np.concatenate([table.last for table in batch.tables]), *numbers, np.concatenate(merges)], device
    )
    lists = PlanItems(tensors[1], few, decode), PlanItems(tensors[2], many, prefill)
    return PagedPlan(tensors[0], tuple(items for items in lists if len(items.numbers)), tensors[3], partial_rows)


def even_shares(
    lengths: NDArray[np.int64], repeats: NDArray[np.int64], programs: int, *, least: int
) -> NDArray[np.int64]:
    """Into how many even shares each row's list of blocks is cut, so that programs end together.

    Args:
        lengths: [rows], in blocks. repeats: [rows], how many programs read each share.
        programs: that the device holds at once. least: blocks of a share, at least.
    """
    # whatever ends, the device takes the next program, so they all have ended after less than the mean work of its
    # places and one more share, and after as many of the largest share as come one after the other. The cut with the
    # lowest such bound is taken; small shares have a low one, but each costs a start and a merge
    total = int((repeats * lengths).sum())
    best, found = math.inf, np.ones_like(lengths)
    for waves in _WAVES:
        share = max(-(-total // (programs * waves)), least)
        shares = -(-lengths // share)
        size = -(-lengths // shares) + _START
        count, work, longest = (repeats * shares).sum(), (repeats * shares * size).sum(), size.max()
        bound = min(-(-count // programs) * longest, work / programs + longest)
        if bound < best:
            best, found = bound, shares
        if share == least:
            break
    return found


def _items(
    counts: NDArray[np.int64], lengths: NDArray[np.int64], row_shares: NDArray[np.int64], chosen: NDArray[np.bool_],
    tile: int, partial_rows: int,
) -> tuple[NDArray[np.int32], NDArray[np.int32], int]:  # fmt: skip
    """Items and merges of the `chosen` rows, cut into tiles of `tile` query tokens and `row_shares` shares."""
    first_token, first_entry = counts.cumsum() - counts, lengths.cumsum() - lengths
    tiles = -(-counts[chosen] // tile)
    row = np.repeat(np.flatnonzero(chosen), tiles)
    place = (np.arange(len(row)) - np.repeat(tiles.cumsum() - tiles, tiles)) * tile
    token, size = first_token[row] + place, np.minimum(counts[row] - place, tile)
    shares = row_shares[row]
    rows = np.where(shares > 1, size * shares, 0)
    part = partial_rows + rows.cumsum() - rows

    item = np.repeat(np.arange(len(row)), shares)
    number = np.arange(len(item)) - np.repeat(shares.cumsum() - shares, shares)
    low, high = (first_entry[row][item] + (number + one) * lengths[row][item] // shares[item] for one in (0, 1))
    columns = (
        token[item], size[item], low, high,
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
    joined = on_device(torch.from_numpy(np.concatenate([array.ravel() for array in arrays])), device)
    sizes = [array.size for array in arrays]
    return [part.view(array.shape) for part, array in zip(joined.split(sizes), arrays, strict=True)]
