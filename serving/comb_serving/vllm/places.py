"""Joint attention inside vLLM: which tokens of a step read which document, and where in the prompt both stand.

A request's documents stand between tokens of its own. Those behind a document read it, and are as many places further
back as it has tokens; those in front of it do neither. Documents lie in the pool turned by their places in themselves,
for all requests, so it is a query that is turned: back by the place where the document begins.

Shapes: R rows, T tokens of each; S tokens of the step that read a document, N readings of a document by a token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from comb.kernels.paged.layout import BlockTable, PagedBatch
from comb.waits import on_device


@dataclass(frozen=True)
class PlacedDocument:
    """One document of a request.

    Attributes:
        behind: tokens of the request's own in front of it. start: its first token's place in the prompt.
    """

    behind: int
    start: int
    table: BlockTable


@dataclass(frozen=True)
class RequestRows:
    """One request's tokens in this step's batch, ``start .. stop - 1``, and the blocks of its documents.

    Attributes:
        index: the request's place among those of the batch. past: its tokens that were computed in earlier steps.
        documents: one by one, where they have places.
    """

    start: int
    stop: int
    table: BlockTable
    index: int = 0
    past: int = 0
    documents: tuple[PlacedDocument, ...] = ()


def placed(documents: Sequence[tuple[int, Sequence[int]]], behind: Sequence[int], size: int) -> list[PlacedDocument]:
    """Documents (tokens and blocks of each), one behind another. Raises ValueError if places don't fit them."""
    if len(behind) != len(documents) or list(behind) != sorted(behind):
        raise ValueError(f"{len(documents)} documents have no places: {list(behind)}")
    found, before = [], 0
    for own, (tokens, blocks) in zip(behind, documents, strict=True):
        found.append(PlacedDocument(own, own + before, BlockTable([(tokens, blocks)], size)))
        before += tokens
    return found


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


@dataclass(frozen=True)
class StepPlaces:
    """What joint attention has to know of a step, on the model's device.

    Attributes:
        tokens: places in the batch of the tokens that read, row behind row. [S]
        moved: how much further back each stands. [S]
        alike: the same tokens, by rows.
        readers: of each reading, which of `tokens` reads. [N]
        starts: and the place where the document begins. [N]
        batch: the readings as attention takes them, a row for each document that a request reads.
    """

    tokens: Tensor
    moved: Tensor
    alike: list[AlikeRows]
    readers: Tensor
    starts: Tensor
    batch: PagedBatch
    _kept: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def keep(self, key: Any, make: Callable[[], Any]) -> Any:
        """``make()``, once per `key`: what all layers need."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]

    @classmethod
    def of(cls, rows: Sequence[RequestRows], device: torch.device) -> StepPlaces:
        """Of the rows of a step."""
        tokens, moved, readers, starts = [], [], [], []
        counts, tables = [], []
        by_count: dict[int, list[tuple[int, int, int]]] = {}
        total = 0
        for row in rows:
            at = np.arange(row.past, row.past + row.stop - row.start)
            first = int(np.searchsorted(at, row.documents[0].behind)) if row.documents else len(at)
            count = len(at) - first
            if not count:  # all of them stand in front
                continue
            tokens.append(np.arange(row.start + first, row.stop))
            shift = np.zeros(count, dtype=np.int64)
            for document in row.documents:
                here = np.flatnonzero(at[first:] >= document.behind)
                if len(here):
                    shift[here] += document.table.num_tokens
                    readers.append(total + here)
                    starts.append(np.full(len(here), document.start))
                    counts.append(len(here))
                    tables.append(document.table)
            moved.append(shift)
            by_count.setdefault(count, []).append((row.index, total, row.past + first))
            total += count

        def there(parts: Sequence[Any]) -> Tensor:
            joined = np.concatenate(parts) if parts else np.zeros(0)
            return on_device(torch.from_numpy(joined.astype(np.int64)), device)

        alike = []
        for count, each in by_count.items():
            index, begin, past = (np.array(column) for column in zip(*each, strict=True))
            steps = np.arange(count)
            parts = index, begin[:, None] + steps, past[:, None] + steps
            numbers, tokens_of, places = (on_device(torch.from_numpy(part), device) for part in parts)
            alike.append(AlikeRows(numbers, tokens_of, places, int(past.max()) + count))
        batch = PagedBatch(tuple(counts), tuple(tables))
        return cls(there(tokens), there(moved), alike, there(readers), there(starts), batch)
