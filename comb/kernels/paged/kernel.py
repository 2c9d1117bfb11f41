"""Attention of a step's query tokens to documents in blocks: the kernel, and the one that merges shares of long rows.

Query heads that share a key/value head, of all tokens of a tile, are rows of one matrix product. Scores and sums are
taken in 32 bits; weights are rounded to the queries' dtype for the second product, as flash attention does. Keys in
fp8 are widened as they are read; their scale multiplies the score, the values' scale the weight. Beside 16-bit queries
they are widened to float16, which a GPU does two at a time, and multiplied in it: to bfloat16 there is no way but
number by number. Weights times scales, which float16 may not hold, are kept relative to the largest scale so far.

`comb.kernels.paged.attention.attend_plain` is what they are tested against.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.launch import INTERPRETED, power_of_two
from comb.kernels.mac.kernel import LOG2_E, _product
from comb.kernels.paged.attention import PagedBatch, PagedLayer
from comb.kernels.paged.plan import PagedLaunch, PagedPlan, launch_for, make_plan

MERGED = 16  # shares that one turn of the merge's loop reads


@triton.jit
def _paged_kernel(
    query_ptr, key_ptr, value_ptr, key_scale_ptr, value_scale_ptr, item_ptr, table_ptr, output_ptr, part_ptr, lse_ptr,
    stride_qt, stride_qh, stride_ks, stride_kg, stride_vs, stride_vg, stride_scale, scale, groups,
    BLOCK: tl.constexpr, SHARED: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, QUANTIZED: tl.constexpr, MIXED: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    # heads of the same slots run side by side, as they lie side by side
    g = tl.program_id(0) % groups
    item = item_ptr + tl.program_id(0) // groups * 5
    token, count = tl.load(item), tl.load(item + 1)
    begin, end = tl.load(item + 2), tl.load(item + 3)
    part = tl.load(item + 4)
    number = tl.arange(0, M)
    own = number // SHARED < count
    head = g * SHARED + number % SHARED
    channel, column = tl.arange(0, WIDE), tl.arange(0, KEYS)
    own_channel = own[:, None] & (channel < WIDTH)[None, :]
    at = (token + number // SHARED).to(tl.int64)
    query_row = query_ptr + at[:, None] * stride_qt + head[:, None] * stride_qh
    query = tl.load(query_row + channel[None, :], mask=own_channel, other=0.0).to(MIXED)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    o = tl.zeros([M, WIDE], tl.float32)
    unit = 0.0
    # the table is read a turn ahead: keys wait for their addresses, and while they do, triton keeps one tile in flight
    # instead of two
    entry = (begin * BLOCK + column) // BLOCK
    last = tl.load(table_ptr + entry, mask=entry < end, other=-1)
    for one in range(begin * BLOCK, end * BLOCK, KEYS):
        slot = last // BLOCK * BLOCK + (one + column) % BLOCK
        inside = (entry < end) & (slot <= last)
        slot = tl.where(inside, slot, 0).to(tl.int64)
        key = tl.load(
            key_ptr + (slot * stride_ks + g * stride_kg)[None, :] + channel[:, None],
            mask=inside[None, :] & (channel < WIDTH)[:, None], other=0.0,
        )  # fmt: skip
        if QUANTIZED:
            key = key.to(MIXED)
        scores = _product(query, key, PRECISION, UPCAST) * scale
        if QUANTIZED:
            scores *= tl.load(key_scale_ptr + slot * stride_scale + g, mask=inside, other=0.0)[None, :]
        scores = tl.where(inside[None, :], scores, float("-inf"))
        # the first slot of a share is filled, so this is finite from the first turn on
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        weights = tl.exp2(scores - higher[:, None])
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, axis=1)
        value = tl.load(
            value_ptr + (slot * stride_vs + g * stride_vg)[:, None] + channel[None, :],
            mask=inside[:, None] & (channel < WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        if QUANTIZED:
            value = value.to(MIXED)
            scales = tl.load(value_scale_ptr + slot * stride_scale + g, mask=inside, other=0.0)
            larger = tl.maximum(unit, tl.max(scales, axis=0))
            inverse = 1.0 / tl.where(larger > 0, larger, 1.0)
            weights *= (scales * inverse)[None, :]
            shrink *= unit * inverse
            unit = larger
        o = o * shrink[:, None] + _product(weights.to(MIXED), value, PRECISION, UPCAST)
        highest = higher
        entry = (one + KEYS + column) // BLOCK
        last = tl.load(table_ptr + entry, mask=entry < end, other=-1)

    o = o / total[:, None]
    if QUANTIZED:
        o *= unit
    if part < 0:
        place = (at * groups * SHARED + head) * WIDTH
        tl.store(
            output_ptr + place[:, None] + channel[None, :], o.to(output_ptr.dtype.element_ty), mask=own_channel
        )  # fmt: skip
    else:
        row = (part + number // SHARED).to(tl.int64) * groups * SHARED + head
        tl.store(part_ptr + row[:, None] * WIDTH + channel[None, :], o, mask=own_channel)
        tl.store(lse_ptr + row, highest + tl.log2(total), mask=own)


@triton.jit
def _paged_merge_kernel(
    merge_ptr, part_ptr, lse_ptr, output_ptr, heads, WIDTH: tl.constexpr, WIDE: tl.constexpr, MERGED: tl.constexpr,
):  # fmt: skip
    h = tl.program_id(0) % heads
    merge = merge_ptr + tl.program_id(0) // heads * 4
    token, first = tl.load(merge).to(tl.int64), tl.load(merge + 1).to(tl.int64)
    step, count = tl.load(merge + 2), tl.load(merge + 3)
    channel, column = tl.arange(0, WIDE), tl.arange(0, MERGED)
    highest = tl.full([1], float("-inf"), tl.float32)
    total = tl.zeros([1], tl.float32)
    o = tl.zeros([WIDE], tl.float32)
    for one in range(0, count, MERGED):
        inside = one + column < count
        row = (first + (one + column) * step) * heads + h
        lse = tl.load(lse_ptr + row, mask=inside, other=float("-inf"))
        part = tl.load(
            part_ptr + row[:, None] * WIDTH + channel[None, :],
            mask=inside[:, None] & (channel < WIDTH)[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(lse, axis=0))
        weights = tl.exp2(lse - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, axis=0)
        o = o * shrink + tl.sum(part * weights[:, None], axis=0)
        highest = higher
    tl.store(
        output_ptr + (token * heads + h) * WIDTH + channel, (o / total).to(output_ptr.dtype.element_ty),
        mask=channel < WIDTH,
    )  # fmt: skip


def attend_paged(query: Tensor, layer: PagedLayer, batch: PagedBatch, sizes: PagedLaunch | None = None) -> Tensor:
    """`comb.kernels.paged.attention.attend_plain` by the kernels: query [T, H, D] -> the same shape and dtype.

    No launch waits for the device, or the host for one.
    """
    (tokens, heads, width), groups, device = query.shape, layer.keys.shape[1], query.device
    quantized = layer.key_scales is not None
    chosen = sizes or launch_for(query.dtype, width, fp8=quantized)
    kind = device, heads, groups, chosen
    if kind not in batch.plans:  # the first layer's plan is all layers'
        batch.plans[kind] = make_plan(batch, heads=heads, groups=groups, device=device, sizes=chosen)
    plan: PagedPlan = batch.plans[kind]
    keys, values, wide = layer.keys, layer.values, power_of_two(width, 16)
    key_scales, value_scales = (layer.key_scales, layer.value_scales) if quantized else (query, query)
    assert key_scales is not None
    mixed = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}[query.dtype]
    if quantized and query.dtype == torch.bfloat16:
        mixed = tl.float16
    output = torch.empty(tokens, heads, width, dtype=query.dtype, device=device)
    part = torch.empty(plan.partial_rows, heads, width, dtype=torch.float32, device=device)
    lse = torch.empty(plan.partial_rows, heads, dtype=torch.float32, device=device)
    with torch.cuda.device_of(query):  # triton launches on the current device, wherever the tensors are
        for items in plan.launches:
            _paged_kernel[(groups * len(items.numbers),)](
                query, keys, values, key_scales, value_scales, items.numbers, plan.table, output, part, lse,
                query.stride(0), query.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
                key_scales.stride(0), width**-0.5 * LOG2_E, groups,
                BLOCK=layer.block_size, SHARED=heads // groups, M=items.rows, WIDTH=width, WIDE=wide,
                KEYS=items.launch.key_tile, QUANTIZED=quantized, MIXED=mixed,
                PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
                UPCAST=INTERPRETED and query.dtype == torch.bfloat16 and not quantized, num_warps=items.launch.warps,
                num_stages=items.launch.depth(2 * wide, keys.element_size()),
            )  # fmt: skip
        if len(plan.merges):
            _paged_merge_kernel[(heads * len(plan.merges),)](
                plan.merges, part, lse, output, heads, WIDTH=width, WIDE=wide, MERGED=MERGED, num_warps=4,
            )  # fmt: skip
    return output
