"""CacheBlend: the document tokens whose keys and values deviate most are computed anew."""

from __future__ import annotations

import math

import torch

from comb.methods.linked import Linked, PromptLayout, selects
from comb.methods.selection import Share
from comb.waits import on_device


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
    documents = torch.tensor([position for span in spans for position in range(span.start, min(span.end, prompt.end))])
    if not rows or not len(documents):  # nothing but the last token, which is left for `generate`
        return []
    cache.stop_layer = layers
    prompt.run(rows)
    cache.stop_layer = None
    assert cache.deviation is not None
    top = cache.deviation[on_device(documents, cache.deviation.device)].topk(math.ceil(ratio * len(documents))).indices
    chosen: list[int] = documents[top.cpu()].sort().values.tolist()
    return chosen
