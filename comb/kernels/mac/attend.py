"""Partial attention of one query per head to the spans of a schedule, with log-sum-exp.

Query heads that share a key/value head are rows of one matrix product; each sees the keys from its own first one on.
Scores and sums are taken in 32 bits; weights are rounded to the values' dtype for the second product, as flash
attention does.

Source: MAC-Attention sec. 4 (K2), after FlashAttention's split over keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.interpreter import INTERPRETED
from comb.kernels.launch import AMEND as AMEND_KIND
from comb.kernels.launch import SINK as SINK_KIND
from comb.kernels.launch import Launch, power_of_two
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.schedule import SpanSchedule

SINK = tl.constexpr(SINK_KIND)
AMEND = tl.constexpr(AMEND_KIND)
LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@dataclass(frozen=True)
class PartialAttention:
    """Attention of parts of spans: o [P + spans, H / G, V] and lse [P + spans, H / G]; see `schedule`."""

    o: Tensor
    lse: Tensor


@triton.jit
def _product(left, right, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:  # NumPy has no bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


@triton.jit
def _attend_kernel(
    query_ptr, key_ptr, value_ptr, low_ptr, position_ptr, start_ptr, first_ptr, share_ptr, o_ptr, lse_ptr,
    stride_qb, stride_qh, stride_kb, stride_kg, stride_kt, stride_vb, stride_vg, stride_vt,
    scale, groups, heads, band, sink, spans,
    SHARED: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr,
    WIDE: tl.constexpr, VALUE_WIDTH: tl.constexpr, VALUE_WIDE: tl.constexpr, KEYS: tl.constexpr,
    SPANS: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0)
    share = tl.load(share_ptr)
    tile = program * share
    stop = tl.minimum(tile + share, tl.load(first_ptr + spans))
    every = tl.arange(0, SPANS)
    ends = tl.load(first_ptr + 1 + every, mask=every < spans, other=2**31 - 1)
    span = tl.sum((ends <= tile).to(tl.int32), axis=0)

    number = tl.arange(0, M)
    own = number < SHARED
    channel, value_channel = tl.arange(0, WIDE), tl.arange(0, VALUE_WIDE)
    column = tl.arange(0, KEYS)
    while tile < stop:
        first = tl.load(first_ptr + span)
        upto = tl.minimum(stop, tl.load(first_ptr + span + 1))
        if tile < upto:
            kind, group = span % 3, (span // 3).to(tl.int64)
            b, g = group // groups, group % groups
            m, start = tl.load(position_ptr + b), tl.load(start_ptr + b)
            own_end = tl.maximum(m + 1 - band, 0)
            low = tl.load(low_ptr + b * heads + g * SHARED + number, mask=own, other=2**62)
            # where the span begins and ends, and from which key on each query head takes part
            begin = tl.where(kind == SINK, 0, tl.where(kind == AMEND, tl.min(low, axis=0), own_end))
            finish = tl.where(kind == SINK, tl.minimum(own_end, sink), tl.where(kind == AMEND, own_end, m + 1))
            low = tl.where(kind == AMEND, low, begin)
            query = tl.load(
                query_ptr + b * stride_qb + (g * SHARED + number)[:, None] * stride_qh + channel[None, :],
                mask=own[:, None] & (channel < WIDTH)[None, :], other=0.0,
            )  # fmt: skip

            highest = tl.full([M], float("-inf"), tl.float32)
            total = tl.zeros([M], tl.float32)
            o = tl.zeros([M, VALUE_WIDE], tl.float32)
            for one in range(tile, upto):
                place = begin + (one - first) * KEYS + column
                inside = place < finish
                index = place + start
                key_row = b * stride_kb + g * stride_kg + index * stride_kt
                value_row = b * stride_vb + g * stride_vg + index * stride_vt
                key = tl.load(
                    key_ptr + key_row[None, :] + channel[:, None],
                    mask=inside[None, :] & (channel < WIDTH)[:, None], other=0.0,
                )  # fmt: skip
                scores = _product(query, key, PRECISION, UPCAST) * scale
                scores = tl.where(inside[None, :] & (place[None, :] >= low[:, None]), scores, float("-inf"))
                higher = tl.maximum(highest, tl.max(scores, axis=1))
                finite = tl.where(higher == float("-inf"), 0.0, higher)
                weights = tl.exp2(scores - finite[:, None])
                shrink = tl.exp2(highest - finite)
                value = tl.load(
                    value_ptr + value_row[:, None] + value_channel[None, :],
                    mask=inside[:, None] & (value_channel < VALUE_WIDTH)[None, :], other=0.0,
                )  # fmt: skip
                total = total * shrink + tl.sum(weights, axis=1)
                o = o * shrink[:, None] + _product(weights.to(value.dtype), value, PRECISION, UPCAST)
                highest = higher

            some = total > 0
            kept = tl.where(some, total, 1.0)
            piece = (program + span).to(tl.int64) * SHARED + number
            tl.store(lse_ptr + piece, tl.where(some, (highest + tl.log2(kept)) * LN_2, float("-inf")), mask=own)
            tl.store(
                o_ptr + piece[:, None] * VALUE_WIDTH + value_channel[None, :], o / kept[:, None],
                mask=own[:, None] & (value_channel < VALUE_WIDTH)[None, :],
            )  # fmt: skip
            tile = upto
        span += 1


def attend_spans(
    query: Tensor, keys: Tensor, values: Tensor, start: Tensor, position: Tensor, schedule: SpanSchedule,
    config: MacConfig, scale: float, launch: Launch,
) -> PartialAttention:  # fmt: skip
    """Attention of `query` [B, H, D] to every span of `schedule`, in pieces.

    Args:
        keys, values: [B, G, L, D] and [B, G, L, V]; adjacent channels, any other strides.
        start, position: [B], the key index of each row's first key, and m.
    """
    rows, heads, width = query.shape
    value_width = values.shape[-1]
    spans, programs = schedule.first_tile.shape[0] - 1, launch.count(query.device)
    groups = spans // (3 * rows)
    shared, wide, value_wide = heads // groups, power_of_two(width, 16), power_of_two(value_width, 16)
    o = torch.empty(programs + spans, shared, value_width, dtype=torch.float32, device=query.device)
    lse = torch.empty(programs + spans, shared, dtype=torch.float32, device=query.device)
    _attend_kernel[(programs,)](
        query, keys, values, schedule.low, position, start,
        schedule.first_tile, schedule.share, o, lse, query.stride(0), query.stride(1), *keys.stride()[:3],
        *values.stride()[:3], scale * LOG2_E, groups, heads, config.band, config.sink, spans,
        SHARED=shared, M=power_of_two(shared, 16),
        WIDTH=width, WIDE=wide, VALUE_WIDTH=value_width, VALUE_WIDE=value_wide,
        KEYS=launch.key_tile, SPANS=power_of_two(spans), PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
        UPCAST=INTERPRETED and keys.dtype == torch.bfloat16,
        num_warps=launch.warps, num_stages=launch.depth(wide + value_wide, keys.element_size()),
    )  # fmt: skip
    return PartialAttention(o, lse)
