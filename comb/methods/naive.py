"""Naive: cached keys and values one behind the other, nothing recomputed."""

from __future__ import annotations

from typing import Any

from comb.methods import register
from comb.methods.decoder import Decoder


@register("naive")
class Naive(Decoder):
    """Reuses every document token as it was compiled; only head, gaps and query are computed.

    Documents know nothing of each other, and each of them starts with tokens that took themselves for the start of
    the prompt (attention sinks). Exact for one document without a head in front.

    Args:
        rotate: False leaves keys at the positions of their own segment, the weakest baseline of the papers.

    Source: EPIC sec. 2.3 ("Naive").
    """

    def __init__(self, model: Any, *, rotate: bool = True, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        if not isinstance(rotate, bool):
            raise ValueError(f"naive:rotate is true or false, got {rotate!r}")
        self.rotates = rotate
