"""Tokenised examples and their lengths; batches: what the collator makes of them, and their order."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from comb.documents.datasets import Counts
from comb.documents.document import Document, Example, Prompt, PromptBuilder
from comb.documents.rendering import plain_ids
from comb_training.config import TrainConfig
from comb_training.data.batches import IGNORED, Collator, TrainingExample, fit_documents, join_questions, tokenize
from comb_training.data.token_statistics import HEADS, Spread, TokenStatistics, data_table, statistics_by_set
from comb_training.trainer.sampler import BatchSampler, row_length
from tests.helpers.training import byte_tokenizer


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    tokenizer = byte_tokenizer("<user>")
    tokenizer.chat_template = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    return PromptBuilder(tokenizer)


def example(documents: list[str], query: str = "q?", answer: str = "yes", **kwargs: str) -> Example:
    return Example(tuple(map(Document, documents)), query, answer, **kwargs)


def row(id: object, documents: tuple[tuple[int, ...], ...], query: int = 2, target: int = 2) -> TrainingExample:
    """With as many tokens of query and target."""
    return TrainingExample(Prompt((3,), documents, (1,) * (query - 1)), (2,) * target, str(id))


def test_tokenize_gives_the_prompt_without_documents_and_the_target(builder: PromptBuilder) -> None:
    [tokenized] = tokenize([example(["ab", "c"], "Q: q?")], builder, Counts())
    decode = builder.tokenizer.decode
    assert decode(tokenized.prompt.bare) == "<user>Q: q?"
    assert [decode(segment) for segment in tokenized.segments] == ["ab\n", "c\n"]
    assert decode(tokenized.target) == "yes<end>"
    assert tokenized.references == ("yes",)


def test_tokenize_drops_long_queries_and_what_has_no_documents_and_counts_them(builder: PromptBuilder) -> None:
    counts, rows = Counts(read=3), [example(["a"]), example(["a"], query="q" * 40), example([])]
    kept = tokenize(rows, builder, counts, max_query_tokens=20)
    assert len(kept) == counts.kept == 1
    assert dict(counts.dropped) == {"query and answer of more than 20 tokens": 1, "no documents": 1}


def test_questions_over_the_same_documents_share_a_row(builder: PromptBuilder) -> None:
    plain = replace(builder, prefix="H ", stop='"\n')
    decode = plain.tokenizer.decode
    rows = tokenize(
        [example([text], f'Q{n} "', f"a{n}", id=str(n)) for n, text in enumerate("xxxxyx")], plain, Counts()
    )
    joined = join_questions(rows, 3, plain)
    assert [(row.id, decode(row.segments[0])[0]) for row in joined] == [("0", "x"), ("3", "x"), ("4", "y")]
    assert decode(joined[0].prompt.bare) == 'H Q0 "'
    assert decode(joined[0].target) == 'a0"\n\nQ1 "a1"\n\nQ2 "a2"<end>'  # as a prefix's examples are written
    labels = Collator(0)(joined[:1])["labels"][0]
    assert decode(labels[labels != IGNORED]) == 'a0"a1"a2"<end>'  # the questions between are given
    assert decode(joined[1].target) == 'a3"\n\nQ5 "a5"<end>'  # also where another text stands between
    assert [row.id for row in join_questions(rows, 1, plain)] == ["0", "1", "2", "3", "5", "4"]
    # no longer than a row may be, and no question twice in one
    longest = len(joined[0].prompt.flat) + len(joined[0].target) - 1
    assert [row.id for row in join_questions(rows, 3, plain, longest=longest)] == ["0", "2", "5", "4"]
    again = [replace(row, id=f"set{'@2' * (n // 2)}/{n % 2}") for n, row in enumerate(rows[:4])]
    assert [row.id for row in join_questions(again, 6, plain)] == ["set/0", "set@2/0"]


@pytest.mark.parametrize(
    ("said", "written"), [('a"', 'a"\n\n'), ('a"\n', 'a"\n\n'), ("a\n", "a\n\n"), ("cut", 'cut"\n\n')]
)
def test_an_answer_is_closed_before_the_next_question(builder: PromptBuilder, said: str, written: str) -> None:
    plain = replace(builder, prefix="", stop='"\n')
    rows = tokenize([example(["x"], f"Q{n}", "?") for n in range(2)], plain, Counts())
    own = [replace(row, target=tuple(plain_ids(plain.tokenizer, said))) for row in rows]
    [joined] = join_questions(own, 2, plain)
    assert plain.tokenizer.decode(joined.target) == f"{written}Q1{said}"


def test_documents_are_cut_once_and_counted(builder: PromptBuilder) -> None:
    counts = Counts()
    examples = [example(["short", "long " * 10]), example(["long " * 10])]
    first, second = fit_documents(examples, builder, 12, counts)
    assert first.documents[0] == Document("short")
    assert first.documents[1] == second.documents[0]
    assert builder.tokenizer.decode(second.documents[0].token_ids) == "long long lo"
    assert dict(counts.truncated) == {"document of more than 12 tokens": 1}
    assert fit_documents(examples, builder, None, counts) == examples


def test_collator_counts_the_target_only_and_pads_on_the_right(builder: PromptBuilder) -> None:
    examples = tokenize([example(["a"], "q?", "yes"), example(["b"], "longer?", "no")], builder, Counts())
    batch = Collator(0)(examples)
    for row, item in enumerate(examples):
        length = len(item.prompt.bare) + len(item.target)
        ids, labels = batch["input_ids"][row], batch["labels"][row]
        assert ids[:length].tolist() == [*item.prompt.bare, *item.target]
        assert ids[length:].eq(0).all()
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (len(ids) - length)
        assert labels[labels != IGNORED].tolist() == list(item.target)
        assert labels.ne(IGNORED).nonzero()[0].item() == len(item.prompt.bare)
    assert batch["labels"].ne(IGNORED).sum() == len("yes") + len("no") + 2


def test_collator_shares_equal_documents() -> None:
    documents = ((3, 4), (5,))
    batch = Collator(0)([row("a", documents), row("b", documents[::-1])])
    (first, second), (third, fourth) = batch["documents"]
    assert first is fourth
    assert second is third
    assert (first.tolist(), first.dtype) == ([3, 4], torch.long)


def test_a_target_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="NaN"):
        Collator(0)([row("a", ((5,),), target=0)])


def budget(rows: int, documents: int | None = None, queries: int | None = None, seed: int = 0) -> TrainConfig:
    return TrainConfig(batch_size=rows, batch_document_tokens=documents, batch_query_tokens=queries, seed=seed)


def examples(count: int = 60, *, shared: int = 5, seed: int = 0) -> list[TrainingExample]:
    """`shared` sets of documents of very different lengths, queries of 1 to 40 tokens."""
    rng = random.Random(seed)
    sets = [tuple((3 + n,) * rng.randint(1, 30) for _ in range(1 + n % 3)) for n in range(shared)]
    return [row(index, sets[index % shared], rng.randint(1, 40)) for index in range(count)]


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


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
            documents = sum(map(len, {segment for each in chosen for segment in each.segments}))
            assert config.batch_document_tokens is None or documents <= config.batch_document_tokens
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
    rows = [row(index, ((3 + index % 5,),), 2) for index in range(80)]
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
        BatchSampler([row(0, ((1,) * 4, (2,) * 5), 1)], budget(4, 8))
    with pytest.raises(ValueError, match=r"example 0 alone has 7 query tokens"):
        BatchSampler([row(0, ((1,) * 4,), 5)], budget(4, None, 6))
    with pytest.raises(ValueError, match=r"3 examples are too few"):
        BatchSampler(examples(3), budget(4), ranks=2, accumulation=2)


def of_lengths(id: str, *lengths: int) -> TrainingExample:
    """Documents of these lengths (equal ones are one document), a query of 3 and a target of 2 tokens."""
    return row(id, tuple(tuple(range(n)) for n in lengths), query=3)


def test_documents_count_once_and_prompts_as_often_as_they_are_read() -> None:
    statistics = TokenStatistics.of([of_lengths("a", 10, 4), of_lengths("b", 10)])
    assert (statistics.examples, statistics.different_documents) == (2, 2)
    assert (statistics.document_tokens.total, statistics.document_tokens.min) == (14, 4)
    assert statistics.documents_per_example == Spread(1, 1.5, 1.9, 2, 3)
    assert statistics.query_tokens == Spread(3, 3.0, 3.0, 3, 6)
    assert statistics.target_tokens.total == 4
    assert statistics.prompt_tokens.total == 14 + 3 + 10 + 3
    flat = [len(item.prompt.flat) for item in (of_lengths("a", 10, 4), of_lengths("b", 10))]
    assert statistics.prompt_tokens == Spread.of(flat)


def test_sets_are_told_apart_by_their_ids() -> None:
    examples = [of_lengths("a/x", 10), of_lengths("a@2/x", 10), of_lengths("b/a/x", 4)]
    sets = statistics_by_set(examples)
    assert {name: own.examples for name, own in sets.items()} == {"a": 2, "b": 1}
    table = data_table(examples, by_set=True)
    lines = [list(line) for line in table.lines]
    assert len(table.names) == len(HEADS)
    assert [line[0] for line in lines if line[0]] == ["all", "a", "b"]
    assert ["", "document tokens", "4", "7", "9.4", "10", "14"] in lines
