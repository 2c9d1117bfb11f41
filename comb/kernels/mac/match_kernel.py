"""Match on the device: per (row, query head, tile of the ring), the nearest query whose summary may be reused.

The distance is taken from differences in 32 bits, whole, as `match.find_match` takes it: no expansion into
products, which cancels. Of two at the same distance the older one wins, here and between tiles.

Source: MAC-Attention sec. 3.2 and 4 (K1).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.launch import Launch, power_of_two
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.state import MacState

NO_POSITION = tl.constexpr(2**62)


@triton.jit
def _match_kernel(
    query_ptr, ring_ptr, lse_ptr, pos_ptr, chain_ptr, drift_ptr, position_ptr, near_ptr, near_pos_ptr,
    stride_qb, stride_qh, limit, heads, window, reach, band, sink, min_length, most_chain, tiles,
    CHAIN: tl.constexpr, DRIFT: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1)
    b, h = row_head // heads, row_head % heads
    channel = tl.arange(0, WIDE)
    own = channel < WIDTH
    query = tl.load(query_ptr + b * stride_qb + h * stride_qh + channel, mask=own, other=0.0).to(tl.float32)
    m = tl.load(position_ptr + b)
    oldest = tl.where(m >= min_length, tl.maximum(m - reach, 0), m)

    slot = tile * TILE + tl.arange(0, TILE)
    inside = slot < window
    pos = tl.load(pos_ptr + b * window + slot, mask=inside, other=-1)
    able = inside & (pos >= oldest) & (pos < m) & (pos + 1 - band > sink)
    row = (b * window + slot) * heads + h
    able = able & (tl.load(lse_ptr + row, mask=able, other=float("-inf")) > float("-inf"))
    if CHAIN:
        able = able & (tl.load(chain_ptr + row, mask=able, other=0) < most_chain)
    # rows that can't match aren't fetched
    kept = tl.load(ring_ptr + row[:, None] * WIDTH + channel[None, :], mask=able[:, None] & own[None, :], other=0.0).to(
        tl.float32
    )
    difference = query[None, :] - kept
    squared = tl.sum(difference * difference, axis=1)
    able = able & (squared < limit)
    if DRIFT:
        together = tl.sqrt_rn(squared) + tl.load(drift_ptr + row, mask=able, other=0.0)
        able = able & (together * together < limit)

    squared = tl.where(able, squared, float("inf"))
    near = tl.min(squared, axis=0)
    older = tl.min(tl.where(able & (squared == near), pos, NO_POSITION), axis=0)
    tl.store(near_ptr + row_head * tiles + tile, near)
    tl.store(near_pos_ptr + row_head * tiles + tile, older)


def nearest_in_tiles(
    state: MacState, unrotated: Tensor, position: Tensor, config: MacConfig, launch: Launch
) -> tuple[Tensor, Tensor]:
    """Per row, head and tile of the ring: the least squared distance (inf: none), and the oldest position that has it.

    Shapes: unrotated [B, H, D] with adjacent channels, position [B]; both results [B, H, tiles].
    """
    rows, heads, width = unrotated.shape
    window = state.window
    tiles = -(-window // launch.ring_tile)
    near = torch.empty(rows, heads, tiles, dtype=torch.float32, device=unrotated.device)
    near_pos = torch.empty(rows, heads, tiles, dtype=torch.long, device=unrotated.device)
    _match_kernel[(rows * heads, tiles)](
        unrotated, state.query, state.lse, state.pos, state.chain, state.drift, position, near, near_pos,
        unrotated.stride(0), unrotated.stride(1), config.threshold(width), heads, window,
        min(window, config.max_gap or window), config.band, config.sink, config.min_length, config.max_chain or 0,
        tiles, CHAIN=config.max_chain is not None, DRIFT=config.max_drift, WIDTH=width,
        WIDE=power_of_two(width, 16), TILE=launch.ring_tile,
    )  # fmt: skip
    return near, near_pos
