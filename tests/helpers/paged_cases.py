"""Rows, documents and pools for the tests of paged attention; whatever no row may read is NaN."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from comb.cache.quantization import quantize
from comb.kernels.paged.attention import FP8, BlockTable, PagedBatch, PagedLayer

DOCUMENTS = ((5, 4, 9), (1,), (7, 3), (23, 2))
"""Tokens of the documents of rows 0, 1, ...; in blocks of 4 most last ones are filled in part, also in the middle."""


def paged_case(
    dtype: torch.dtype, *, counts: Sequence[int] = (1, 3, 13, 2), heads: int = 6, groups: int = 2, width: int = 10,
    block: int = 4, documents: Sequence[Sequence[int]] = DOCUMENTS, seed: int = 0,
) -> tuple[Tensor, PagedLayer, PagedBatch]:  # fmt: skip
    """Queries [T, H, D] and documents in shuffled blocks; rows 0 and 3 share their last document."""
    draw = torch.Generator().manual_seed(seed)
    needed = sum(-(-tokens // block) for row in documents for tokens in row)
    free = torch.randperm(needed + 5, generator=draw).tolist()
    tables, shared = [], None
    for number, lengths in enumerate(documents):
        row = [(tokens, [free.pop() for _ in range(-(-tokens // block))]) for tokens in lengths]
        if number == 0:
            shared = row[-1]
        elif number == 3:
            assert shared is not None
            row.append(shared)
        tables.append(BlockTable(row, block))
    pool = torch.full((2, (needed + 5) * block, groups, width), float("nan"))
    filled = torch.cat([table.slots() for table in tables])
    pool[:, filled] = torch.randn(2, len(filled), groups, width, generator=draw)
    query = torch.randn(sum(counts), heads, width, generator=draw).to(dtype)
    return query, PagedLayer(*pool.to(dtype), block), PagedBatch(tuple(counts), tuple(tables))


def in_fp8(layer: PagedLayer) -> PagedLayer:
    """The same keys and values in eight bits; NaN stays NaN, in data and scales."""
    made = []
    for tensor in (layer.keys, layer.values):
        missing = tensor.isnan().any(-1)
        data, scales = quantize(tensor.nan_to_num(0.0), "fp8")
        raw = data.view(torch.uint8)
        raw[missing] = 0x7F
        made.append((raw.view(FP8), scales[..., 0].float().masked_fill(missing, float("nan"))))
    (keys, key_scales), (values, value_scales) = made
    return replace(layer, keys=keys, values=values, key_scales=key_scales, value_scales=value_scales)


def by_hand(query: Tensor, layer: PagedLayer, batch: PagedBatch) -> Tensor:
    """float64 softmax, token by token and head by head."""
    out = torch.zeros(query.shape, dtype=torch.float64)
    keys, values = layer.keys.double(), layer.values.double()
    if layer.key_scales is not None and layer.value_scales is not None:
        keys, values = keys * layer.key_scales[..., None], values * layer.value_scales[..., None]
    at, shared = 0, query.shape[1] // keys.shape[1]
    for count, table in zip(batch.counts, batch.tables, strict=True):
        slots = [slot for last in table.last.tolist() for slot in range(last - last % layer.block_size, last + 1)]
        for token in range(at, at + count):
            for head in range(query.shape[1]):
                scores = keys[slots, head // shared] @ query[token, head].double() * query.shape[-1] ** -0.5
                out[token, head] = scores.softmax(0) @ values[slots, head // shared]
        at += count
    return out
