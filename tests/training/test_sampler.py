"""Batches: within the budget, everything once per epoch, the same number for every rank, like lengths together."""

from __future__ import annotations

import random

import pytest

from comb import Prompt
from comb_training.config import TrainConfig
from comb_training.data.batches import TrainingExample
from comb_training.trainer.sampler import BatchSampler, row_length


def budget(rows: int, documents: int | None = None, queries: int | None = None, seed: int = 0) -> TrainConfig:
    return TrainConfig(batch_size=rows, batch_document_tokens=documents, batch_query_tokens=queries, seed=seed)


def example(index: int, documents: tuple[tuple[int, ...], ...], query: int, target: int = 2) -> TrainingExample:
    return TrainingExample(Prompt((), documents, (1,) * query), (2,) * target, str(index))


def examples(count: int = 60, *, shared: int = 5, seed: int = 0) -> list[TrainingExample]:
    """`shared` sets of documents of very different lengths, queries of 1 to 40 tokens."""
    rng = random.Random(seed)
    sets = [tuple((3 + n,) * rng.randint(1, 30) for _ in range(1 + n % 3)) for n in range(shared)]
    return [example(index, sets[index % shared], rng.randint(1, 40)) for index in range(count)]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


def document_tokens(rows: list[TrainingExample]) -> int:
    return sum(map(len, {segment for row in rows for segment in row.segments}))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize(
    "config", [budget(7, seed=1), budget(8, 60, 120, 1), budget(100, None, 200, 1), budget(100, 91, None, 1)]
)
def test_every_example_once_within_the_budget(ranks: int, accumulation: int, config: TrainConfig) -> None:
    rows = examples()
    sampler = BatchSampler(rows, config, ranks=ranks, accumulation=accumulation)
    assert len(sampler) % (ranks * accumulation) == 0
    for epoch in range(5):
        batches = sampler.batches(epoch)
        assert len(batches) == len(sampler)
        assert sorted(flat(batches)) == list(range(60))
        for batch in batches:
            chosen = [rows[index] for index in batch]
            assert 1 <= len(chosen) <= config.batch_size
            assert config.batch_document_tokens is None or document_tokens(chosen) <= config.batch_document_tokens
            queries = len(chosen) * max(map(row_length, chosen))
            assert config.batch_query_tokens is None or queries <= config.batch_query_tokens


def test_the_order_is_a_function_of_seed_and_epoch() -> None:
    rows = examples()
    for limits in ((6,), (6, 100, 200)):
        sampler = BatchSampler(rows, budget(*limits, seed=1))
        first = sampler.batches(0)
        assert first == sampler.batches(0) == BatchSampler(rows, budget(*limits, seed=1)).batches(0)
        assert first != BatchSampler(rows, budget(*limits, seed=2)).batches(0)
        assert sampler.batches(1) != first
        assert sampler.batches(0) == first


def test_questions_over_the_same_documents_stand_together() -> None:
    rows = [example(index, ((3 + index % 5,),), 2) for index in range(80)]
    order = flat(BatchSampler(rows, budget(80, seed=1)).batches(0))
    documents = [rows[index].segments for index in order]
    blocks = [documents[start : start + 8] for start in range(0, 80, 8)]
    assert all(len(set(block)) == 1 for block in blocks)
    assert len(set(documents[:24])) > 1  # sixteen questions of a group come in two blocks, apart


def padding(batches: list[list[int]], rows: list[TrainingExample]) -> float:
    lengths = [[row_length(rows[index]) for index in batch] for batch in batches]
    return 1 - sum(map(sum, lengths)) / sum(len(batch) * max(batch) for batch in lengths)


def test_buckets_leave_little_padding() -> None:
    rows = examples(400, shared=400)
    bucketed = padding(BatchSampler(rows, budget(16, None, 16 * 42)).batches(0), rows)
    plain = padding(BatchSampler(rows, budget(16)).batches(0), rows)
    assert plain > 0.3  # control: otherwise there would be nothing to gain
    assert bucketed < 0.25 * plain


def test_ranks_work_on_batches_of_like_length_at_the_same_time() -> None:
    rows = examples(400, shared=400)

    def spread(batches: list[list[int]]) -> float:
        cost = [max(row_length(rows[index]) for index in batch) for batch in batches]
        return sum(abs(a - b) for a, b in zip(cost[::2], cost[1::2], strict=True)) / len(cost)

    batches = BatchSampler(rows, budget(16, None, 16 * 42), ranks=2).batches(0)
    shuffled = random.Random(0).sample(batches, len(batches))
    assert spread(batches) < 0.4 * spread(shuffled)


def test_batches_too_small_to_halve_are_left_out_by_chance() -> None:
    rows = examples(11)
    sampler = BatchSampler(rows, budget(1), ranks=2, accumulation=2)
    assert (len(sampler), sampler.left_out, sampler.steps_per_epoch) == (8, 3, 2)
    missing = [frozenset(range(11)) - frozenset(flat(sampler.batches(epoch))) for epoch in range(6)]
    assert all(len(left) == 3 for left in missing)
    assert len(set(missing)) > 1
    assert BatchSampler(rows, budget(2), ranks=2, accumulation=2).left_out == 0


def test_what_does_not_fit_is_said() -> None:
    with pytest.raises(ValueError, match=r"example 0 alone has 9 document tokens, more than train.batch_document_to"):
        BatchSampler([example(0, ((1,) * 4, (2,) * 5), 1)], budget(4, 8))
    with pytest.raises(ValueError, match=r"example 0 alone has 7 query tokens"):
        BatchSampler([example(0, ((1,) * 4,), 5)], budget(4, None, 6))
    with pytest.raises(ValueError, match=r"3 examples are too few"):
        BatchSampler(examples(3), budget(4), ranks=2, accumulation=2)
