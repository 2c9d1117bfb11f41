"""What answers the attention calls of a pass over scattered rows, in one of several ways.

Shapes: S rows, K keys that the last of them sees, H query heads, G key/value heads, D and V channels.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from comb.backbones.attention_calls import Attended, AttentionCall
from comb.linking.cache import ScatteredRows

WindowedMasks = Sequence[tuple[Tensor, int | None]]
"""The masks of a pass, each with the sliding window that it shows; None: all earlier keys."""


class ScatteredAttention(ABC):
    """Answers calls under a mask of its pass over `rows`; what it can't answer is left to the exact attention."""

    def __init__(self, rows: ScatteredRows, masks: WindowedMasks) -> None:
        self.rows = rows
        self.masks = masks

    def attend(self, call: AttentionCall) -> Attended:
        """The call's output [1, S, H, V]."""
        known = next(((mask, window) for mask, window in self.masks if mask is call.mask), None)
        mixed = None if known is None or not self._takes(call, known[0]) else self.mixed(call, *known)
        return call.exact() if mixed is None else (mixed, None)

    @abstractmethod
    def mixed(self, call: AttentionCall, mask: Tensor, window: int | None) -> Tensor | None:
        """The output [1, S, H, V] of a call with one row of a batch, under `mask` [1, 1, S, K]; None: not this call."""

    def _takes(self, call: AttentionCall, mask: Tensor) -> bool:
        whole = mask.dtype == torch.bool and mask.shape == (1, 1, len(self.rows.positions), call.keys.shape[2])
        alone = call.query.shape[0] == 1 and call.query.shape[1] % call.keys.shape[1] == 0
        return whole and alone and not call.dropout and call.options.get("position_bias") is None
