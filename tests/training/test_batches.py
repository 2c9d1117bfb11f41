"""Tokenised examples, the collator and the order of the data."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from comb.documents.datasets import Counts
from comb.documents.document import Document, Example, Prompt, PromptBuilder
from comb.documents.rendering import plain_ids
from comb_training.data.batches import IGNORED, Collator, TrainingExample, fit_documents, join_questions, tokenize
from tests.helpers.training import byte_tokenizer


@pytest.fixture(scope="module")
def builder() -> PromptBuilder:
    tokenizer = byte_tokenizer("<user>")
    tokenizer.chat_template = "{% for message in messages %}<user>{{ message['content'] }}{% endfor %}"
    return PromptBuilder(tokenizer)


def example(documents: list[str], query: str = "q?", answer: str = "yes", **kwargs: str) -> Example:
    return Example(tuple(map(Document, documents)), query, answer, **kwargs)


def training_example(documents: list[list[int]], name: str) -> TrainingExample:
    return TrainingExample(Prompt((2,), tuple(map(tuple, documents)), (5, 6)), (7, 1), name)


def test_tokenize_gives_the_prompt_without_documents_and_the_target(builder: PromptBuilder) -> None:
    [tokenized] = tokenize([example(["ab", "c"], "Q: q?")], builder, Counts())
    decode = builder.tokenizer.decode
    assert decode(tokenized.prompt.query) == "<user>Q: q?"
    assert [decode(segment) for segment in tokenized.segments] == ["ab\n", "c\n"]
    assert decode(tokenized.target) == "yes<end>"
    assert tokenized.references == ("yes",)


def test_tokenize_drops_long_queries_and_what_has_no_documents_and_counts_them(builder: PromptBuilder) -> None:
    counts, rows = Counts(read=3), [example(["a"]), example(["a"], query="q" * 40), example([])]
    kept = tokenize(rows, builder, counts, max_query_tokens=20)
    assert len(kept) == counts.kept == 1
    assert dict(counts.dropped) == {"query and answer of more than 20 tokens": 1, "no documents": 1}


def test_questions_over_the_same_documents_share_a_row(builder: PromptBuilder) -> None:
    plain = replace(builder, head="H ", stop='"\n')
    decode = plain.tokenizer.decode
    rows = tokenize(
        [example([text], f'Q{n} "', f"a{n}", id=str(n)) for n, text in enumerate("xxxxyx")], plain, Counts()
    )
    joined = join_questions(rows, 3, plain)
    assert [(row.id, decode(row.segments[0])) for row in joined] == [
        ("0", "x\n"),
        ("3", "x\n"),
        ("4", "y\n"),
        ("5", "x\n"),
    ]
    assert decode(joined[0].prompt.query) == 'H Q0 "'
    assert decode(joined[0].target) == 'a0"\n\nQ1 "a1"\n\nQ2 "a2"<end>'  # as a head's examples are written
    labels = Collator(0)(joined[:1])["labels"][0]
    assert decode(labels[labels != IGNORED]) == 'a0"a1"a2"<end>'  # the questions between are given
    assert join_questions(rows, 1, plain) == rows


@pytest.mark.parametrize(
    ("said", "written"), [('a"', 'a"\n\n'), ('a"\n', 'a"\n\n'), ("a\n", "a\n\n"), ("cut", 'cut"\n\n')]
)
def test_an_answer_is_closed_before_the_next_question(builder: PromptBuilder, said: str, written: str) -> None:
    plain = replace(builder, head="", stop='"\n')
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
        length = len(item.prompt.query) + len(item.target)
        ids, labels = batch["input_ids"][row], batch["labels"][row]
        assert ids[:length].tolist() == [*item.prompt.query, *item.target]
        assert ids[length:].eq(0).all()
        assert batch["attention_mask"][row].tolist() == [1] * length + [0] * (len(ids) - length)
        assert labels[labels != IGNORED].tolist() == list(item.target)
        assert labels.ne(IGNORED).nonzero()[0].item() == len(item.prompt.query)
    assert batch["labels"].ne(IGNORED).sum() == len("yes") + len("no") + 2


def test_collator_shares_equal_documents() -> None:
    batch = Collator(0)([training_example([[3, 4], [5]], "a"), training_example([[5], [3, 4]], "b")])
    (first, second), (third, fourth) = batch["documents"]
    assert first is fourth
    assert second is third
    assert (first.tolist(), first.dtype) == ([3, 4], torch.long)


def test_a_target_of_nothing_is_refused() -> None:
    item = training_example([[5]], "a")
    with pytest.raises(ValueError, match="NaN"):
        Collator(0)([replace(item, target=())])
