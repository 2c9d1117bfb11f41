"""Joint attention inside vLLM: which tokens of a step read which document, and where in the prompt both stand.

A request's documents stand between tokens of its own. Those behind a document read it, and are as many places further
back as it has tokens; those in front of it do neither. Documents lie in the pool turned by their places in themselves,
for all requests, so it is a query that is turned: back by the place where the document begins.

Shapes: S tokens of the step that read a document.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from comb.kernels.joint.batch import JointBatch, ReadingRun, joint_batches
from comb.kernels.paged.layout import BlockTable
from comb.kernels.paged.plan import to_device


@dataclass(frozen=True)
class RequestPlaces:
    """Where the documents of a request stand, in order; worked out once for all its steps.

    Attributes:
        behind: tokens of the request's own in front of each. starts: its first token's place in the prompt.
        further: how much further back those stand who read none of them, the first, the first two, ...
    """

    behind: NDArray[np.int64]
    starts: NDArray[np.int64]
    further: NDArray[np.int64]
    tables: tuple[BlockTable, ...]

    @classmethod
    def of(cls, documents: Sequence[tuple[int, Sequence[int]]], behind: Sequence[int], size: int) -> RequestPlaces:
        """Of documents (tokens and blocks of each), one behind another; `behind` as of `Capability.behind_in`."""
        own, tokens = np.array(behind), np.array([count for count, _ in documents])
        tables = tuple(BlockTable([document], size) for document in documents)
        further = np.concatenate([[0], np.cumsum(tokens)])
        return cls(own, own + further[:-1], further, tables)


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

    def run(self) -> ReadingRun | None:
        """The tokens behind a document; None if all stand in front."""
        places = self.places
        assert places is not None
        first = max(0, int(places.behind[0]) - self.past)
        count = self.stop - self.start - first
        if count <= 0:
            return None
        skipped = np.clip(places.behind - self.past - first, 0, count)
        past = self.past + first
        return ReadingRun(self.start + first, count, self.index, past, skipped, places.starts, places.tables)

    def moved(self) -> NDArray[np.int64]:
        """How much further back each token of `run` stands."""
        assert self.places is not None
        at = np.arange(max(self.past, int(self.places.behind[0])), self.past + self.stop - self.start)
        return self.places.further[np.searchsorted(self.places.behind, at, side="right")]


@dataclass(frozen=True)
class StepPlaces:
    """What joint attention has to know of a step, on the model's device.

    Attributes:
        tokens: places in the batch of the tokens that read, row behind row. [S] int64
        moved: how much further back each stands. [S] int64
        batches: what they read.
    """

    tokens: Tensor
    moved: Tensor
    batches: tuple[JointBatch, ...]

    @classmethod
    def of(cls, rows: Sequence[RequestRows], device: torch.device) -> StepPlaces:
        """Of the rows of a step."""
        runs = [run for row in rows if (run := row.run()) is not None]
        if not runs:
            nothing = torch.zeros(0, dtype=torch.long, device=device)
            return cls(nothing, nothing, ())
        tokens = np.concatenate([np.arange(run.token, run.token + run.count) for run in runs])
        moved = np.concatenate([row.moved() for row in rows])
        there = to_device([array.astype(np.int32) for array in (tokens, moved)], device)
        return cls(there[0].long(), there[1].long(), tuple(joint_batches(runs, device)))
