"""Attention of scattered rows without repeated keys: heads that share keys are so many more rows of one product, and
few rows at a time look at no more keys than the last of them may see.

Under a mask by position transformers repeats keys and values for each query head, and every row of a pass is multiplied
with all keys of the last one. `comb.linking.masks` is the plain way: the same masks, whole.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from comb.backbones.attention_calls import AttentionCall
from comb.linking.answering import ScatteredAttention, WindowedMasks
from comb.linking.cache import ScatteredRows

_ROWS = 16
_ROWS_GPU = 128  # of one head: with four heads to a key head a product of 512 rows

Part = tuple[slice, int, Tensor]


class GroupedAttention(ScatteredAttention):
    """Part of the rows after part, each over the keys up to its last row."""

    def __init__(self, rows: ScatteredRows, masks: WindowedMasks) -> None:
        super().__init__(rows, masks)
        self._parts: list[tuple[Tensor, list[Part]]] = []  # of each mask of the pass that is running

    def mixed(self, call: AttentionCall, mask: Tensor, window: int | None) -> Tensor:
        groups = call.query.shape[1] // call.keys.shape[1]
        mixed = []
        for here, end, allowed in self.parts(mask, groups):
            rows = call.query[:, :, here].unflatten(1, (-1, groups)).flatten(2, 3)
            part = F.scaled_dot_product_attention(
                rows, call.keys[:, :, :end], call.values[:, :, :end], attn_mask=allowed, scale=call.scaling
            )
            mixed.append(part.unflatten(2, (groups, -1)).flatten(1, 2))
        return torch.cat(mixed, dim=2).transpose(1, 2).contiguous()

    def parts(self, mask: Tensor, groups: int) -> list[Part]:
        """Rows that are taken together, how many keys they see, and their mask [1, 1, groups * rows, keys]."""
        for known, parts in self._parts:
            if known is mask:
                return parts
        parts = portions(self.rows, mask, groups, _ROWS if mask.device.type == "cpu" else _ROWS_GPU)
        self._parts.append((mask, parts))
        return parts


def portions(rows: ScatteredRows, mask: Tensor, groups: int, most: int) -> list[Part]:
    """`rows` by `most` at a time, for a mask [1, 1, S, keys] of theirs and so many query heads to a key head."""
    positions, found = rows.positions.tolist(), []
    for start in range(0, len(positions), most):
        here = slice(start, min(start + most, len(positions)))
        end = positions[here.stop - 1] + 1
        found.append((here, end, mask[:, :, here, :end].repeat(1, 1, groups, 1)))
    return found
