"""The rules of selection that methods are named after, and presets: a front and a rule that belong together."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from comb.backbones.transformers_private import can_set_attention
from comb.linking.cache import Span
from comb.methods.linked import Linked, PromptLayout, selects
from comb.methods.registry import register
from comb.methods.selection import NOTHING, EvenTokens, QueryLook, Rule, Share, Tokens
from comb.waits import on_device


@selects("legolink")
def legolink(spans: Sequence[Span], k: Tokens = 16) -> list[int]:
    """Recomputes the first `k` tokens of each document with something in front of it.

    The paper spares the first document because nothing stands in front of it; behind a system prompt or BOS it is no
    longer first, and is recomputed like the others.

    Source: EPIC (ICML 2025) sec. 4.2, eq. 1.
    """
    return [
        position
        for span in spans
        if not span.first
        for position in range(span.start, min(span.start + k, span.end))
    ]  # fmt: skip


@selects("attnlink")
def attnlink(spans: Sequence[Span], k: EvenTokens = 16) -> list[int]:
    """Recomputes k/2 tokens in front of each boundary and k/2 behind it.

    A boundary is where a document begins with something in front of it. Behind fresh tokens (a system prompt, a gap)
    there is nothing to recompute on the near side; what stands behind the last document is computed anyway.

    Source: EPIC (arXiv version) sec. 4.2.
    """
    half, chosen = k // 2, set[int]()
    for before, span in zip([None, *spans], spans, strict=False):
        if span.first:
            continue
        chosen.update(range(span.start, min(span.start + half, span.end)))
        if before is not None and before.end == span.start:
            chosen.update(range(max(before.start, before.end - half), before.end))
    return sorted(chosen)


def _has_layers(method: Linked) -> None:
    layers, depth = method.parameters["layers"], len(method.support.positions.layers)
    if type(layers) is not int or not 1 <= layers < depth:
        raise ValueError(f"cacheblend:layers is at least 1 and less than the model's {depth} layers, got {layers!r}")


@selects("cacheblend", looks=True, check=_has_layers)
def cacheblend(prompt: PromptLayout, ratio: Share = 0.15, layers: int = 1) -> list[int]:
    """Recomputes the `ratio` of document tokens whose cached keys and values are furthest from the right ones.

    1. All tokens behind the first document go through the first `layers` layers, and as far as the keys and values of
       the next one (the first layer's own depend on the token alone, so they never deviate). A document that begins the
       prompt was compiled in its place: it is right already.
    2. There, the squared distance between cached and new keys and values is summed over heads and channels.
    3. The tokens of largest distance go through all layers, in the same pass as the query. What step 1 computed
       stays: those layers are exact for every token.

    The chosen tokens run through the first layers a second time, which costs ``ratio * layers`` layer passes and spares
    any surgery on the forward pass.

    Source: CacheBlend (EuroSys 2025) sec. 4, as described in EPIC sec. 2.3. Unlike its release, a recomputed token
    never sees a later one.
    """
    spans, cache = prompt.spans, prompt.cache
    rows = range(spans[0].end if spans[0].first else prompt.start, prompt.end)
    if not rows:  # all but the last token, which is left for `generate`
        return []
    cache.stop_layer = layers
    prompt.run(rows)
    cache.stop_layer = None
    assert cache.deviation is not None
    documents = torch.tensor([position for span in spans for position in range(span.start, min(span.end, prompt.end))])
    top = cache.deviation[on_device(documents, cache.deviation.device)].topk(math.ceil(ratio * len(documents))).indices
    chosen: list[int] = documents[top.cpu()].sort().values.tolist()
    return chosen


SEAM = 4


def _can_be_watched(method: Linked) -> None:
    if method.support.masks is None or not can_set_attention(method.backbone):
        raise ValueError(
            f"method {method.name!r} can't be used with this model: {type(method.backbone).__name__} computes "
            "attention in its own code, where nobody sees what the question looks at; use 'cacheblend' or 'legolink'"
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


@register("naive")
class Naive(Linked):
    """Documents as they were compiled, one behind the other; only what isn't a document is computed.

    Documents know nothing of each other, and each of them starts with tokens that took themselves for the start of
    the prompt (attention sinks). Exact for one document with nothing in front; ``rotate=false`` is the weakest baseline
    of the papers. On a backbone that was fine-tuned to read documents under a block-diagonal mask it is that model's
    own attention, and nothing is lost (Block-Attention, Ma et al. 2024).

    Source: EPIC sec. 2.3 ("Naive").
    """

    rule = NOTHING


@register("legolink-0")
class LegoLinkZero(Naive):
    """`naive` behind four BOS tokens, which take the attention sink away.

    Source: EPIC (ICML 2025) sec. 5.4. Unlike there, a prompt that begins with a document has its first token computed:
    it would have no sink at all.
    """

    default_front = "dummies:4"


@register("primed")
class Primed(Linked):
    """`naive`, or with `k` `legolink`, behind a passage of prose.

    Source: this project's; LegoLink-0 (EPIC sec. 5.4) compiles behind BOS tokens, FusionRAG (arXiv 2601.12904) behind
    similar documents.
    """

    rule = Rule.of(legolink, k=0)
    default_front = "prose"


@register("linktokens")
class LinkTokens(Naive):
    """`naive` behind what the model's adapter has learned (`comb.linktokens`).

    Source: KVLink (arXiv:2502.16002), whose link tokens are computed at link time, and KV Packet (arXiv:2604.13226),
    whose trained wrappers are not; the keys and values as parameters are prefix tuning's (Li and Liang 2021).
    """

    default_front = "adapter"
