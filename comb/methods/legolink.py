"""LegoLink: the first k tokens of every segment are recomputed, so that they stop being attention sinks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comb.linking.cache import Span
from comb.methods import register
from comb.methods.checks import check_token_count
from comb.methods.decoder import Decoder


@register("legolink")
class LegoLink(Decoder):
    """Recomputes the first `k` tokens of each segment with something in front of it.

    The paper spares the first segment because nothing stands in front of it; behind a head (a system prompt, BOS) it
    is no longer first, and is recomputed like the others.

    Args:
        k: tokens per segment, at least 0; 0 is `naive`.

    Source: EPIC (ICML 2025) sec. 4.2, eq. 1.
    """

    positional = ("k",)

    def __init__(self, model: Any, *, k: int = 16, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        check_token_count("legolink:k", k)
        self.k = k

    def select(self, spans: Sequence[Span]) -> list[int]:
        return [
            position
            for span in spans
            if not span.first
            for position in range(span.start, min(span.start + self.k, span.end))
        ]
