"""AttnLink: k tokens around every segment boundary are recomputed, half of them on either side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comb.linking.cache import Span
from comb.methods import register
from comb.methods.decoder import Decoder


@register("attnlink")
class AttnLink(Decoder):
    """Recomputes k/2 tokens in front of each boundary and k/2 behind it.

    A boundary is where a segment begins with something in front of it. Behind fresh tokens (a head, a gap) there is
    nothing to recompute on the near side; what stands behind the last segment is the query, which is computed anyway.

    Args:
        k: tokens per boundary, even, at least 0.

    Source: EPIC (arXiv version) sec. 4.2.
    """

    positional = ("k",)

    def __init__(self, model: Any, *, k: int = 16, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        if isinstance(k, bool) or not isinstance(k, int) or k < 0 or k % 2:
            raise ValueError(
                f"attnlink:k is a number of tokens, half of them on either side of a boundary: an even integer of at "
                f"least 0, got {k!r}"
            )
        self.k = k

    def select(self, spans: Sequence[Span]) -> list[int]:
        half = self.k // 2
        chosen: set[int] = set()
        for index, span in enumerate(spans):
            if span.first:
                continue
            chosen.update(range(span.start, min(span.start + half, span.end)))
            before = spans[index - 1] if index else None
            if before is not None and before.end == span.start:
                chosen.update(range(max(before.start, before.end - half), before.end))
        return sorted(chosen)
