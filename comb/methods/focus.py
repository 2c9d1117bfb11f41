"""Focus: the document tokens that the question looks at are recomputed."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from comb.backbones.attention_calls import AttentionCall, watched
from comb.backbones.transformers_private import can_set_attention
from comb.linking.cache import ScatteredRows
from comb.methods.linked import Linked, PromptLayout, selects
from comb.methods.selection import Share, Tokens

SEAM = 4


def _can_be_watched(method: Linked) -> None:
    if method.support.masks is None or not can_set_attention(method.backbone):
        raise ValueError(
            f"method {method.name!r} can't be used with this model: {type(method.backbone).__name__} computes "
            "attention in its own code, where nobody sees what the question looks at; use 'cacheblend' or 'legolink'"
        )


@selects("focus", looks=True, by_query=True, check=_can_be_watched)
def focus(prompt: PromptLayout, ratio: Share = 0.15, seam: Tokens | None = None) -> list[int]:
    """Recomputes the `ratio` of document tokens that the query pays most attention to.

    1. The query passes over the naively linked cache once, with the fresh tokens in front of it.
    2. A document token's score is the attention that the query's tokens pay to it, added up over them, all layers and
       all heads.
    3. The tokens of largest score go through all layers, in the same pass as the fresh tokens, which go through them a
       second time.

    A document that begins the prompt was compiled in its place: it is right already, and never chosen.

    Args:
        seam: tokens at the start of each document that are chosen before all others; by default 4, and none behind a
            front. A document that was compiled alone begins with an attention sink, which few questions look at and
            all other tokens do (docs/training-free.md compares).

    Source: tokens chosen by the query's attention are ProphetKV's (arXiv 2602.02579) and FusionRAG's (arXiv
    2601.12904) idea; the score is this project's, chosen among those that docs/experiments.md compares.
    """
    seam = (0 if prompt.behind_front else SEAM) if seam is None else seam
    last = len(prompt.token_ids) - 1
    scores = QueryAttention(prompt.cache.rows, start=min(prompt.spans[-1].end, last))
    with watched(prompt.backbone, scores):
        prompt.run(sorted({*prompt.fresh_rows, last}))  # a prompt may end with a document
    movable, paid = [span for span in prompt.spans if not span.first], scores.paid
    for span in movable:
        paid[span.start : min(span.start + seam, span.end)] = math.inf
    documents = torch.tensor([position for span in movable for position in range(span.start, span.end)])
    most = math.ceil(ratio * sum(span.length for span in prompt.spans))
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
