"""Attention to documents in blocks of a shared pool: where they lie, which of them each row sees, the plain way.

A batch holds tokens of several rows; each row sees its own documents, whole, and nothing else. Attention doesn't ask
for an order of keys, so a row's documents are one list of blocks, each filled to a length of its own: the last block of
every document is usually filled in part, also in the middle of the list, and what lies behind is never read.

Shapes: T query tokens, H query heads, G key/value heads, D head_dim, S slots of the pool (one token each).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from comb.cache.quantization import dequantize

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True)
class PagedLayer:
    """Keys and values of one layer in a pool."""

    keys: Tensor  # [S, G, D], adjacent channels, any other strides
    values: Tensor
    block_size: int  # slots of a block
    key_scales: Tensor | None = None  # [S, G] float32, of keys in fp8
    value_scales: Tensor | None = None


def take(data: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows `slots` of `data` [S, G, D], dequantised if there are `scales` [S, G]."""
    if scales is None:
        return data.index_select(0, slots).to(dtype)
    # torch has no index_select for every eight-bit float on every device
    chosen = data.view(torch.uint8).index_select(0, slots).view(data.dtype)
    return dequantize(chosen, scales.index_select(0, slots)[..., None], dtype)


class BlockTable:
    """Where one row's documents lie: `last` [blocks] int32 is the last filled slot of each block of `block_size` slots,
    block number and filled length in one. `documents` are numbers of tokens, and the blocks that hold them in order.
    """

    def __init__(self, documents: Sequence[tuple[int, Sequence[int]]], block_size: int) -> None:
        self.block_size = block_size
        parts = []
        for tokens, blocks in documents:
            if len(blocks) != -(-tokens // block_size) or tokens < 1:
                raise ValueError(f"{tokens} tokens don't fill {len(blocks)} blocks of {block_size}")
            last = np.asarray(blocks, dtype=np.int64) * block_size + block_size - 1
            last[-1] -= -tokens % block_size
            parts.append(last)
        joined = np.concatenate(parts)
        if joined.max() >= 2**31:
            raise ValueError(f"slot {joined.max()} is beyond the {2**31} that a pool may have")
        self.last: NDArray[np.int32] = joined.astype(np.int32)
        self._slots: dict[torch.device, Tensor] = {}

    def slots(self, device: torch.device | str = "cpu") -> Tensor:
        """Slots of all tokens [tokens] int64, in order; kept, as every layer asks for them."""
        device = torch.device(device)
        if device not in self._slots:
            first = self.last.astype(np.int64) // self.block_size * self.block_size
            every = first[:, None] + np.arange(self.block_size)
            self._slots[device] = torch.from_numpy(every[every <= self.last[:, None]]).to(device)
        return self._slots[device]


@dataclass(frozen=True)
class PagedBatch:
    """The rows of one step: row i has the next ``counts[i]`` query tokens, which see ``tables[i]``.

    Made once per step; what the kernels need of it is worked out and copied to the device at the first layer.
    """

    counts: tuple[int, ...]
    tables: tuple[BlockTable, ...]
    plans: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


def attend_plain(query: Tensor, layer: PagedLayer, batch: PagedBatch) -> Tensor:
    """The specification: softmax of q k / sqrt(D) over all tokens of the row's documents (COMB sec. 3).

    query [T, H, D] -> the same shape
    """
    mixed, at = torch.empty_like(query), 0
    for count, table in zip(batch.counts, batch.tables, strict=True):
        here, slots = slice(at, at := at + count), table.slots(layer.keys.device)
        pairs = ((layer.keys, layer.key_scales), (layer.values, layer.value_scales))
        keys, values = (take(data, scales, slots, query.dtype).to(query.device) for data, scales in pairs)
        mixed[here] = attend_row(query[here], keys, values)
    return mixed


def attend_row(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Attention without a mask: query [tokens, H, D]; keys, values [slots, G, D] -> the shape of `query`."""
    # query heads that share a key/value head are so many more rows of one product: torch's own grouping on a CPU takes
    # three times as long for a single token over 3,000 slots in bfloat16
    tokens, heads, width = query.shape
    shared = keys.shape[1]
    rows = query.unflatten(1, (shared, -1)).permute(1, 2, 0, 3).reshape(1, shared, -1, width)
    mixed = F.scaled_dot_product_attention(rows, keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    return mixed.view(shared, heads // shared, tokens, width).permute(2, 0, 1, 3).flatten(1, 2)
