"""What a question looks at: the attention that its tokens pay to each token of the prompt, heard layer by layer."""

from __future__ import annotations

import torch
from torch import Tensor

from comb.backbones.attention_calls import AttentionCall
from comb.linking.cache import ScatteredRows


class QueryAttention:
    """Adds up, over layers and heads, the attention that rows from position `start` on pay to each token. What a model
    adds to its scores (soft caps, sinks) doesn't count here.

    Shapes: H query heads in G groups, S rows being computed, K keys that they may see, N tokens of the prompt.
    """

    def __init__(self, rows: ScatteredRows, start: int) -> None:
        self.rows = rows
        self.start = start
        self._sums: dict[torch.device, Tensor] = {}

    @property
    def paid(self) -> Tensor:
        """The sums [N], float32, on the CPU. They are added up where the layers are, and waited for here."""
        total = torch.zeros(self.rows.length)
        for part in self._sums.values():
            total += part.cpu()
        return total

    def __call__(self, call: AttentionCall) -> None:
        """One layer's call: queries [1, H, S, D], keys [1, G, K, D], and a mask [1, 1, S, K] of bools or numbers."""
        first = int((self.rows.positions < self.start).sum())  # rows are sorted: those that ask are the last ones
        if first == len(self.rows.positions):
            return
        paid = call.scores(first).softmax(-1).sum(dim=(0, 1, 2, 3))
        if paid.device not in self._sums:
            self._sums[paid.device] = torch.zeros(self.rows.length, device=paid.device)
        self._sums[paid.device][: len(paid)] += paid
