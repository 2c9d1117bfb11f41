"""Primed: segments are compiled behind a passage of plain text that isn't there any more when they are linked."""

from __future__ import annotations

from typing import Any, ClassVar

from comb.backbones.primer import Primer
from comb.methods import register
from comb.methods.legolink import LegoLink


@register("primed")
class Primed(LegoLink):
    """`naive`, or with `k` `legolink`, over segments that were compiled behind a primer.

    What stands at the start of a prompt becomes its attention sink, with keys and values unlike all others. Compiled
    alone, each segment has one of its own, and linked prompts have as many as documents. Behind a passage of prose a
    segment's tokens are what they are in the middle of a text. The primer is dropped, so the linked prompt has no
    token more; where it begins with a document, its first token is recomputed, to be the one sink that it needs.

    Args:
        k: tokens recomputed at the start of each segment; none by default.

    Source: this project's; LegoLink-0 (EPIC sec. 5.4) compiles behind BOS tokens, FusionRAG (arXiv 2601.12904) behind
    similar documents.
    """

    default_primer: ClassVar[Primer] = True

    def __init__(self, model: Any, *, k: int = 0, **parameters: Any) -> None:
        super().__init__(model, k=k, **parameters)
