"""Attention of one query per head to ranges of keys, with log-sum-exp: `comb.kernels.mac.algebra.attend_ranges`.

Query heads that share a key/value head are rows of one matrix product, over the keys that any of them wants; each sees
its own. Sums are taken in 32 bits; with 16-bit keys, weights are rounded to 16 bits for the second product, as flash
attention does. What is loaded is shared: a value that isn't finite spreads to the heads of its group.

Ranges differ by orders of magnitude between a miss and a hit. So a row's key/value head has as many programs as would
fill the device alone, each takes an equal share of all its tiles of keys, and leaves a piece per range.

Source: MAC-Attention sec. 4 (K2), after FlashAttention's split over keys.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.interpreter import INTERPRETED
from comb.kernels.launch import Launch, power_of_two
from comb.kernels.mac.algebra import EMPTY

LOG2_E = 1.4426950408889634
LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _product(left, right, PRECISION: tl.constexpr, UPCAST: tl.constexpr):
    if UPCAST:  # NumPy has no bfloat16
        left, right = left.to(tl.float32), right.to(tl.float32)
    return tl.dot(left, right, input_precision=PRECISION)


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


def attend_ranges(
    query: Tensor, keys: Tensor, values: Tensor, low: Tensor, high: Tensor, scale: float, launch: Launch | None = None
) -> tuple[Tensor, Tensor]:
    """As `comb.kernels.mac.algebra.attend_ranges`, in 32 bits. Never waits for the device."""
    launch = launch or Launch()
    query, keys, values = (each if each.stride(-1) == 1 else each.contiguous() for each in (query, keys, values))
    low, high = low.int().contiguous(), high.int().contiguous()
    (rows, heads, width), groups, value_width = query.shape, keys.shape[1], values.shape[-1]
    programs, shared = -(-launch.count(query.device) // groups), heads // groups
    wide, value_wide = power_of_two(width, 16), power_of_two(value_width, 16)
    shape = programs, len(low), rows, heads
    o = torch.empty(*shape, value_width, dtype=torch.float32, device=query.device)
    lse = torch.empty(shape, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # triton launches on the current device, wherever the tensors are
        _ranges_kernel[(rows * groups, programs)](
            query, keys, values, low, high, o, lse, query.stride(0), query.stride(1), *keys.stride()[:3],
            *values.stride()[:3], scale * LOG2_E, groups, heads, rows * heads, programs,
            RANGES=len(low), SHARED=shared, M=power_of_two(shared, 16), WIDTH=width, WIDE=wide,
            VALUE_WIDTH=value_width, VALUE_WIDE=value_wide, KEYS=launch.key_tile,
            PRECISION="ieee" if keys.dtype == torch.float32 else "tf32",
            UPCAST=INTERPRETED and keys.dtype == torch.bfloat16,
            num_warps=launch.warps, num_stages=launch.depth(wide + value_wide, keys.element_size()),
        )  # fmt: skip
    whole = torch.logsumexp(lse, dim=0)
    shares = torch.exp(lse - torch.where(whole == EMPTY, 0.0, whole))
    return (o * shares[..., None]).sum(0), whole
