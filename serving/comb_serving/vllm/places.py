"""Joint attention inside vLLM: which tokens of a step read which document, and where in the prompt both stand.

A request's documents stand between tokens of its own. Those behind a document read it, and are as many places further
back as it has tokens; those in front of it do neither. Documents lie in the pool turned by their places in themselves,
for all requests, so it is a query that is turned: back by the place where the document begins.

Shapes: R rows, T tokens of each; S tokens of the step that read a document, N readings of a document by a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comb.kernels.paged.layout import BlockTable, PagedBatch
from comb.waits import on_device

MOST_READINGS = 4096
"""Of documents by tokens that attention takes at a time: vLLM sets no memory aside for them."""


@dataclass(frozen=True)
class RequestPlaces:
    """Where the documents of a request stand, in order; worked out once for all its steps.

    Attributes:
        behind: tokens of the request's own in front of each. starts: its first token's place in the prompt.
        tokens: how many it has.
    """

    behind: NDArray[np.int64]
    starts: NDArray[np.int64]
    tokens: NDArray[np.int64]
    tables: tuple[BlockTable, ...]

    @classmethod
    def of(cls, documents: Sequence[tuple[int, Sequence[int]]], behind: Sequence[int], size: int) -> RequestPlaces:
        """Of documents (tokens and blocks of each), one behind another; `behind` as of `Capability.behind_in`."""
        own, tokens = np.array(behind), np.array([count for count, _ in documents])
        tables = tuple(BlockTable([document], size) for document in documents)
        return cls(own, own + np.cumsum(tokens) - tokens, tokens, tables)


@dataclass(frozen=True)
class RequestRows:
    """One request's tokens in this step's batch, ``start .. stop - 1``, and the blocks of its documents.

    Attributes:
        index: the request's place among those of the batch. past: its tokens that were computed in earlier steps.
        places: of its documents, where they have some.
    """

    start: int
    stop: int
    table: BlockTable
    index: int = 0
    past: int = 0
    places: RequestPlaces | None = None


@dataclass(frozen=True)
class AlikeRows:
    """Rows of which as many tokens read, for what looks at a request's own tokens.

    Attributes:
        index: places of their requests in the batch. [R]
        tokens: places of their tokens among all that read. [R, T]
        at: how many tokens of their requests stand in front of them. [R, T]
        longest: tokens that the longest request has with these.
    """

    index: Tensor
    tokens: Tensor
    at: Tensor
    longest: int

    @property
    def count(self) -> int:
        """T"""
        return self.tokens.shape[1]

    def part(self, row: int, rows: int, token: int, tokens: int) -> AlikeRows:
        """Rows ``row .. rows - 1`` and of these the tokens ``token .. tokens - 1``."""
        here = slice(row, rows), slice(token, tokens)
        return AlikeRows(self.index[here[0]], self.tokens[here], self.at[here], self.longest)


@dataclass
class Readings:
    """Some of a step's readings, as many as attention takes at a time.

    Attributes:
        readers: of each reading, which of the step's reading tokens it is of. [N]
        starts: and the place where the document begins. [N]
        batch: a row for each document that a request reads.
        turn: what turns queries back by `starts`; the same for all layers, set by the first.
    """

    readers: Tensor
    starts: Tensor
    batch: PagedBatch
    turn: tuple[Tensor, Tensor] | None = None


@dataclass(frozen=True)
class StepPlaces:
    """What joint attention has to know of a step, on the model's device.

    Attributes:
        tokens: places in the batch of the tokens that read, row behind row. [S]
        moved: how much further back each stands. [S]
        alike: the same tokens, by rows.
        readings: of documents by these tokens.
    """

    tokens: Tensor
    moved: Tensor
    alike: list[AlikeRows]
    readings: list[Readings]

    @classmethod
    def of(cls, rows: Sequence[RequestRows], device: torch.device, most: int = MOST_READINGS) -> StepPlaces:
        """Of the rows of a step, with at most so many readings at a time."""

        def there(parts: Sequence[NDArray[np.int64]]) -> Tensor:
            joined = np.concatenate(parts) if parts else np.zeros(0, dtype=np.int64)
            return on_device(torch.from_numpy(joined), device)

        tokens, moved, readings, gathered = [], [], [], _Gathered(most)
        by_count: dict[int, list[tuple[int, int, int]]] = {}
        total = 0
        for row in rows:
            places = row.places
            assert places is not None
            first = max(0, int(places.behind[0]) - row.past)
            count = row.stop - row.start - first
            if count <= 0:  # all of them stand in front
                continue
            at = np.arange(row.past + first, row.past + first + count)
            # of each document, how many of these tokens are in front of it
            skipped = np.searchsorted(at, places.behind)
            tokens.append(np.arange(row.start + first, row.stop))
            moved.append(((at[:, None] >= places.behind) * places.tokens).sum(1))
            for start, skip, table in zip(places.starts.tolist(), skipped.tolist(), places.tables, strict=True):
                while skip < count:
                    some = min(count - skip, gathered.room)
                    gathered.add(total + skip, some, start, table)
                    skip += some
                    if not gathered.room:
                        readings.append(gathered.readings(device))
                        gathered = _Gathered(most)
            by_count.setdefault(count, []).append((row.index, total, row.past + first))
            total += count
        if gathered.counts:
            readings.append(gathered.readings(device))
        alike = []
        for count, each in by_count.items():
            index, begin, past = (np.array(column) for column in zip(*each, strict=True))
            steps = np.arange(count)
            parts = index, begin[:, None] + steps, past[:, None] + steps
            numbers, tokens_of, at_ = (on_device(torch.from_numpy(part), device) for part in parts)
            alike.append(AlikeRows(numbers, tokens_of, at_, int(past.max()) + count))
        return cls(there(tokens), there(moved), alike, readings)


@dataclass
class _Gathered:
    """Readings on their way to one batch: of each run of tokens its first, how many, and what they read."""

    room: int
    firsts: list[int] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)

    def add(self, first: int, count: int, start: int, table: BlockTable) -> None:
        self.firsts.append(first)
        self.counts.append(count)
        self.starts.append(start)
        self.tables.append(table)
        self.room -= count

    def readings(self, device: torch.device) -> Readings:
        counts = np.array(self.counts)
        inside = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        readers, starts = np.repeat(self.firsts, counts) + inside, np.repeat(self.starts, counts)
        there, where = (on_device(torch.from_numpy(part), device) for part in (readers, starts))
        return Readings(there, where, PagedBatch(tuple(self.counts), tuple(self.tables)))
