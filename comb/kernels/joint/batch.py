"""Which tokens of a step read which documents, and the keys of their own requests that they were beside already.

Tokens behind a document read it, those in front don't. Documents lie in a pool turned by their places in themselves, so
it is the query that is turned: back by the place where the document begins.

Shapes: S tokens of the step that read something, N readings of a document by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, compress

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comb.kernels.paged.layout import BlockTable, PagedBatch, TurnedQueries
from comb.kernels.paged.plan import to_device

MOST_READINGS = 4096
"""That are taken at a time: a server sets no memory aside for them."""


@dataclass(frozen=True)
class ReadingRun:
    """Tokens of one request, one behind another, that read documents.

    Attributes:
        token: place of the first in the step's batch. count: how many.
        row: of the request in `OwnKeys.table`. past: how many of its own tokens stand in front of the first.
        skipped: how many of these tokens stand in front of each document, in the documents' order. [documents]
        starts: the place where each document begins. [documents]
        tables: where each lies.
    """

    token: int
    count: int
    row: int
    past: int
    skipped: NDArray[np.int64]
    starts: NDArray[np.int64]
    tables: tuple[BlockTable, ...]

    @property
    def readings(self) -> NDArray[np.int64]:
        """Documents that each token reads. [count]"""
        return np.searchsorted(self.skipped, np.arange(self.count), side="right")

    def cut(self, count: int) -> tuple[ReadingRun, ReadingRun]:
        """The first `count` tokens, and the others."""
        return replace(self, count=count), replace(
            self,
            token=self.token + count,
            count=self.count - count,
            past=self.past + count,
            skipped=np.maximum(self.skipped - count, 0),
        )


@dataclass(frozen=True)
class OwnKeys:
    """Keys of the step's requests themselves, in a server's cache.

    Args:
        table: blocks of each request, in order. [requests, blocks]
        block_size: slots of a block.
        keys: [blocks, block_size, G, D], adjacent channels, any other strides; None where the cache has no such layout.
        read: slots [...] -> keys [..., G, D].
        window: each token sees its last so many keys; None: all.
    """

    table: Tensor
    block_size: int
    keys: Tensor | None
    read: Callable[[Tensor], Tensor]
    window: int | None = None


@dataclass(frozen=True)
class _Arrays:
    """What the device is told."""

    tokens: Tensor
    readers: Tensor
    starts: Tensor
    order: Tensor
    first: Tensor
    rows: Tensor
    places: Tensor


class JointBatch:
    """Runs whose readings are taken together.

    Attributes:
        tokens: places in the step's batch of the tokens that read, run behind run. [S] int32
        rows, places: of each, the row in `OwnKeys.table`, and how many of the request's tokens are in front of it. [S]
        longest: keys of its own that the last token of the longest request sees.
        batch: for paged attention: a row for each document that a run reads, and in it a query for each reading.
        readers: of each reading, which of the S tokens it is. [N] int32
        order, first: readings of token s are ``order[first[s] : first[s + 1]]``. [N], [S + 1] int32
        starts: of each reading, the place where its document begins. [N] int32
    """

    def __init__(self, runs: Sequence[ReadingRun], device: torch.device) -> None:
        self.runs = tuple(runs)
        self.longest = max(run.past + run.count for run in runs)
        counts, token, row, past = (
            np.array(found) for found in zip(*((run.count, run.token, run.row, run.past) for run in runs), strict=True)
        )
        begin = counts.cumsum() - counts
        inside = _inside(counts)
        of = np.repeat(np.arange(len(runs)), [len(run.tables) for run in runs])
        skipped, starts = (np.concatenate([getattr(run, name) for run in runs]) for name in ("skipped", "starts"))
        reading = counts[of] - skipped
        some = reading > 0
        tables = tuple(compress(chain.from_iterable(run.tables for run in runs), some.tolist()))
        reading, first_reader = reading[some], (begin[of] + skipped)[some]
        self.batch = PagedBatch(tuple(reading.tolist()), tables)
        readers = np.repeat(first_reader, reading) + _inside(reading)
        first = np.concatenate([[0], np.bincount(readers, minlength=counts.sum()).cumsum()])
        arrays = (
            np.repeat(token, counts) + inside, readers, np.repeat(starts[some], reading),
            np.argsort(readers, kind="stable"), first, np.repeat(row, counts), np.repeat(past, counts) + inside,
        )  # fmt: skip
        made = _Arrays(*to_device([array.astype(np.int32) for array in arrays], device))
        self.tokens, self.readers, self.starts, self.order = made.tokens, made.readers, made.starts, made.order
        self.first, self.rows, self.places = made.first, made.rows, made.places
        self._turned: TurnedQueries | None = None
        self._tiles: dict[int, Tensor] = {}

    def turned(self, turning: Callable[[Tensor], tuple[Tensor, Tensor]], scale: float) -> TurnedQueries:
        """How each reading's query is turned; made by the first layer, for all of them.

        Args:
            turning: cosine and sine of places [1, N], each [1, N, R].
            scale: of the scores, beside 1 / sqrt(D).
        """
        if self._turned is None:
            cosine, sine = turning(-self.starts[None])
            rows = self.tokens.index_select(0, self.readers)
            self._turned = TurnedQueries(rows, cosine[0].contiguous(), sine[0].contiguous(), scale)
        return self._turned

    def tiles(self, most: int) -> Tensor:
        """The tokens in tiles of at most `most` of one run: first of S, how many, row, tokens in front. [tiles, 4]"""
        if most not in self._tiles:
            made, begin = [], 0
            for run in self.runs:
                at = np.arange(0, run.count, most)
                columns = begin + at, np.minimum(run.count - at, most), np.full_like(at, run.row), run.past + at
                made.append(np.stack(columns, 1))
                begin += run.count
            self._tiles[most] = to_device([np.concatenate(made).astype(np.int32)], self.tokens.device)[0]
        return self._tiles[most]

    @cached_property
    def longest_run(self) -> int:
        """Tokens of the run that has most."""
        return max(run.count for run in self.runs)


def joint_batches(runs: Sequence[ReadingRun], device: torch.device, most: int = MOST_READINGS) -> Iterator[JointBatch]:
    """Batches of at most so many readings each, in the order of the tokens; a token's readings are in one of them."""
    part: list[ReadingRun] = []
    room = most
    for whole in runs:
        rest = whole
        while rest.count:
            readings = rest.readings.cumsum()
            taken = int(np.searchsorted(readings, room, side="right"))
            if not taken and part:
                yield JointBatch(part, device)
                part, room = [], most
                continue
            taken = max(taken, 1)
            room -= int(readings[taken - 1])
            now, rest = rest.cut(taken)
            part.append(now)
    if part:
        yield JointBatch(part, device)


def _inside(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """0 .. count - 1 of each, one behind another."""
    return np.arange(counts.sum()) - np.repeat(counts.cumsum() - counts, counts)
