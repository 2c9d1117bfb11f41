"""Where documents are: in the engine's pool, and in a prompt, of which a plan says what the pool gives.

Positions are those of the prompt, ranges half open.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from comb.files import write_whole
from comb_serving.linking.methods import LinkMethod, Range
from comb_serving.pool.capability import PoolHandle

MANIFEST = "linking.json"


@dataclass(frozen=True)
class LoadedRange:
    """Tokens [start, end) of the prompt that are tokens [offset, ...) of document number `document`."""

    start: int
    end: int
    document: int
    offset: int


@dataclass(frozen=True)
class LinkPlan:
    """What is done for a prompt before its request computes the rest."""

    loads: tuple[LoadedRange, ...]  # what the pool gives, in order
    seams: tuple[Range, ...]  # what is computed: chosen tokens of documents, and what is between and before them
    query: int  # first token that the request computes itself; all in front of it is in `loads` or `seams`

    def behind(self, position: int) -> LinkPlan:
        """What is left to do if the first `position` tokens are there already, from the exact prefix cache."""
        loads = tuple(
            LoadedRange(max(load.start, position), load.end, load.document, load.offset + max(0, position - load.start))
            for load in self.loads
            if load.end > position
        )
        seams = tuple((max(start, position), end) for start, end in self.seams if end > position)
        return LinkPlan(loads, seams, self.query)

    @property
    def loaded_tokens(self) -> int:
        """Tokens in `loads`."""
        return sum(load.end - load.start for load in self.loads)

    def loaded_of(self, documents: int) -> tuple[int, ...]:
        """Of `loaded_tokens`, those of each document."""
        found = [0] * documents
        for load in self.loads:
            found[load.document] += load.end - load.start
        return tuple(found)

    @property
    def seam_tokens(self) -> int:
        """Tokens in `seams`."""
        return sum(end - start for start, end in self.seams)


def plan(length: int, spans: Sequence[Range], recomputed: Sequence[int]) -> LinkPlan:
    """Plans a prompt of `length` tokens whose documents are at `spans`, each ``(start, tokens)``, in order.

    Document tokens at the sorted positions `recomputed` are computed again, and the prompt's last token always, by the
    request itself, as something has to be sampled from.
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


def interior(tokens: int, seams: Range) -> Range | None:
    """What its seams leave of a document; None for a token or less, which no scan of vLLM's is run for."""
    first, last = seams
    return (first, tokens - last) if first + last + 1 < tokens else None


def plan_interiors(length: int, spans: Sequence[Range], widths: Range, *, exact_first: bool = False) -> LinkPlan:
    """`plan` in models of linear layers, where so many tokens at either end of each document are computed.

    Their states are those behind the whole interior of a document, so that of none a part is loaded, and each has its
    seams wherever it stands (but for the prompt's own beginning, with `exact_first`); the request begins right behind.
    """
    loads, seams, position = [], [], 0
    for number, (start, tokens) in enumerate(spans):
        kept = (0, tokens) if exact_first and not number else interior(tokens, widths)
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


@dataclass(frozen=True)
class LinkingLayout:
    """The pool of one rank, and the model that its documents are compiled by."""

    num_blocks: int
    block_size: int  # tokens in each
    bytes_per_token: int  # over all layers
    fingerprint: str  # of the model's weights; part of every document's key
    dtype: str  # of keys and values
    max_document_tokens: int  # longest document that the engine can compile
    vocab_size: int  # ids are below
    front: tuple[int, ...] = ()  # the tokens in front of documents while they are compiled
    given: bool = False  # whether their keys and values are an adapter's, and lie behind the pool's blocks
    state_rows: int = 0  # behind a document's tokens, what it does to the states of linear layers takes as much
    columns: int = 0  # that the convolutions of linear layers look back

    @property
    def nbytes(self) -> int:
        """Of one rank's whole pool."""
        return self.num_blocks * self.block_size * self.bytes_per_token

    def blocks_for(self, tokens: int) -> int:
        """Blocks that a document of so many tokens takes."""
        return -(-(tokens + self.state_rows) // self.block_size)

    @property
    def front_handle(self) -> PoolHandle:
        """Where an adapter's link tokens are in the pool: behind what documents are given."""
        tokens = len(self.front)
        return PoolHandle(tokens, tuple(range(self.num_blocks, self.num_blocks + self.blocks_for(tokens))))

    def seams(self, method: LinkMethod) -> Range:
        """Tokens at either end of documents that a method computes again, never fewer than convolutions look back."""
        return max(method.seam or 0, self.columns), method.seam or 0

    def plan(
        self, method: LinkMethod, length: int, spans: Sequence[Range], chosen: Sequence[int] = (),
        *, exact_first: bool = False,
    ) -> LinkPlan:  # fmt: skip
        """Of a prompt, by `plan` or `plan_interiors`; `chosen` are computed again where the question's look says which.

        Raises ValueError for spans that overlap, are empty, or leave the prompt.
        """
        check_spans(length, spans)
        if method.states:
            return plan_interiors(length, spans, self.seams(method), exact_first=exact_first)
        places = method.recomputed(spans)
        return plan(length, spans, chosen if places is None else places)

    def write(self, folder: Path) -> None:
        """Into an instance's folder, whole or not at all."""
        write_whole(folder / MANIFEST, json.dumps(asdict(self)).encode())

    @classmethod
    def read(cls, folder: Path) -> LinkingLayout:
        """Raises FileNotFoundError while the engine has made no pool."""
        said = json.loads((folder / MANIFEST).read_text())
        return cls(**{**said, "front": tuple(said["front"])})
