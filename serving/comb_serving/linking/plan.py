"""Which tokens of a prompt come from the pool, which are computed at the seams, and where the request itself begins.

Positions are those of the prompt, ranges half open.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

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
    seams: what is computed before the query: chosen tokens of documents, and fresh tokens between and before them.
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


def plan(length: int, spans: Sequence[Range], recomputed: Sequence[int]) -> LinkPlan:
    """Plans a prompt of `length` tokens whose documents are at `spans`, each ``(start, tokens)``, in order.

    The last token of the prompt is always computed by the request itself, as something has to be sampled from.

    Args:
        spans: as `check_spans` lets them pass.
        recomputed: sorted positions of document tokens that are computed again.
    """
    loads, seams, position, last = [], [], 0, length - 1
    for number, (start, tokens) in enumerate(spans):
        end = min(start + tokens, last)
        chosen = recomputed[bisect_left(recomputed, start) : bisect_left(recomputed, end)]
        for begin, behind in pairwise([start - 1, *chosen, end]):  # what lies between two of them is loaded
            if begin + 1 < behind:
                if position <= begin:
                    seams.append((position, begin + 1))
                loads.append(LoadedRange(begin + 1, behind, number, begin + 1 - start))
                position = behind
    query = min(spans[-1][0] + spans[-1][1], last) if spans else 0
    if position < query:
        seams.append((position, query))
    return LinkPlan(tuple(loads), tuple(seams), query) if loads else LinkPlan((), (), 0)


def interior(tokens: int, head: int, tail: int) -> Range | None:
    """What its seams leave of a document; None if that isn't more than a token, which no scan of vLLM's is run for."""
    return (head, tokens - tail) if head + tail + 1 < tokens else None


def plan_interiors(length: int, spans: Sequence[Range], head: int, tail: int, *, exact_first: bool = False) -> LinkPlan:
    """`plan` in models of linear layers, where `head` and `tail` tokens at either end of each document are computed.

    Their states are those behind the whole interior of a document, so that of none a part is loaded, and each has its
    seams wherever it stands; the request begins right behind the last one.

    Args:
        exact_first: whether the first one is the prompt's own beginning, which has none.
    """
    loads, seams, position = [], [], 0
    for number, (start, tokens) in enumerate(spans):
        kept = (0, tokens) if exact_first and not number else interior(tokens, head, tail)
        if kept is None or start + kept[1] == length:
            continue
        if position < start + kept[0]:
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
