"""Attention to documents that lie in blocks of a shared pool: the plain way, and the choice between it and the kernel.

Shapes: T query tokens, H query heads, G key/value heads, D head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from comb.kernels.mac.dispatch import KEY_DTYPES, why_no_kernels, why_too_large
from comb.kernels.paged.layout import FP8, PagedBatch, PagedLayer


def attend_plain(query: Tensor, layer: PagedLayer, batch: PagedBatch) -> Tensor:
    """The specification: each row's keys gathered, then exact attention.

    query [T, H, D] -> the same shape; softmax of q k / sqrt(D) over all tokens of the row's documents, COMB sec. 3.
    """
    mixed, at = torch.empty_like(query), 0
    for count, table in zip(batch.counts, batch.tables, strict=True):
        here = slice(at, at := at + count)
        keys, values = layer.gather(table.slots(layer.keys.device), query)
        mixed[here] = attend_row(query[here], keys, values)
    return mixed


def attend_row(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention without a mask, so query heads that share a key/value head are so many more rows of one product.

    torch's own grouping on a CPU takes three times as long for a single token over 3,000 slots in bfloat16.

    query [tokens, H, D]; keys, values [slots, G, D] -> the shape of `query`
    """
    tokens, heads, width = query.shape
    shared = keys.shape[1]
    rows = query.unflatten(1, (shared, -1)).permute(1, 2, 0, 3).reshape(1, shared, -1, width)
    mixed = F.scaled_dot_product_attention(rows, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return mixed.view(shared, heads // shared, tokens, width).permute(2, 0, 1, 3).flatten(1, 2)


def attend(query: Tensor, layer: PagedLayer, batch: PagedBatch) -> Tensor:
    """Attention of each row's tokens to its own documents, by the kernel where it can be, plainly elsewhere.

    query [T, H, D], row behind row -> the same shape
    """
    if why_plain(query, layer):
        return attend_plain(query, layer, batch)
    from comb.kernels.paged.kernel import attend_paged

    return attend_paged(query, layer, batch)


def why_plain(query: Tensor, layer: PagedLayer) -> str:
    """Why a layer is left to `attend_plain`; empty if the kernel takes it."""
    if nowhere := why_no_kernels(query.device):
        return nowhere
    if layer.keys.device != query.device:
        return f"the pool is on {layer.keys.device}, queries are on {query.device}"
    if query.dtype not in KEY_DTYPES:
        return f"{str(query.dtype).removeprefix('torch.')} queries"
    quantized = layer.keys.dtype == FP8 and layer.key_scales is not None
    if not quantized and layer.keys.dtype != query.dtype:
        names = [str(dtype).removeprefix("torch.") for dtype in (query.dtype, layer.keys.dtype)]
        return f"{names[0]} queries, {names[1]} keys"
    if quantized and query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 9):
        return "fp8 needs a GPU of compute capability 8.9 or more"
    return why_too_large(query.shape[-1], query.shape[1], layer.keys.shape[1])
