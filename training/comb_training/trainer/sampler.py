"""Which examples make a forward pass, in which order, on which rank: the same number of passes for everybody.

Documents and queries are budgeted apart, because they cost differently: a document token passes the encoder once per
batch however many questions are about it, a query token passes the backbone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from itertools import chain

import torch
from torch import Generator

from comb_training.config import TrainConfig
from comb_training.data.batches import TOGETHER, TrainingExample, by_documents
from comb_training.models import training_method
from comb_training.trainer import distributed

WINDOW = 64
"""Batches whose examples are sorted by length together: much less padding, and still an order that chance decides."""


def row_length(example: TrainingExample) -> int:
    """Tokens of the decoder's row: the prompt without documents, and the answer."""
    return len(example.prompt.bare) + len(example.target)


def check_budgets(examples: Sequence[TrainingExample], config: TrainConfig) -> None:
    """Raises ValueError for an example that alone is over the budgets of a batch."""
    method = training_method(config.method)
    for example in map(method.row, examples):
        for name, limit, tokens in (
            ("document", config.batch_document_tokens, sum(map(len, set(example.segments)))),
            ("query", config.batch_query_tokens, row_length(example)),
        ):
            if limit is not None and tokens > limit:
                raise ValueError(
                    f"example {example.id} alone has {tokens} {name} tokens, more than train.batch_{name}_tokens="
                    f"{limit} of a whole batch: raise that, or shorten the data (data.num_documents, "
                    "data.max_document_tokens, data.max_query_tokens)"
                )


class BatchSampler:
    """Batches of example indices within the run's budgets; every example comes once per epoch (but see `left_out`).

    - Questions over the same documents stand together (at most `TOGETHER` of them), so that documents are encoded once.
    - With token budgets, examples of like length share a batch (sorted within windows of `WINDOW` batches).
    - There is the same number of batches in every epoch, a multiple of `ranks` * `accumulation`: large batches are
      halved until it is. Rank r takes batches r, r + ranks, ... (accelerate does that); those that run at the same time
      are of like length.
    - The order is a function of seed and epoch alone, so that resuming in the middle of an epoch is exact.

    Args:
        ranks, accumulation: this run's unless others are named.

    Raises:
        ValueError: for an example over the budget, or fewer examples than one step needs.
    """

    def __init__(
        self,
        examples: Sequence[TrainingExample],
        config: TrainConfig,
        *,
        ranks: int | None = None,
        accumulation: int | None = None,
    ) -> None:
        check_budgets(examples, config)
        method = training_method(config.method)
        examples = [method.row(example) for example in examples]
        ranks = distributed.world_size() if ranks is None else ranks
        accumulation = config.gradient_accumulation_steps if accumulation is None else accumulation
        if len(examples) < ranks * accumulation:
            raise ValueError(
                f"{len(examples)} examples are too few: each optimizer step takes {ranks} rank(s) x {accumulation} "
                "forward passes with at least one example; lower train.gradient_accumulation_steps"
            )
        self._config = config
        self._buckets = config.batch_document_tokens is not None or config.batch_query_tokens is not None
        self._examples = examples
        self._groups = by_documents(examples)
        self._ranks = ranks
        self._unit = ranks * accumulation
        batches = len(self._pack(self._generator(0)))
        self._length = -(-batches // self._unit) * self._unit
        self.left_out = 0
        """Batches that each epoch leaves out, chosen by chance: only where batches are too small to be halved."""
        if self._length > len(examples):
            self._length -= self._unit
            self.left_out = batches - self._length

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in which every example comes once."""
        return self._length // self._unit

    def __len__(self) -> int:
        return self._length

    def batches(self, epoch: int) -> list[list[int]]:
        """All batches of an epoch, in order."""
        generator = self._generator(epoch)
        packed = self._pack(generator)
        if len(packed) > self._length + self.left_out:
            # chance packed this epoch worse than the first: take the first one's batches, in an order of their own
            packed = self._pack(self._generator(0))
        if len(packed) > self._length:
            kept = torch.randperm(len(packed), generator=generator)[: self._length].sort().values
            packed = [packed[place] for place in kept.tolist()]
        while len(packed) < self._length:  # the costliest is halved, in place
            place = max(range(len(packed)), key=lambda place: (len(packed[place]) > 1, self._cost(packed[place])))
            batch = packed[place]
            packed[place : place + 1] = [batch[: len(batch) // 2], batch[len(batch) // 2 :]]
        if not self._buckets:
            return packed
        # what the ranks do at the same time costs alike; which rank gets what, and when, is chance
        packed.sort(key=self._cost)
        rounds = [packed[start : start + self._ranks] for start in range(0, len(packed), self._ranks)]
        return [
            rounds[place][rank]
            for place in torch.randperm(len(rounds), generator=generator).tolist()
            for rank in torch.randperm(self._ranks, generator=generator).tolist()
        ]

    def _generator(self, epoch: int) -> Generator:
        return torch.Generator().manual_seed(self._config.seed * 1_000_003 + epoch)

    def _pack(self, generator: Generator) -> list[list[int]]:
        """The examples in batches within the budget, as few as come of themselves."""
        blocks = []
        for group in self._groups:
            order = [group[place] for place in torch.randperm(len(group), generator=generator).tolist()]
            blocks += [order[start : start + TOGETHER] for start in range(0, len(order), TOGETHER)]
        blocks = [blocks[place] for place in torch.randperm(len(blocks), generator=generator).tolist()]
        if self._buckets:
            size = max(1, WINDOW * self._config.batch_size // TOGETHER)
            windows = [blocks[start : start + size] for start in range(0, len(blocks), size)]
            blocks = [block for window in windows for block in sorted(window, key=self._longest)]
        most = self._config.batch_size
        most_document_tokens = self._config.batch_document_tokens or sys.maxsize
        most_query_tokens = self._config.batch_query_tokens or sys.maxsize
        batches: list[list[int]] = [[]]
        documents: set[tuple[int, ...]] = set()  # of the last batch
        longest = 0
        for index in chain.from_iterable(blocks):
            own = set(self._examples[index].segments)
            rows, together = len(batches[-1]) + 1, documents | own
            longest = max(longest, row_length(self._examples[index]))
            over = sum(map(len, together)) > most_document_tokens or rows * longest > most_query_tokens
            if batches[-1] and (rows > most or over):
                batches.append([])
                together, longest = own, row_length(self._examples[index])
            batches[-1].append(index)
            documents = together
        return batches

    def _longest(self, block: Sequence[int]) -> tuple[int, int]:
        examples = [self._examples[index] for index in block]
        return max(map(row_length, examples)), sum(map(len, examples[0].segments))

    def _cost(self, batch: Sequence[int]) -> int:
        examples = [self._examples[index] for index in batch]
        documents = {segment for example in examples for segment in example.segments}
        return sum(map(len, documents)) + len(batch) * max(map(row_length, examples))
