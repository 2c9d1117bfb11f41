"""CacheBlend: the first layers are recomputed for every token, and the tokens that deviate most in all layers."""

from __future__ import annotations

import math
from typing import Any

import torch

from comb.linking.cache import ScatterCache
from comb.methods import register
from comb.methods.decoder import Looking, PromptLayout
from comb.waits import on_device


@register("cacheblend")
class CacheBlend(Looking):
    """Recomputes the `ratio` of document tokens whose cached keys and values are furthest from the right ones.

    1. All tokens behind the first segment go through the first `layers` layers, and as far as the keys and values of
       the next one (the first layer's own depend on the token alone, so they never deviate). A segment that begins the
       prompt was compiled in its place: it is right already.
    2. There, the squared distance between cached and new keys and values is summed over heads and channels.
    3. The tokens of largest distance go through all layers, in the same pass as the query. What step 1 computed
       stays: those layers are exact for every token.

    The chosen tokens run through the first layers a second time, which costs ``ratio * layers`` layer passes and spares
    any surgery on the forward pass.

    Args:
        ratio: share of document tokens, above 0, at most 1 (full recompute).
        layers: how many layers are recomputed for all tokens, at least 1.

    Source: CacheBlend (EuroSys 2025) sec. 4, as described in EPIC sec. 2.3. Unlike its release, a recomputed token
    never sees a later one.
    """

    def __init__(self, model: Any, *, layers: int = 1, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        depth = len(self.support.positions.layers)
        if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers < depth:
            raise ValueError(
                f"cacheblend:layers is at least 1 and less than the model's {depth} layers, got {layers!r}"
            )
        self.layers = layers

    def look(self, layout: PromptLayout, cache: ScatterCache) -> list[int]:
        spans = layout.spans
        rows = range(spans[0].end if spans[0].first else layout.start, layout.end)
        if not rows:  # all but the last token, which is left for `generate`
            return []
        cache.stop_layer = self.layers
        self.run(layout, cache, rows)
        cache.stop_layer = None
        assert cache.deviation is not None
        documents = torch.tensor(
            [position for span in spans for position in range(span.start, min(span.end, layout.end))]
        )
        count = math.ceil(self.ratio * len(documents))
        top = cache.deviation[on_device(documents, cache.deviation.device)].topk(count).indices
        chosen: list[int] = documents[top.cpu()].sort().values.tolist()
        return chosen
