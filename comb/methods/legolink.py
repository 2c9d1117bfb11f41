"""EPIC: a few tokens of each document computed anew, whatever the question is."""

from __future__ import annotations

from collections.abc import Sequence

from comb.linking.cache import Span
from comb.methods.linked import selects
from comb.methods.selection import EvenTokens, Tokens


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
