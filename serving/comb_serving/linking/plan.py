"""Which tokens of a prompt come from the pool, which are computed at the seams, and where the request itself begins.

Positions are those of the prompt, ranges half open.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

Range = tuple[int, int]


@dataclass(frozen=True)
class LoadedRange:
    """Tokens [start, end) of the prompt that are tokens [offset, ...) of document number `document`."""

    start: int
    end: int
    document: int
    offset: int

    def behind(self, position: int) -> LoadedRange | None:
        """What of it is at or behind a position; None if nothing is."""
        if self.end <= position:
            return None
        start = max(self.start, position)
        return LoadedRange(start, self.end, self.document, self.offset + start - self.start)


@dataclass(frozen=True)
class LinkPlan:
    """Args:
    loads: what the pool gives, in order.
    seams: what is computed before the query: first tokens of documents, and fresh tokens between and before them.
    query: first token that the request computes itself; everything in front of it is in `loads` or `seams`.
    """

    loads: tuple[LoadedRange, ...]
    seams: tuple[Range, ...]
    query: int

    def behind(self, position: int) -> LinkPlan:
        """What is left to do if the first `position` tokens are there already, from the exact prefix cache."""
        loads = tuple(found for load in self.loads if (found := load.behind(position)) is not None)
        seams = tuple((max(start, position), end) for start, end in self.seams if end > position)
        return LinkPlan(loads, seams, self.query)


def plan(
    length: int, spans: Sequence[Range], seam_tokens: int, first_tokens: int = 0, tail_tokens: int | None = None
) -> LinkPlan:
    """Plans a prompt of `length` tokens whose documents are at `spans`, each ``(start, tokens)``, in order.

    The last token of the prompt is always computed by the request itself, as something has to be sampled from.

    Args:
        seam_tokens: of each document that are computed again.
        first_tokens: instead, of one at position 0: what was compiled alone is exact there and has no seam.
        tail_tokens: last tokens of documents that are computed again too, in models of linear layers. Their states
            are those behind the whole interior of a document, so that of none a part is loaded, and each has its seams
            wherever it stands; the request begins right behind the last one.

    Raises:
        ValueError: for spans that overlap, are empty, or leave the prompt.
    """
    check_spans(length, spans)
    if tail_tokens is not None:
        return _of_interiors(length, spans, seam_tokens, tail_tokens)
    loads, seams, position = [], [], 0
    last = length - 1
    for number, (start, tokens) in enumerate(spans):
        seam = min(seam_tokens if start else first_tokens, tokens)
        begin, end = start + seam, min(start + tokens, last)
        if begin >= end:
            continue
        if position < begin:
            seams.append((position, begin))
        loads.append(LoadedRange(begin, end, number, seam))
        position = end
    query = min(spans[-1][0] + spans[-1][1], last) if spans else 0
    if position < query:
        seams.append((position, query))
    if not loads:
        return LinkPlan((), (), 0)
    return LinkPlan(tuple(loads), tuple(seams), query)


def interior(tokens: int, head: int, tail: int) -> Range | None:
    """What its seams leave of a document; None if that isn't more than a token, which no scan of vLLM's is run for."""
    return (head, tokens - tail) if head + tail + 1 < tokens else None


def _of_interiors(length: int, spans: Sequence[Range], head: int, tail: int) -> LinkPlan:
    loads, seams, position = [], [], 0
    for number, (start, tokens) in enumerate(spans):
        kept = interior(tokens, head, tail)
        if kept is None or start + kept[1] == length:
            continue
        seams.append((position, start + kept[0]))
        position = start + kept[1]
        loads.append(LoadedRange(start + kept[0], position, number, kept[0]))
    return LinkPlan(tuple(loads), tuple(seams), position)


def check_spans(length: int, spans: Sequence[Range]) -> None:
    """Raises ValueError unless spans are in order, apart and inside of a prompt of `length` tokens."""
    position = 0
    for start, tokens in spans:
        if start < position or tokens < 1 or start + tokens > length:
            raise ValueError(f"a document at {start} with {tokens} tokens, in a prompt of {length} from {position} on")
        position = start + tokens
