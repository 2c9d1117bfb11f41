"""Plain text as tasks: what is asked for really follows the quoted place, or the document's end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from comb.documents.datasets import Dataset, read_dataset

WORDS = {f"book{number}": [f"b{number}w{place}" for place in range(400)] for number in range(4)}
OPTIONS = {"words": 40, "answer_words": 8, "passages": 30}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [{"id": name, "text": " ".join(words)} for name, words in WORDS.items()]
    path = tmp_path / "texts.jsonl"
    path.write_text("\n".join(map(json.dumps, [*rows, {"id": "short", "text": "too short"}])), encoding="utf-8")
    return path


def read(file: Path, **options: object) -> Dataset:
    return read_dataset("passages", file, **{**OPTIONS, "split": "all", **options})


def test_answers_follow_what_is_quoted(file: Path) -> None:
    examples = read(file)
    kinds = set()
    for example in examples:
        quoted = example.query.split('"')[1].split()
        book = WORDS[f"book{quoted[0][1]}"]
        start = book.index(quoted[0])
        assert book[start : start + 8] == quoted
        [holder] = [document for document in example.documents if " ".join(quoted) in str(document.text)][:1]
        if example.query.startswith("Continue"):
            assert example.answer.split() == book[start + 8 : start + 16]
            assert example.answer in str(holder.text)
        else:
            end = start + len(str(holder.text).split())
            assert str(holder.text).split()[0] == quoted[0]
            assert example.answer.split() == book[end : end + 8]
            assert example.answer not in str(holder.text)
        kinds.add(example.query.split()[0])
        assert 1 <= len(example.documents) <= 3
        assert all(20 <= len(str(document.text).split()) <= 40 for document in example.documents)
    assert kinds == {"Continue", "Write"}
    assert len(examples) == 60
    assert "texts of fewer than 48 words, left out" in str(examples.counts)


def test_sides_share_no_text_and_draws_repeat(file: Path) -> None:
    sides = {side: read(file, split=side, heldout_share=0.25) for side in ("train", "heldout")}
    books = {side: {w.split("w")[0] for e in examples for d in e.documents for w in str(d.text).split()}
             for side, examples in sides.items()}  # fmt: skip
    assert books["train"].isdisjoint(books["heldout"])
    assert sides["train"].examples == read(file, split="train", heldout_share=0.25).examples
    assert sides["train"].examples != read(file, split="train", heldout_share=0.25, seed=1).examples
    assert len(read(file, limit=5)) == 5
    assert {e.query.split()[0] for e in read(file, tasks=["copy"])} == {"Continue"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["sing"]}, "tasks are of copy, continue"),
        ({"words": 20}, "words must be at least 32"),
        ({"words": 4000}, "no text of at least 4008 words"),
    ],
)
def test_what_can_not_be_asked(file: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read(file, **options)
