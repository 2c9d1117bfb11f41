"""A decode step of MAC attention, `comb.kernels.mac.step.step`, in three launches.

1. Match: a program per row and query head looks through its ring, and says which keys are left to read.
2. Ranges: attention to those keys. Query heads that share a key/value head are rows of one matrix product, over the
   keys that any of them wants; each sees its own. Ranges differ by orders of magnitude between a miss and a hit, so a
   row's key/value head has as many programs as would fill the device alone, each takes an equal share of all its tiles
   of keys, and leaves a piece per range.
3. Complete: a program per row and query head merges the pieces with the summary that is reused, and writes the ring.

Sums are taken in 32 bits; with 16-bit keys, weights are rounded to 16 bits for the second product, as flash attention
does. What is loaded is shared: a value that isn't finite spreads to the heads of its group.

Source: MAC-Attention sec. 4 (K1 to K3), after FlashAttention's split over keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.launch import INTERPRETED, Launch, power_of_two
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import RANGES, MacStep, Match

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)
SLOTS = 128  # of the ring, that one turn of the match compares; few turns, as each waits for memory
PIECES = 16  # of a range, that one turn of the merge reads


@triton.jit
def _product(left, right, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:  # NumPy has no bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _match_kernel(
    query_ptr, ring_ptr, lse_ptr, pos_ptr, chain_ptr, drift_ptr, start_ptr,
    low_ptr, high_ptr, slot_ptr, found_ptr, distance_ptr, read_ptr, position_ptr,
    stride_qb, stride_qh, length, heads, every, limit, reach, band, sink, min_length, max_chain,
    WINDOW: tl.constexpr, SLOTS: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, CHAIN: tl.constexpr,
    DRIFT: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    start = tl.load(start_ptr + b)
    position = length - 1 - start
    channel, column = tl.arange(0, WIDE), tl.arange(0, SLOTS)
    query = tl.load(query_ptr + b * stride_qb + h * stride_qh + channel, mask=channel < WIDTH, other=0.0)
    query = query.to(tl.float32)
    nearest = tl.full([SLOTS], float("inf"), tl.float32)
    oldest = tl.full([SLOTS], 2**62, tl.int64)
    for one in range(0, WINDOW, SLOTS):
        inside = one + column < WINDOW
        slot = b * WINDOW + one + column
        pos = tl.load(pos_ptr + slot, mask=inside, other=-1)
        row = slot * heads + h
        able = (pos >= tl.maximum(position - reach, 0)) & (pos < position)
        able &= position >= min_length
        if CHAIN:
            able &= tl.load(chain_ptr + row, mask=inside, other=0) < max_chain
        kept = tl.load(
            ring_ptr + row[:, None] * WIDTH + channel[None, :],
            mask=inside[:, None] & (channel < WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        apart = query[None, :] - kept.to(tl.float32)
        squared = tl.where(able, tl.sum(apart * apart, axis=1), float("inf"))
        far = tl.sqrt(squared)
        if DRIFT:
            far += tl.load(drift_ptr + row, mask=inside, other=0.0)
        summary = tl.load(lse_ptr + row, mask=inside, other=float("-inf"))
        # a summary of no keys has no sum; where on where, as triton's interpreter can't join what comparisons give
        squared = tl.where(summary > float("-inf"), squared, float("inf"))
        squared = tl.where(squared < limit, squared, float("inf"))
        squared = tl.where(far * far < limit, squared, float("inf")) if DRIFT else squared
        closer = tl.where(squared == nearest, pos < oldest, squared < nearest)
        nearest, oldest = tl.where(closer, squared, nearest), tl.where(closer, pos, oldest)
    least = tl.min(nearest, axis=0)
    hit = least < float("inf")
    found = tl.min(tl.where(nearest == least, oldest, 2**62), axis=0)
    found = tl.where(hit, found, -1)
    end = tl.maximum(position + 1 - band, 0)
    sink_end = tl.minimum(end, sink)
    low = tl.where(hit, tl.maximum(found + 1 - band, 0), sink_end)
    here = b * heads + h
    # amend, the band, the sink
    tl.store(low_ptr + here, (start + low).to(tl.int32))
    tl.store(high_ptr + here, (start + end).to(tl.int32))
    tl.store(low_ptr + every + here, (start + end).to(tl.int32))
    tl.store(high_ptr + every + here, (start + position + 1).to(tl.int32))
    tl.store(low_ptr + 2 * every + here, start.to(tl.int32))
    tl.store(high_ptr + 2 * every + here, (start + sink_end).to(tl.int32))
    tl.store(slot_ptr + here, tl.maximum(found, 0) % WINDOW)
    tl.store(found_ptr + here, found)
    tl.store(distance_ptr + here, tl.sqrt(least))
    tl.store(read_ptr + here, position + 1 + tl.where(hit, sink - low, 0))
    tl.store(position_ptr + b, position, mask=h == 0)


@triton.jit
def _ranges_kernel(
    query_ptr, key_ptr, value_ptr, low_ptr, high_ptr, o_ptr, lse_ptr,
    stride_qb, stride_qh, stride_kb, stride_kg, stride_kt, stride_vb, stride_vg, stride_vt,
    scale, groups, heads, every, programs,
    RANGES: tl.constexpr, SHARED: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_WIDE: tl.constexpr, KEYS: tl.constexpr, PRECISION: tl.constexpr,
    UPCAST: tl.constexpr,
):  # fmt: skip
    group, program = tl.program_id(0).to(tl.int64), tl.program_id(1)
    b, g = group // groups, group % groups
    number = tl.arange(0, M)
    own = number < SHARED
    head = b * heads + g * SHARED + number
    channel, value_channel, column = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE), tl.arange(0, KEYS)
    query = tl.load(
        query_ptr + b * stride_qb + (g * SHARED + number)[:, None] * stride_qh + channel[None, :],
        mask=own[:, None] & (channel < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    tiles = 0
    for one in tl.static_range(RANGES):
        begin = tl.min(tl.load(low_ptr + one * every + head, mask=own, other=2**31 - 1), axis=0)
        finish = tl.max(tl.load(high_ptr + one * every + head, mask=own, other=0), axis=0)
        tiles += tl.cdiv(tl.maximum(finish - begin, 0), KEYS)
    share = tl.cdiv(tiles, programs)

    before = program * share  # tiles that this program's share lies behind the range's first one
    for one in range(RANGES):
        low = tl.load(low_ptr + one * every + head, mask=own, other=2**31 - 1)
        high = tl.load(high_ptr + one * every + head, mask=own, other=0)
        begin, finish = tl.min(low, axis=0), tl.max(high, axis=0)
        count = tl.cdiv(tl.maximum(finish - begin, 0), KEYS)
        first, last = tl.minimum(tl.maximum(before, 0), count), tl.minimum(tl.maximum(before + share, 0), count)
        highest = tl.full([M], float("-inf"), tl.float32)
        total = tl.zeros([M], tl.float32)
        o = tl.zeros([M, VALUE_WIDE], tl.float32)
        for tile in range(first, last):
            place = begin + tile * KEYS + column
            inside = place < finish
            key = tl.load(
                key_ptr + b * stride_kb + g * stride_kg + place.to(tl.int64)[None, :] * stride_kt + channel[:, None],
                mask=inside[None, :] & (channel < WIDTH)[:, None], other=0.0,
            )  # fmt: skip
            seen = (place[None, :] >= low[:, None]) & (place[None, :] < high[:, None])
            scores = tl.where(seen, _product(query, key, PRECISION, UPCAST) * scale, float("-inf"))
            higher = tl.maximum(highest, tl.max(scores, axis=1))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights = tl.exp2(scores - finite[:, None])
            shrink = tl.exp2(highest - finite)
            value = tl.load(
                value_ptr + b * stride_vb + g * stride_vg + place.to(tl.int64)[:, None] * stride_vt
                + value_channel[None, :],
                mask=inside[:, None] & (value_channel < VALUE_WIDTH)[None, :], other=0.0,
            )  # fmt: skip
            total = total * shrink + tl.sum(weights, axis=1)
            o = o * shrink[:, None] + _product(weights.to(value.dtype), value, PRECISION, UPCAST)
            highest = higher
        some = total > 0
        kept = tl.where(some, total, 1.0)
        piece = (program * RANGES + one) * every + head
        tl.store(lse_ptr + piece, tl.where(some, (highest + tl.log2(kept)) * LN_2, float("-inf")), mask=own)
        tl.store(
            o_ptr + piece[:, None] * VALUE_WIDTH + value_channel[None, :], o / kept[:, None],
            mask=own[:, None] & (value_channel < VALUE_WIDTH)[None, :],
        )  # fmt: skip
        before -= count


@triton.jit
def _merged(o, lse, other_o, other_lse):
    highest = tl.maximum(lse, other_lse)
    finite = tl.where(highest == float("-inf"), 0.0, highest)
    weight, other = tl.exp(lse - finite), tl.exp(other_lse - finite)
    total = weight + other
    some = tl.where(total > 0, total, 1.0)
    return (o * weight + other_o * other) / some, tl.where(total > 0, finite + tl.log(some), float("-inf"))


@triton.jit
def _complete_kernel(
    query_ptr, piece_ptr, piece_lse_ptr, slot_ptr, found_ptr, distance_ptr, position_ptr,
    ring_query_ptr, ring_o_ptr, ring_lse_ptr, ring_pos_ptr, ring_chain_ptr, ring_drift_ptr,
    output_ptr, output_lse_ptr, stride_qb, stride_qh, heads, every, programs,
    WINDOW: tl.constexpr, RANGES: tl.constexpr, PIECES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    VALUE_WIDTH: tl.constexpr, VALUE_WIDE: tl.constexpr,
):  # fmt: skip
    b, h = (tl.program_id(0) // heads).to(tl.int64), tl.program_id(0) % heads
    here = b * heads + h
    channel, value_channel, column = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE), tl.arange(0, PIECES)
    own, own_value = channel < WIDTH, value_channel < VALUE_WIDTH
    found, position = tl.load(found_ptr + here), tl.load(position_ptr + b)
    hit = found >= 0
    reused = (b * WINDOW + tl.load(slot_ptr + here)) * heads + h
    own_hit = value_channel < tl.where(hit, VALUE_WIDTH, 0)  # no `&`: triton 3.9's interpreter takes it for numbers
    o = tl.load(ring_o_ptr + reused * VALUE_WIDTH + value_channel, mask=own_hit, other=0.0).to(tl.float32)
    lse = tl.load(ring_lse_ptr + reused, mask=hit, other=float("-inf"))
    chain = tl.load(ring_chain_ptr + reused, mask=hit, other=-1) + 1
    drift = tl.load(ring_drift_ptr + reused, mask=hit, other=0.0)
    drift += tl.where(hit, tl.load(distance_ptr + here), 0.0)
    slot = (b * WINDOW + position % WINDOW) * heads + h
    tl.debug_barrier()  # the slot that is read may be the one that is written
    for one in tl.static_range(RANGES):
        highest = tl.full([1], float("-inf"), tl.float32)
        total = tl.zeros([1], tl.float32)
        range_o = tl.zeros([VALUE_WIDE], tl.float32)
        for first in range(0, programs, PIECES):
            inside = first + column < programs
            piece = ((first + column) * RANGES + one).to(tl.int64) * every + here
            piece_lse = tl.load(piece_lse_ptr + piece, mask=inside, other=float("-inf"))
            pieces = tl.load(
                piece_ptr + piece[:, None] * VALUE_WIDTH + value_channel[None, :],
                mask=inside[:, None] & own_value[None, :], other=0.0,
            )  # fmt: skip
            higher = tl.maximum(highest, tl.max(piece_lse, axis=0))
            finite = tl.where(higher == float("-inf"), 0.0, higher)
            weights, shrink = tl.exp(piece_lse - finite), tl.exp(highest - finite)
            total = total * shrink + tl.sum(weights, axis=0)
            range_o = range_o * shrink + tl.sum(pieces * weights[:, None], axis=0)
            highest = higher
        some = tl.where(total > 0, total, 1.0)
        range_lse = tl.max(tl.where(total > 0, highest + tl.log(some), float("-inf")), axis=0)
        o, lse = _merged(o, lse, range_o / some, range_lse)
        if one == 0:  # what later queries may reuse: neither the band nor the sink
            tl.store(ring_o_ptr + slot * VALUE_WIDTH + value_channel, o.to(ring_o_ptr.dtype.element_ty), mask=own_value)
            tl.store(ring_lse_ptr + slot, lse)
    tl.store(output_ptr + here * VALUE_WIDTH + value_channel, o, mask=own_value)
    tl.store(output_lse_ptr + here, lse)
    query = tl.load(query_ptr + b * stride_qb + h * stride_qh + channel, mask=own, other=0.0)
    tl.store(ring_query_ptr + slot * WIDTH + channel, query.to(ring_query_ptr.dtype.element_ty), mask=own)
    tl.store(ring_chain_ptr + slot, chain)
    tl.store(ring_drift_ptr + slot, drift)
    tl.store(ring_pos_ptr + b * WINDOW + position % WINDOW, position, mask=h == 0)


def fused_step(
    state: MacState, unrotated: Tensor, query: Tensor, keys: Tensor, values: Tensor, start: Tensor, config: MacConfig,
    scale: float, launch: Launch | None = None,
) -> MacStep:  # fmt: skip
    """As `comb.kernels.mac.step.step`, in 32 bits. Never waits for the device."""
    unrotated = unrotated if unrotated.stride(-1) == 1 else unrotated.contiguous()
    (rows, heads, width), value_width, device = query.shape, values.shape[-1], query.device
    low, high = torch.empty(2, len(RANGES), rows, heads, dtype=torch.int32, device=device)
    slot, found, keys_read = torch.empty(3, rows, heads, dtype=torch.long, device=device)
    distance, lse = torch.empty(2, rows, heads, dtype=torch.float32, device=device)
    position = torch.empty(rows, dtype=torch.long, device=device)
    output = torch.empty(rows, heads, value_width, dtype=torch.float32, device=device)
    sizes = {"WINDOW": state.window, "WIDTH": width, "WIDE": power_of_two(width, 16)}
    with torch.cuda.device_of(query):  # triton launches on the current device, wherever the tensors are
        _match_kernel[(rows * heads,)](
            unrotated, state.query, state.lse, state.pos, state.chain, state.drift, start,
            low, high, slot, found, distance, keys_read, position, unrotated.stride(0), unrotated.stride(1),
            keys.shape[2], heads, rows * heads, config.threshold(width),
            min(config.window, config.max_gap or config.window), config.band, config.sink, config.min_length,
            config.max_chain or 0, SLOTS=min(SLOTS, power_of_two(state.window, 16)),
            CHAIN=config.max_chain is not None, DRIFT=config.max_drift, num_warps=8, **sizes,
        )  # fmt: skip
        pieces, piece_lse = range_pieces(query, keys, values, low, high, scale, launch)
        _complete_kernel[(rows * heads,)](
            unrotated, pieces, piece_lse, slot, found, distance, position, state.query, state.o, state.lse, state.pos,
            state.chain, state.drift, output, lse, unrotated.stride(0), unrotated.stride(1), heads,
            rows * heads, len(pieces), RANGES=len(RANGES), PIECES=PIECES, VALUE_WIDTH=value_width,
            VALUE_WIDE=power_of_two(value_width, 16), num_warps=4, **sizes,
        )  # fmt: skip
    match = Match(slot, found, distance)
    return MacStep(output, match, position, keys_read, keys.shape[1], lse)


def range_pieces(
    query: Tensor, keys: Tensor, values: Tensor, low: Tensor, high: Tensor, scale: float, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of `query` [B, H, D] to R ranges [low, high) of key indices, all [R, B, H] int32, in P pieces.

    Keys [B, G, L, D] and values [B, G, L, V]. Merged over the first dimension, the pieces are
    `comb.kernels.mac.step.attend_ranges`.

    Returns:
        o [P, R, B, H, V] and lse [P, R, B, H] in 32 bits; (0, -inf) for pieces without a key.
    """
    launch = launch or Launch()
    query, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values))
    (rows, heads, width), groups, value_width = query.shape, keys.shape[1], values.shape[-1]
    programs, shared = -(-launch.count(query.device) // groups), heads // groups
    wide, value_wide = power_of_two(width, 16), power_of_two(value_width, 16)
    shape = programs, len(low), rows, heads
    o = torch.empty(*shape, value_width, dtype=torch.float32, device=query.device)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):
        _ranges_kernel[(rows * groups, programs)](
            query, keys, values, low, high, o, lse, query.stride(0), query.stride(1), *keys.stride()[:3],
            *values.stride()[:3], scale * LOG2_E, groups, heads, rows * heads, programs,
            RANGES=len(low), SHARED=shared, M=power_of_two(shared, 16), WIDTH=width, WIDE=wide,
            VALUE_WIDTH=value_width, VALUE_WIDE=value_wide, KEYS=launch.key_tile,
            PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
            UPCAST=INTERPRETED and keys.dtype == torch.bfloat16,
            num_warps=launch.warps, num_stages=launch.depth(wide + value_wide, keys.element_size()),
        )  # fmt: skip
    return o, lse
