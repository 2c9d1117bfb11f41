"""Lengths in tokens: of all examples, and of each set of a mixture."""

from __future__ import annotations

import pytest

from comb.documents.document import Prompt
from comb_training.data.batches import TrainingExample
from comb_training.data.token_statistics import HEADS, Spread, TokenStatistics, data_table, statistics_by_set


def example(id: str, *lengths: int) -> TrainingExample:
    """Documents of these lengths (equal ones are one document), a query of 3 and a target of 2 tokens."""
    return TrainingExample(Prompt((1,), tuple(tuple(range(n)) for n in lengths), (2, 3)), (4, 5), id)


def test_a_spread_has_its_order_statistics() -> None:
    assert Spread.of(range(1, 12)) == Spread(min=1, median=6.0, p90=10.0, max=11, total=66)
    assert Spread.of([7]) == Spread(7, 7.0, 7.0, 7, 7)
    assert Spread.of([]) == Spread(0, 0.0, 0.0, 0, 0)
    assert Spread.of([1, 1, 1, 1, 100]).median == 1.0


def test_documents_count_once_and_prompts_as_often_as_they_are_read() -> None:
    statistics = TokenStatistics.of([example("a", 10, 4), example("b", 10)])
    assert (statistics.examples, statistics.different_documents) == (2, 2)
    assert (statistics.document_tokens.total, statistics.document_tokens.min) == (14, 4)
    assert statistics.documents_per_example == Spread(1, 1.5, 1.9, 2, 3)
    assert statistics.query_tokens == Spread(3, 3.0, 3.0, 3, 6)
    assert statistics.target_tokens.total == 4
    assert statistics.prompt_tokens.total == 14 + 3 + 10 + 3
    flat = [len(item.prompt.flat) for item in (example("a", 10, 4), example("b", 10))]
    assert statistics.prompt_tokens == Spread.of(flat)


def test_no_example_is_an_error() -> None:
    with pytest.raises(ValueError, match="no example left"):
        TokenStatistics.of([])


def test_sets_are_told_apart_by_their_ids() -> None:
    examples = [example("a/x", 10), example("a@2/x", 10), example("b/a/x", 4)]
    sets = statistics_by_set(examples)
    assert {name: own.examples for name, own in sets.items()} == {"a": 2, "b": 1}
    table = data_table(TokenStatistics.of(examples), sets)
    lines = [list(line) for line in table.lines]
    assert len(table.names) == len(HEADS)
    assert [line[0] for line in lines if line[0]] == ["all", "a", "b"]
    assert ["", "document tokens", "4", "7", "9.4", "10", "14"] in lines
