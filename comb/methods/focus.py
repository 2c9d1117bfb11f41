"""Focus: the document tokens that the question looks at are recomputed."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from comb.backbones.attention_calls import AttentionCall, watched
from comb.backbones.transformers_private import can_set_attention
from comb.linking.cache import ScatterCache, ScatteredRows
from comb.methods import register
from comb.methods.checks import check_token_count
from comb.methods.decoder import Looking, PromptLayout

SEAM = 4


@register("focus")
class Focus(Looking):
    """Recomputes the `ratio` of document tokens that the query pays most attention to.

    1. The query passes over the naively linked cache once, with the fresh tokens in front of it.
    2. A document token's score is the attention that the query's tokens pay to it, added up over them, all layers and
       all heads.
    3. The tokens of largest score go through all layers, in the same pass as the fresh tokens, which go through them a
       second time.

    A segment that begins the prompt was compiled in its place: it is right already, and never chosen.

    Args:
        ratio: share of document tokens, above 0, at most 1 (full recompute).
        seam: tokens at the start of each segment that are chosen before all others; by default 4, and none behind a
            primer. A segment that was compiled alone begins with an attention sink, which few questions look at and
            all other tokens do (docs/training-free.md compares).

    Raises:
        ValueError: for a model whose attention can't be seen from outside.

    Source: tokens chosen by the query's attention are ProphetKV's (arXiv 2602.02579) and FusionRAG's (arXiv
    2601.12904) idea; the score is this project's, chosen among those that docs/experiments.md compares.
    """

    chooses_by_query = True
    with_last_token = True  # what a prompt ends with asks as much as the rest

    def __init__(self, model: Any, *, seam: int | None = None, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        seam = (0 if self.primer else SEAM) if seam is None else seam
        check_token_count("focus:seam", seam)
        if self.support.masks is None or not can_set_attention(self.backbone):
            raise ValueError(
                f"method 'focus' can't be used with this model: {type(self.backbone).__name__} computes attention in "
                "its own code, where nobody sees what the question looks at; use 'cacheblend' or 'legolink'"
            )
        self.seam = seam

    def look(self, layout: PromptLayout, cache: ScatterCache) -> list[int]:
        last = len(layout.token_ids) - 1
        scores = QueryAttention(cache.rows, start=min(layout.spans[-1].end, last))
        with watched(self.backbone, scores):
            self.run(layout, cache, sorted({*layout.fresh_rows, last}))  # a prompt may end with a document
        movable, paid = [span for span in layout.spans if not span.first], scores.paid
        for span in movable:
            paid[span.start : min(span.start + self.seam, span.end)] = math.inf
        documents = torch.tensor([position for span in movable for position in range(span.start, span.end)])
        most = math.ceil(self.ratio * sum(span.length for span in layout.spans))
        top = paid[documents].topk(min(most, len(documents))).indices
        chosen: list[int] = documents[top].sort().values.tolist()
        return chosen


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
