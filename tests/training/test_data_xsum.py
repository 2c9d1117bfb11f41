"""XSum: distractors, rows accounted for, errors that name the row."""

from __future__ import annotations

from typing import Any

import pytest

from comb.documents.datasets import read_dataset
from tests.helpers.rows import SHARED, WriteRows, texts

XSUM = SHARED / "restricted_research_only" / "xsum" / "xsum_sample.jsonl"


def article(number: int, **fields: Any) -> dict[str, Any]:
    text = f"Article {number} is about\nnews and more things than eight words say, {number} times."
    return {"document": text, "summary": f"News {number}.", "id": str(number), **fields}


def test_xsum_is_one_article(write_rows: WriteRows) -> None:
    dataset = read_dataset("xsum", write_rows(article(1), article(2, summary=" "), article(3, document="")))
    (example,) = dataset
    assert texts(example) == [article(1)["document"]]
    assert (example.query, example.answer, example.id) == ("Summarise the article in one sentence.", "News 1.", "1")
    assert dataset.counts.dropped == {"no answer": 1, "no documents": 1}


def test_xsum_among_other_articles_of_its_side(write_rows: WriteRows) -> None:
    path = write_rows(*map(article, range(12)), article(3, id="again"))
    seen = []
    for side in ("train", "heldout"):
        dataset = read_dataset("xsum", path, split=side, num_documents=3, heldout_share=0.4)
        seen.append({text for example in dataset for text in texts(example)})
        for example in dataset:
            own = [text for text in texts(example) if str(text).startswith(f"Article {example.answer[5:-1]} ")]
            assert (len(own), len(set(texts(example)))) == (1, 3)
            assert f'"Article {example.answer[5:-1]} is about news and more things"' in example.query
    assert not seen[0] & seen[1]
    dataset = read_dataset("xsum", path, num_documents=3)
    assert list(dataset) == list(read_dataset("xsum", path, num_documents=3))
    assert list(dataset) != list(read_dataset("xsum", path, num_documents=3, seed=1))
    assert len({[str(t).split()[1] for t in texts(e)].index(e.answer[5:-1]) for e in dataset}) == 3
    few = read_dataset("xsum", write_rows(article(1), article(2)), num_documents=3)
    assert few.counts.truncated == {"fewer articles in the file than num_documents": 2}


def test_xsum_never_shows_another_article_with_the_same_opening(write_rows: WriteRows) -> None:
    opening = "Ten words that are the same in each of "
    rows = [article(n, document=opening + f"them {n}") for n in range(3)] + [article(5)]
    for example in read_dataset("xsum", write_rows(*rows), num_documents=4):
        shown = [str(text) for text in texts(example) if str(text).startswith(opening)]
        assert len(shown) == 1
        assert len(example.documents) == 2


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (article(1, document=["x"]), r"rows.jsonl:1: 'document' is a text"),
        ({"document": "d"}, r"rows.jsonl:1: there is no 'summary'"),
    ],
)
def test_malformed_rows(write_rows: WriteRows, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_dataset("xsum", write_rows(row))


def test_real_xsum() -> None:
    if not XSUM.exists():
        pytest.skip(f"the sample {XSUM.name} is not here")
    dataset = read_dataset("xsum", XSUM, num_documents=4)
    assert len(dataset) == 480
    assert {len(set(texts(example))) for example in dataset} == {4}
    assert not dataset.counts.dropped
    assert not dataset.counts.truncated
