"""Attention of scattered rows by torch's flex attention: one mask of blocks for all layers of a pass; blocks of keys
that no row of a tile sees are left out, and grouped heads share keys.

Compiled on CUDA, which takes seconds for the first pass of a process (12 s on a CPU); plain on a CPU, where it shows
that the mask is right.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from comb.backbones.attention_calls import AttentionCall
from comb.linking.answering import ScatteredAttention, WindowedMasks
from comb.linking.cache import ScatteredRows


class FlexAttention(ScatteredAttention):
    """Rows see keys up to their own position, and no further back than their layer's window."""

    def __init__(self, rows: ScatteredRows, masks: WindowedMasks) -> None:
        super().__init__(rows, masks)
        self._blocks: dict[tuple[torch.device, int | None], BlockMask] = {}

    def mixed(self, call: AttentionCall, mask: Tensor, window: int | None) -> Tensor:
        kind = call.query.device, window
        if kind not in self._blocks:
            self._blocks[kind] = self.blocks(*kind)
        mixed: Tensor = _function(kind[0].type)(
            call.query, call.keys, call.values, block_mask=self._blocks[kind], scale=call.scale,
            enable_gqa=call.query.shape[1] != call.keys.shape[1],
        )  # fmt: skip
        return mixed.transpose(1, 2).contiguous()

    def blocks(self, device: torch.device, window: int | None) -> BlockMask:
        """The pass's mask, by blocks of 128 rows and 128 keys."""
        at = self.rows.on(device)

        def causal(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            return key <= at[row]

        def sliding(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
            assert window is not None
            return (key <= at[row]) & (key > at[row] - window)

        seen = causal if window is None else sliding
        return create_block_mask(seen, None, None, len(self.rows.positions), self.rows.visible, device=str(device))


@functools.cache
def _function(device: str) -> Callable[..., Any]:
    # rows and keys are other numbers in every pass
    function: Callable[..., Any] = flex_attention
    return torch.compile(function, dynamic=True) if device == "cuda" else function
