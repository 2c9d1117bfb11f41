"""Merge and ring write: reused summary and band to the entry that is kept, and with tail and sink to the output.

A window [m - K, m) contains the position m - K, whose slot is m's own: a head may reuse the very summary that it is
about to overwrite. One program reads and writes a head's slot, and all its threads pass a barrier in between.

Source: MAC-Attention sec. 3.3, 3.4 and 4 (K3), by addition instead of removal.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.launch import power_of_two
from comb.kernels.mac.attend import PartialAttention
from comb.kernels.mac.schedule import SpanSchedule
from comb.kernels.mac.state import MacState


@dataclass(frozen=True)
class Merged:
    """Output [B, H, V], lse of all keys and of the tail [B, H]; of the entry o [B, H, V], lse, chain and drift."""

    output: Tensor
    lse: Tensor
    tail_lse: Tensor
    entry_o: Tensor
    entry_lse: Tensor
    chain: Tensor
    drift: Tensor


@triton.jit
def _joined(o1, lse1, o2, lse2):
    """`comb.kernels.mac.algebra.merge` of two summaries: o [V], lse a scalar."""
    highest = tl.maximum(lse1, lse2)
    highest = tl.where(highest == float("-inf"), 0.0, highest)
    weight1, weight2 = tl.exp(lse1 - highest), tl.exp(lse2 - highest)
    total = weight1 + weight2
    some = tl.where(total > 0, total, 1.0)
    return (o1 * weight1 + o2 * weight2) / some, tl.where(total > 0, highest + tl.log(some), float("-inf"))


@triton.jit
def _span(
    o_ptr, lse_ptr, first_ptr, share, span, number, channel,
    SHARED: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The summary of one span for query head `number` of its group, from all its pieces."""
    first, last = tl.load(first_ptr + span), tl.load(first_ptr + span + 1)
    begin = first // share + span
    # an empty span has no pieces; its neighbours' must not be taken for them
    end = tl.where(last > first, (last - 1) // share + span + 1, begin)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    o = tl.zeros([VALUE_WIDE], tl.float32)
    for one in range(begin, end, BLOCK):
        piece = one + tl.arange(0, BLOCK)
        inside = piece < end
        at = piece.to(tl.int64) * SHARED + number
        lse = tl.load(lse_ptr + at, mask=inside, other=float("-inf"))
        part = tl.load(
            o_ptr + at[:, None] * VALUE_WIDTH + channel[None, :],
            mask=inside[:, None] & (channel < VALUE_WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(lse - finite)
        shrink = tl.exp(highest - finite)
        total = total * shrink + tl.sum(weights, axis=0)
        o = o * shrink + tl.sum(part * weights[:, None], axis=0)
        highest = higher
    whole, top = tl.sum(total, axis=0), tl.max(highest, axis=0)
    some = tl.where(whole > 0, whole, 1.0)
    return o / some, tl.where(whole > 0, top + tl.log(some), float("-inf"))


@triton.jit
def _merge_kernel(
    o_ptr, lse_ptr, first_ptr, share_ptr, hit_ptr, slot_ptr, distance_ptr, position_ptr, query_ptr,
    ring_query_ptr, ring_o_ptr, ring_lse_ptr, ring_pos_ptr, ring_chain_ptr, ring_drift_ptr,
    output_ptr, all_lse_ptr, tail_lse_ptr, entry_ptr, entry_lse_ptr, chain_ptr, drift_ptr,
    stride_qb, stride_qh, groups, heads, window,
    SHARED: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, VALUE_WIDTH: tl.constexpr,
    VALUE_WIDE: tl.constexpr, BLOCK: tl.constexpr, WRITE: tl.constexpr,
):  # fmt: skip
    row_head = tl.program_id(0).to(tl.int64)
    b, h = row_head // heads, row_head % heads
    span = ((b * groups + h // SHARED) * 3).to(tl.int32)
    number = h % SHARED
    channel = tl.arange(0, VALUE_WIDE)
    own = channel < VALUE_WIDTH
    share = tl.load(share_ptr)

    hit = tl.load(hit_ptr + row_head) != 0
    matched = (b * window + tl.load(slot_ptr + row_head)) * heads + h
    o = tl.load(ring_o_ptr + matched * VALUE_WIDTH + channel, mask=channel < tl.where(hit, VALUE_WIDTH, 0), other=0.0)
    o = o.to(tl.float32)
    lse = tl.load(ring_lse_ptr + matched, mask=hit, other=float("-inf"))
    chain = tl.load(ring_chain_ptr + matched, mask=hit, other=-1) + 1
    drift = tl.load(ring_drift_ptr + matched, mask=hit, other=0.0)
    drift += tl.where(hit, tl.load(distance_ptr + row_head), 0.0)

    band_o, band_lse = _span(
        o_ptr, lse_ptr, first_ptr, share, span + 1, number, channel, SHARED, VALUE_WIDTH, VALUE_WIDE, BLOCK
    )
    o, lse = _joined(o, lse, band_o, band_lse)
    tl.store(entry_ptr + row_head * VALUE_WIDTH + channel, o, mask=own)
    tl.store(entry_lse_ptr + row_head, lse)
    tl.store(chain_ptr + row_head, chain)
    tl.store(drift_ptr + row_head, drift)

    if WRITE:
        # threads that hold copies of the same numbers may still be reading the matched slot
        tl.debug_barrier()
        m = tl.load(position_ptr + b)
        # a position in front of a row's first key leaves nothing
        ready = m >= 0
        width, value_width = tl.where(ready, WIDTH, 0), tl.where(ready, VALUE_WIDTH, 0)
        slot = tl.maximum(m, 0) % window
        mine = (b * window + slot) * heads + h
        query_channel = tl.arange(0, WIDE)
        query = tl.load(query_ptr + b * stride_qb + h * stride_qh + query_channel, mask=query_channel < WIDTH)
        tl.store(
            ring_query_ptr + mine * WIDTH + query_channel, query.to(ring_query_ptr.dtype.element_ty),
            mask=query_channel < width,
        )  # fmt: skip
        tl.store(
            ring_o_ptr + mine * VALUE_WIDTH + channel, o.to(ring_o_ptr.dtype.element_ty), mask=channel < value_width
        )
        tl.store(ring_lse_ptr + mine, lse, mask=ready)
        tl.store(ring_chain_ptr + mine, chain, mask=ready)
        tl.store(ring_drift_ptr + mine, drift, mask=ready)
        # only the match reads it, in an earlier launch, so the heads of a row may all write the same
        tl.store(ring_pos_ptr + b * window + slot, m, mask=ready)

    tail_o, tail_lse = _span(
        o_ptr, lse_ptr, first_ptr, share, span + 2, number, channel, SHARED, VALUE_WIDTH, VALUE_WIDE, BLOCK
    )
    o, lse = _joined(o, lse, tail_o, tail_lse)
    sink_o, sink_lse = _span(
        o_ptr, lse_ptr, first_ptr, share, span, number, channel, SHARED, VALUE_WIDTH, VALUE_WIDE, BLOCK
    )
    o, lse = _joined(o, lse, sink_o, sink_lse)
    tl.store(output_ptr + row_head * VALUE_WIDTH + channel, o, mask=own)
    tl.store(all_lse_ptr + row_head, lse)
    tl.store(tail_lse_ptr + row_head, tail_lse)


def merge_spans(
    state: MacState,
    unrotated: Tensor,
    position: Tensor,
    schedule: SpanSchedule,
    pieces: PartialAttention,
    *,
    write: bool,
) -> Merged:
    """One output and one entry per row and query head, and with `write` the entry, query and position in the rings."""
    rows, heads, width = unrotated.shape
    value_width, shared = pieces.o.shape[-1], pieces.o.shape[1]

    def made(*shape: int, kind: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(rows, heads, *shape, dtype=kind, device=unrotated.device)

    merged = Merged(
        made(value_width), made(), made(), made(value_width), made(), made(kind=state.chain.dtype), made(),
    )  # fmt: skip
    match = schedule.match
    _merge_kernel[(rows * heads,)](
        pieces.o, pieces.lse, schedule.first_tile, schedule.share, match.hit.view(torch.int8), match.slot,
        match.distance, position, unrotated,
        state.query, state.o, state.lse, state.pos, state.chain, state.drift,
        merged.output, merged.lse, merged.tail_lse, merged.entry_o, merged.entry_lse, merged.chain, merged.drift,
        unrotated.stride(0), unrotated.stride(1), heads // shared, heads, state.window,
        SHARED=shared, WIDTH=width, WIDE=power_of_two(width, 16), VALUE_WIDTH=value_width,
        VALUE_WIDE=power_of_two(value_width, 16), BLOCK=16, WRITE=write,
    )  # fmt: skip
    return merged
