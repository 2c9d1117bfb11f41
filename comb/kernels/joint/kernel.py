"""The kernels of joint attention: denominators of own keys, and one softmax of all that a token has read.

`comb.kernels.joint.attention` has the plain way, which they are tested against. With paged attention, which turns the
queries as it loads them, a layer takes three launches, four where documents are cut into shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from comb.kernels.interpreter import INTERPRETED
from comb.kernels.joint.batch import JointBatch, OwnKeys
from comb.kernels.launch import power_of_two
from comb.kernels.mac.kernel import LN_2, LOG2_E, _product

SHARE = 512
"""Own keys that a program reads, at least."""
MOST_SHARES = 64
KEYS = 64
READ = 16
"""Readings that one turn of the loop takes."""
TILE_ROWS = 64
"""Of a tile's matrix product where runs have several tokens, heads included."""


@triton.jit
def _own_mass_kernel(
    query_ptr, key_ptr, table_ptr, token_ptr, tile_ptr, mass_ptr, stride_qt, stride_qh, stride_kb, stride_ks, stride_kg,
    stride_table, scale, groups, tokens, share, window,
    SIZE: tl.constexpr, SHARED: tl.constexpr, M: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr,
    KEYS: tl.constexpr, WINDOW: tl.constexpr, PRECISION: tl.constexpr, UPCAST: tl.constexpr,
):  # fmt: skip
    g = tl.program_id(0) % groups
    tile = tile_ptr + tl.program_id(0) // groups * 4
    first, count = tl.load(tile), tl.load(tile + 1)
    row, past = tl.load(tile + 2).to(tl.int64), tl.load(tile + 3)
    number = tl.arange(0, M)
    own = number // SHARED < count
    head = g * SHARED + number % SHARED
    place = past + number // SHARED
    channel, column = tl.arange(0, WIDE), tl.arange(0, KEYS)
    at = tl.load(token_ptr + first + number // SHARED, mask=own, other=0).to(tl.int64)
    query = tl.load(
        query_ptr + at[:, None] * stride_qt + head[:, None] * stride_qh + channel[None, :],
        mask=own[:, None] & (channel < WIDTH)[None, :], other=0.0,
    )  # fmt: skip
    low = tl.program_id(1) * share
    high = tl.minimum(low + share, past + count)
    if WINDOW:
        low = tl.maximum(low, past - window + 1)
    highest = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    for one in range(low, high, KEYS):
        key_at = one + column
        inside = key_at < high
        block = tl.load(table_ptr + row * stride_table + key_at // SIZE, mask=inside, other=0).to(tl.int64)
        key = tl.load(
            key_ptr + (block * stride_kb + key_at % SIZE * stride_ks + g * stride_kg)[None, :] + channel[:, None],
            mask=inside[None, :] & (channel < WIDTH)[:, None], other=0.0,
        )  # fmt: skip
        scores = _product(query, key, PRECISION, UPCAST) * scale
        seen = inside[None, :] & (key_at[None, :] <= place[:, None])
        if WINDOW:
            seen = seen & (key_at[None, :] > place[:, None] - window)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(highest, tl.max(scores, axis=1))
        # a token may see none of these keys
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp2(highest - finite) + tl.sum(tl.exp2(scores - finite[:, None]), axis=1)
        highest = higher
    some = tl.where(total > 0, total, 1.0)
    mass = tl.where(total > 0, highest + tl.log2(some), float("-inf"))
    heads = groups * SHARED
    to = (tl.program_id(1) * tokens + first + number // SHARED).to(tl.int64) * heads + head
    tl.store(mass_ptr + to, mass, mask=own)


@triton.jit
def _join_kernel(
    output_ptr, own_ptr, read_ptr, mass_ptr, token_ptr, order_ptr, first_ptr, stride_ot, stride_oh, heads, tokens,
    shares,
    SHARES: tl.constexpr, WIDTH: tl.constexpr, WIDE: tl.constexpr, READ: tl.constexpr,
):  # fmt: skip
    s, h = tl.program_id(0) // heads, tl.program_id(0) % heads
    channel, column, share = tl.arange(0, WIDE), tl.arange(0, READ), tl.arange(0, SHARES)
    own_channel = channel < WIDTH
    to = output_ptr + tl.load(token_ptr + s).to(tl.int64) * stride_ot + h * stride_oh + channel
    o = tl.load(to, mask=own_channel, other=0.0).to(tl.float32)
    part = tl.load(own_ptr + (share * tokens + s).to(tl.int64) * heads + h, mask=share < shares, other=float("-inf"))
    top = tl.max(part, axis=0)  # a token sees itself, so this is finite
    highest = top + tl.log2(tl.sum(tl.exp2(part - top), axis=0))
    total = highest * 0.0 + 1.0
    last = tl.load(first_ptr + s + 1)
    for one in range(tl.load(first_ptr + s), last, READ):
        inside = one + column < last
        reading = tl.load(order_ptr + one + column, mask=inside, other=0).to(tl.int64) * heads + h
        mass = tl.load(mass_ptr + reading, mask=inside, other=float("-inf")) / LN_2
        read = tl.load(
            read_ptr + reading[:, None] * WIDTH + channel[None, :],
            mask=inside[:, None] & own_channel[None, :], other=0.0,
        )  # fmt: skip
        higher = tl.maximum(highest, tl.max(mass, axis=0))
        weights = tl.exp2(mass - higher)
        shrink = tl.exp2(highest - higher)
        total = total * shrink + tl.sum(weights, axis=0)
        o = o * shrink + tl.sum(read.to(tl.float32) * weights[:, None], axis=0)
        highest = higher
    tl.store(to, (o / total).to(output_ptr.dtype.element_ty), mask=own_channel)


def join_by_kernels_(
    output: Tensor, query: Tensor, own: OwnKeys, read: Tensor, mass: Tensor, batch: JointBatch, scale: float
) -> None:
    """`comb.kernels.joint.attention.own_masses` and `join_plain_`, in two launches that nobody waits for."""
    keys, tokens = own.keys, len(batch.tokens)
    assert keys is not None
    heads, width = query.shape[1:]
    groups = keys.shape[2]
    shared, wide = heads // groups, power_of_two(width, 16)
    few = power_of_two(shared, 16)
    rows = few if batch.longest_run * shared <= few else max(TILE_ROWS, few)
    tiles = batch.tiles(rows // shared)
    share = max(SHARE, -(-batch.longest // MOST_SHARES))
    shares = -(-batch.longest // share)
    own_mass = torch.empty(shares, tokens, heads, dtype=torch.float32, device=query.device)
    with torch.cuda.device_of(query):  # triton launches on the current device, wherever the tensors are
        _own_mass_kernel[(groups * len(tiles), shares)](
            query, keys, own.table, batch.tokens, tiles, own_mass, query.stride(0), query.stride(1), keys.stride(0),
            keys.stride(1), keys.stride(2), own.table.stride(0), scale * width**-0.5 * LOG2_E, groups, tokens, share,
            own.window or 0,
            SIZE=own.block_size, SHARED=shared, M=rows, WIDTH=width, WIDE=wide, KEYS=KEYS,
            WINDOW=own.window is not None, PRECISION="ieee" if query.dtype == torch.float32 else "tf32",
            UPCAST=INTERPRETED and query.dtype == torch.bfloat16, num_warps=4,
        )  # fmt: skip
        _join_kernel[(tokens * heads,)](
            output, own_mass, read, mass, batch.tokens, batch.order, batch.first, output.stride(0), output.stride(1),
            heads, tokens, shares,
            SHARES=power_of_two(shares), WIDTH=width, WIDE=wide, READ=READ, num_warps=4,
        )  # fmt: skip
