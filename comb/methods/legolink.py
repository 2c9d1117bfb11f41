"""LegoLink: the first k tokens of every document are recomputed, so that they stop being attention sinks."""

from __future__ import annotations

from collections.abc import Sequence

from comb.linking.cache import Span
from comb.methods.linked import selects
from comb.methods.selection import Tokens


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
