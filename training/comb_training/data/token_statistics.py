"""How long the examples of a run are, in tokens: overall, and for a mixture set by set."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from comb.evaluation.table import FittedTable
from comb_training.data.batches import TrainingExample


@dataclass(frozen=True)
class Spread:
    """How values lie: the least, half and nine tenths of them are not over, the most; and their sum."""

    min: int
    median: float
    p90: float
    max: int
    total: int

    @classmethod
    def of(cls, values: Iterable[int]) -> Spread:
        array = np.fromiter(values, dtype=np.int64)
        median, p90 = np.percentile(array, [50, 90])
        return cls(int(array.min()), round(float(median), 1), round(float(p90), 1), int(array.max()), int(array.sum()))


@dataclass(frozen=True)
class TokenStatistics:
    """Examples, different documents, and lengths: documents count once, the other lengths once per example."""

    examples: int
    different_documents: int
    documents_per_example: Spread
    document_tokens: Spread
    query_tokens: Spread
    target_tokens: Spread
    prompt_tokens: Spread

    @classmethod
    def of(cls, examples: Sequence[TrainingExample]) -> TokenStatistics:
        different: set[Sequence[int]] = set()
        rows = np.empty((4, len(examples)), dtype=np.int64)
        for index, example in enumerate(examples):
            different.update(example.segments)
            query = len(example.prompt.bare)
            tokens = query + sum(map(len, example.segments))
            rows[:, index] = len(example.segments), query, len(example.target), tokens
        documents, queries, targets, prompts = map(Spread.of, rows)
        lengths = Spread.of(map(len, different))
        return cls(len(examples), len(different), documents, lengths, queries, targets, prompts)


def statistics_by_set(examples: Sequence[TrainingExample]) -> dict[str, TokenStatistics]:
    """The statistics of each set of a mixture, by the name that ids begin with (``name/id``, again ``name@2/id``)."""
    sets: dict[str, list[TrainingExample]] = {}
    for example in examples:
        sets.setdefault(str(example.id).partition("/")[0].partition("@")[0], []).append(example)
    return {name: TokenStatistics.of(own) for name, own in sets.items()}


HEADS = ("set", "", "min", "median", "p90", "max", "sum")
_LENGTHS = {
    "per example": "documents_per_example",
    "document tokens": "document_tokens",
    "query tokens": "query_tokens",
    "target tokens": "target_tokens",
    "prompt tokens": "prompt_tokens",
}


def data_table(examples: Sequence[TrainingExample], *, by_set: bool) -> FittedTable:
    """All examples, and then each set of a mixture. Its documents are the different ones."""
    lines = []
    for name, own in {"all": TokenStatistics.of(examples), **(statistics_by_set(examples) if by_set else {})}.items():
        lines.append([name, "examples", "", "", "", "", f"{own.examples:,}"])
        lines.append(["", "documents", "", "", "", "", f"{own.different_documents:,}"])
        for what, key in _LENGTHS.items():
            spread: Spread = getattr(own, key)
            values = (spread.min, spread.median, spread.p90, spread.max, spread.total)
            lines.append(["", what, *(f"{int(v):,}" if v == int(v) else f"{v:,.1f}" for v in values)])
    return FittedTable(HEADS, lines, left=HEADS[:2])
