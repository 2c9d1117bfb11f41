"""Attention of scattered rows on a CPU: heads that share keys are so many more rows of one product, and few rows at a
time look at no more keys than the last of them may see.

Under a mask by position transformers repeats keys and values for each query head, and every row of a pass is multiplied
with all keys of the last one. `comb.linking.masks` is the plain way: the same masks, whole.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from comb.backbones.attention_calls import ANSWERING, Attended, AttentionCall, attention, stand_in
from comb.linking.cache import ScatteredRows
from comb.linking.masks import exact_attention

_LEAST_KEYS = 512  # below, answering the calls takes longer than it saves
_ROWS = 16

Part = tuple[slice, int, Tensor]


@contextmanager
def grouped_attention(model: Any, rows: ScatteredRows) -> Iterator[None]:
    """Within it, the passes of `model` over `rows` attend so, where that is faster: on a CPU, over many keys."""
    device = model.get_input_embeddings().weight.device
    if device.type != "cpu" or rows.length < _LEAST_KEYS or exact_attention(model) != "sdpa":
        yield
        return
    with attention(model, stand_in("sdpa")):
        token = ANSWERING.set(GroupedAttention(rows))
        try:
            yield
        finally:
            ANSWERING.reset(token)


class GroupedAttention:
    """Answers the attention calls of a pass over `rows`; what it can't answer is left to the exact attention."""

    def __init__(self, rows: ScatteredRows) -> None:
        self.rows = rows
        self._parts: list[tuple[Tensor, list[Part]]] = []  # of each mask of the pass that is running

    def attend(self, call: AttentionCall) -> Attended:
        """The call's output [1, S, H, V]."""
        mask, groups = call.mask, call.query.shape[1] // call.keys.shape[1]
        if mask is None or not self._takes(call, mask):
            return call.exact()
        mixed = []
        for here, end, allowed in self.parts(mask, groups):
            rows = call.query[:, :, here].unflatten(1, (-1, groups)).flatten(2, 3)
            part = F.scaled_dot_product_attention(
                rows, call.keys[:, :, :end], call.values[:, :, :end], attn_mask=allowed, scale=call.scaling
            )
            mixed.append(part.unflatten(2, (groups, -1)).flatten(1, 2))
        return torch.cat(mixed, dim=2).transpose(1, 2).contiguous(), None

    def parts(self, mask: Tensor, groups: int) -> list[Part]:
        """Rows that are taken together, how many keys they see, and their mask [1, 1, groups * rows, keys]."""
        for known, parts in self._parts:
            if known is mask:
                return parts
        parts = portions(self.rows, mask, groups, _ROWS)
        self._parts.append((mask, parts))
        return parts

    def _takes(self, call: AttentionCall, mask: Tensor) -> bool:
        shape = (1, 1, len(self.rows.positions), call.keys.shape[2])
        whole = mask.dtype == torch.bool and mask.shape == shape and call.query.shape[0] == 1
        return whole and not call.dropout and call.options.get("position_bias") is None


def portions(rows: ScatteredRows, mask: Tensor, groups: int, most: int) -> list[Part]:
    """`rows` by `most` at a time, for a mask [1, 1, S, keys] of theirs and so many query heads to a key head."""
    positions, found = rows.positions.tolist(), []
    for start in range(0, len(positions), most):
        here = slice(start, min(start + most, len(positions)))
        end = positions[here.stop - 1] + 1
        found.append((here, end, mask[:, :, here, :end].repeat(1, 1, groups, 1)))
    return found
