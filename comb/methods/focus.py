"""Focus: the document tokens that the question looks at are computed anew."""

from __future__ import annotations

import math

import torch

from comb.backbones.transformers_private import can_set_attention
from comb.methods.linked import Linked, selects
from comb.methods.selection import QueryLook, Share, Tokens

SEAM = 4


def _can_be_watched(method: Linked) -> None:
    if not can_set_attention(method.backbone):
        why = "computes attention in its own code, where nobody sees what the question looks at"
    elif method.support.masks is None:
        why = "takes no mask by position, or computes a token otherwise beside others (quantised activations?)"
    else:
        return
    model = type(method.backbone).__name__
    raise ValueError(
        f"method {method.name!r} can't be used with this model: {model} {why}; use 'cacheblend' or 'legolink'"
    )


@selects("focus", by_query=True, check=_can_be_watched)
def focus(look: QueryLook, ratio: Share = 0.15, seam: Tokens | None = None) -> list[int]:
    """Recomputes the `ratio` of document tokens that the query pays most attention to.

    1. The query passes over the naively linked cache once, with the fresh tokens in front of it.
    2. A document token's score is the attention that the query's tokens pay to it, added up over them, all layers and
       all heads (`QueryLook.paid`).
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
    seam = (0 if look.behind_front else SEAM) if seam is None else seam
    movable, paid = [span for span in look.spans if not span.first], look.paid.clone()
    for span in movable:
        paid[span.start : min(span.start + seam, span.end)] = math.inf
    documents = torch.tensor([position for span in movable for position in range(span.start, span.end)])
    most = math.ceil(ratio * sum(span.length for span in look.spans))
    top = paid[documents].topk(min(most, len(documents))).indices
    chosen: list[int] = documents[top].sort().values.tolist()
    return chosen
