"""Which keys each row and key/value head has to read, and an equal share of them for every program.

Spans differ by orders of magnitude between a miss and a hit. So all spans are cut into tiles of keys, the tiles of all
rows and key/value heads are numbered through, and every program takes as many neighbouring ones as any other; where it
crosses from one span to the next it leaves a piece. Program p and span s share at most one piece, and in that order
p + s grows by at least 1 from piece to piece, so p + s is where it is kept: no counters, no list.

Spans are ordered by row, key/value head and kind (`launch.SINK`, `AMEND`, `TAIL`). Query heads that share a key/value
head share its spans, as far back as the worst of them needs.

Source: MAC-Attention sec. 4 (K2, load balance) and app. B.2.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.launch import Launch, power_of_two
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.match import Match
from comb.kernels.mac.match_kernel import NO_POSITION


@dataclass(frozen=True)
class SpanSchedule:
    """What is read, and by whom.

    Args:
        match: as `find_match` gives it.
        low: first key that each query head amends its summary with [B, H].
        keys_read, group_keys_read: as in `comb.kernels.mac.step.MacStep`.
        first_tile: [3 B G + 1], number of each span's first tile; the last is the number of tiles.
        share: [1], tiles per program.
    """

    match: Match
    low: Tensor
    keys_read: Tensor
    group_keys_read: Tensor
    first_tile: Tensor
    share: Tensor


@triton.jit
def _select_kernel(
    near_ptr, near_pos_ptr, position_ptr, hit_ptr, slot_ptr, pos_ptr, distance_ptr, low_ptr, read_ptr, group_read_ptr,
    count_ptr, groups, heads, window, band, sink, tiles,
    SHARED: tl.constexpr, M: tl.constexpr, TILES: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(0)
    b, g = group // groups, group % groups
    number = tl.arange(0, M)
    own = number < SHARED
    head = b * heads + g * SHARED + number
    tile = tl.arange(0, TILES)
    wanted = own[:, None] & (tile < tiles)[None, :]
    at = head[:, None] * tiles + tile[None, :]
    squared = tl.load(near_ptr + at, mask=wanted, other=float("inf"))
    near = tl.min(squared, axis=1)
    oldest = tl.load(near_pos_ptr + at, mask=wanted, other=NO_POSITION)
    pos = tl.min(tl.where(squared == near[:, None], oldest, NO_POSITION), axis=1)
    hit = near < float("inf")
    pos = tl.where(hit, pos, -1)

    m = tl.load(position_ptr + b)
    own_end = tl.maximum(m + 1 - band, 0)
    sink_end = tl.minimum(own_end, sink)
    low = tl.where(hit, pos + 1 - band, sink_end)
    read = tl.where(hit, m + 1 - low + sink, m + 1)
    tl.store(hit_ptr + head, hit.to(tl.int8), mask=own)
    tl.store(slot_ptr + head, tl.where(hit, pos % window, 0), mask=own)
    tl.store(pos_ptr + head, pos, mask=own)
    tl.store(distance_ptr + head, tl.sqrt_rn(near), mask=own)
    tl.store(low_ptr + head, low, mask=own)
    tl.store(read_ptr + head, read, mask=own)
    tl.store(group_read_ptr + group, tl.max(tl.where(own, read, 0), axis=0))

    farthest = tl.min(tl.where(own, low, own_end), axis=0)
    count = count_ptr + group * 3
    tl.store(count, tl.cdiv(sink_end, KEYS).to(tl.int32))
    tl.store(count + 1, tl.cdiv(own_end - farthest, KEYS).to(tl.int32))
    tl.store(count + 2, tl.cdiv(tl.maximum(m + 1 - own_end, 0), KEYS).to(tl.int32))


@triton.jit
def _schedule_kernel(count_ptr, first_ptr, share_ptr, spans, programs, BLOCK: tl.constexpr):
    total = 0
    for begin in range(0, spans, BLOCK):
        span = begin + tl.arange(0, BLOCK)
        count = tl.load(count_ptr + span, mask=span < spans, other=0)
        tl.store(first_ptr + span, total + tl.cumsum(count, axis=0) - count, mask=span < spans)
        total += tl.sum(count, axis=0)
    tl.store(first_ptr + spans, total)
    tl.store(share_ptr, tl.maximum(tl.cdiv(total, programs), 1))


def make_schedule(
    near: Tensor, near_pos: Tensor, position: Tensor, groups: int, window: int, config: MacConfig, launch: Launch
) -> SpanSchedule:
    """From what `nearest_in_tiles` gives [B, H, tiles], for `groups` key/value heads."""
    rows, heads, tiles = near.shape
    device, spans = near.device, 3 * rows * groups

    def made(*shape: int, kind: torch.dtype = torch.long) -> Tensor:
        return torch.empty(shape, dtype=kind, device=device)

    hit, slot, pos, low, read = made(rows, heads, kind=torch.int8), *(made(rows, heads) for _ in range(4))
    distance, group_read = made(rows, heads, kind=torch.float32), made(rows, groups)
    count, first, share = (made(number, kind=torch.int32) for number in (spans, spans + 1, 1))
    shared = heads // groups
    _select_kernel[(rows * groups,)](
        near, near_pos, position, hit, slot, pos, distance, low, read, group_read, count,
        groups, heads, window, config.band, config.sink, tiles,
        SHARED=shared, M=power_of_two(shared), TILES=power_of_two(tiles), KEYS=launch.key_tile,
    )  # fmt: skip
    _schedule_kernel[(1,)](count, first, share, spans, launch.count(device), BLOCK=power_of_two(min(spans, 1024)))
    return SpanSchedule(Match(hit.view(torch.bool), slot, pos, distance), low, read, group_read, first, share)
