"""XSum and 2WikiMultihopQA: schemas, distractors, rows accounted for, errors that name the row."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import read_dataset
from comb.documents.document import Example

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data"
XSUM = SHARED / "restricted_research_only" / "xsum" / "xsum_sample.jsonl"
HOTPOT = SHARED / "hotpotqa" / "hotpot_dev_fullwiki_gold_in_context.json"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def rows(*items: Any) -> Path:
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, items)))
        return path

    return rows


def article(number: int, **fields: Any) -> dict[str, Any]:
    text = f"Article {number} is about\nnews and more things than eight words say, {number} times."
    return {"document": text, "summary": f"News {number}.", "id": str(number), **fields}


def hops(**fields: Any) -> dict[str, Any]:
    context = [["T", ["One.", " Two."]], ["U", ["Three."]]]
    row = {"_id": "7", "type": "comparison", "question": "q?", "answer": "x", "evidences": [], "context": context}
    return {**row, **fields}


def texts(example: Example) -> list[str | None]:
    return [document.text for document in example.documents]


def test_xsum_is_one_article(write: Write) -> None:
    dataset = read_dataset("xsum", write(article(1), article(2, summary=" "), article(3, document="")))
    (example,) = dataset
    assert texts(example) == [article(1)["document"]]
    assert (example.query, example.answer, example.id) == ("Summarise the article in one sentence.", "News 1.", "1")
    assert dataset.counts.dropped == {"no answer": 1, "no documents": 1}


def test_xsum_among_other_articles_of_its_side(write: Write) -> None:
    path = write(*map(article, range(12)), article(3, id="again"))
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
    few = read_dataset("xsum", write(article(1), article(2)), num_documents=3)
    assert few.counts.truncated == {"fewer articles in the file than num_documents": 2}


def test_xsum_never_shows_another_article_with_the_same_opening(write: Write) -> None:
    opening = "Ten words that are the same in each of "
    rows = [article(n, document=opening + f"them {n}") for n in range(3)] + [article(5)]
    for example in read_dataset("xsum", write(*rows), num_documents=4):
        shown = [str(text) for text in texts(example) if str(text).startswith(opening)]
        assert len(shown) == 1
        assert len(example.documents) == 2


def test_2wikimultihopqa_in_both_schemas(write: Write) -> None:
    hub = hops(context={"title": ["T", "U"], "sentences": [["One.", " Two."], ["Three."]]})
    for row in (hops(), hub):
        dataset = read_dataset("2wikimultihopqa", write(row))
        assert dataset.name == "2wikimultihopqa"
        assert texts(dataset[0]) == ["One. Two.", "Three."]
        assert [document.title for document in dataset[0].documents] == ["T", "U"]
        assert (dataset[0].query, dataset[0].answer, dataset[0].id, dataset[0].group) == ("q?", "x", "7", "q?")
    path = write(hops(), hops(answer=""), hops(context=[["T", [" "]]]))
    dataset = read_dataset("2wikimultihopqa", path, num_documents=1)
    assert dataset.counts.dropped == {"no answer": 1, "no documents": 1}
    assert dataset.counts.truncated == {"row with more documents than num_documents": 1}
    path = write(*(hops(question=f"q{n % 10}?") for n in range(20)))
    train, heldout = (read_dataset("2wikimultihopqa", path, split=side) for side in ("train", "heldout"))
    assert (len(train), len(heldout)) == (16, 4)
    assert not {example.query for example in train} & {example.query for example in heldout}


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("xsum", article(1, document=["x"]), r"rows.jsonl:1: 'document' is a text"),
        ("xsum", {"document": "d"}, r"rows.jsonl:1: there is no 'summary'"),
        ("2wikimultihopqa", hops(context="x"), r"rows.jsonl:1: 'context' is a list of \[title"),
        ("2wikimultihopqa", hops(answer=None), "there is no 'answer'"),
    ],
)
def test_malformed_rows(write: Write, name: str, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_dataset(name, write(row))


@pytest.mark.parametrize("name", ["xsum", "2wikimultihopqa"])
def test_paths_and_options_are_checked(write: Write, name: str) -> None:
    with pytest.raises(ValueError, match=f"'{name}' needs a path"):
        read_dataset(name)
    with pytest.raises(ValueError, match="num_documents must be at least 1"):
        read_dataset(name, write(), num_documents=0)


def test_real_xsum() -> None:
    if not XSUM.exists():
        pytest.skip(f"the sample {XSUM.name} is not here")
    dataset = read_dataset("xsum", XSUM, num_documents=4)
    assert len(dataset) == 480
    assert {len(set(texts(example))) for example in dataset} == {4}
    assert not dataset.counts.dropped
    assert not dataset.counts.truncated


def test_real_rows_of_hotpotqas_form() -> None:
    if not HOTPOT.exists():
        pytest.skip(f"the sample {HOTPOT.name} is not here")
    assert list(read_dataset("2wikimultihopqa", HOTPOT)) == list(read_dataset("hotpotqa", HOTPOT))
