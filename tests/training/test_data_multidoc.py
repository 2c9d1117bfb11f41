"""Readers of multi-document sets: schemas, rows accounted for, groups on one side, errors that name the row."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import read_dataset
from tests.helpers.rows import SHARED, WriteRows, texts

RESTRICTED = SHARED / "restricted_research_only"
HOTPOTQA = SHARED / "hotpotqa/hotpot_dev_fullwiki_gold_in_context.json"


MUSIQUE = {
    "ctxs": [{"title": "", "text": "a mill"}, {"title": "T", "text": "b"}],
    "question": "q?",
    "answers": ["x", "y"],
}
HOTPOT = {"_id": "7", "question": "q?", "answer": "x", "context": [["T", ["One.", "Two. ", " "]], ["U", ["Three."]]]}
WIKIHOP = {"id": "1", "query": "part_of juan r", "answer": "x", "candidates": ["x", "z"], "supports": ["one", "two"]}
KV = {"ordered_kv_records": [[f"k{i}", f"v{i}"] for i in range(5)], "key": "k3", "value": "v3"}


def nq(number: int) -> dict[str, Any]:
    gold = {"title": f"T{number}", "text": f"passage {number}", "isgold": True}
    return {"question": f"q{number}?", "answers": [f"a{number}"], "ctxs": [{"title": "N", "text": "no"}, gold]}


def dialogue(number: int) -> dict[str, Any]:
    return {"id": str(number), "dialogue": f"A: {number}\r\nB: hm", "summary": f"They said {number}."}


def article(number: int, **fields: Any) -> dict[str, Any]:
    text = f"Article {number} is about\nnews and more things than eight words say, {number} times."
    return {"document": text, "summary": f"News {number}.", "id": str(number), **fields}


def test_musique_in_both_schemas(write_rows: WriteRows) -> None:
    official = {
        "id": "2", "question": "w?", "answer": "x", "answer_aliases": ["X"], "answerable": True,
        "paragraphs": [{"idx": 0, "title": "T", "paragraph_text": "p", "is_supporting": True}],
    }  # fmt: skip
    (example,) = read_dataset("musique", write_rows(MUSIQUE))
    assert (texts(example), example.documents[0].title, example.documents[1].title) == (["a mill", "b"], None, "T")
    assert example.id == "1"
    assert (example.query, example.answer, example.references) == ("q?", "x", ("x", "y"))
    rows = write_rows(official, {**official, "answerable": False}, {**official, "paragraphs": []})
    dataset = read_dataset("musique", rows)
    assert [e.references for e in dataset] == [("x", "X")]
    assert dataset.counts.dropped == {"unanswerable question": 1, "no documents": 1}
    assert dataset.counts.read == 3


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa"])
def test_hotpotqa_s_rows_in_both_schemas(write_rows: WriteRows, name: str) -> None:
    hub = {**HOTPOT, "context": {"title": ["T", "U"], "sentences": [["One.", " Two."], ["Three."]]}}
    for row in (HOTPOT, hub):
        dataset = read_dataset(name, write_rows(row))
        assert dataset.name == name
        (example,) = dataset
        assert texts(example) == ["One. Two.", "Three."]  # and sentences never run into each other
        assert [document.title for document in example.documents] == ["T", "U"]
        assert (example.query, example.answer, example.id, example.group) == ("q?", "x", "7", "q?")
    empty = {"question": " "}, {"answer": ""}, {"context": [["T", [" "]]]}
    dataset = read_dataset(name, write_rows({**HOTPOT, "_id": 7}, *({**HOTPOT, **row} for row in empty)))
    assert dataset.counts.dropped == {"empty query": 1, "no answer": 1, "no documents": 1}
    assert dataset[0].id == "7"
    path = write_rows(*({**HOTPOT, "question": f"q{n % 10}?"} for n in range(20)))
    train, heldout = (read_dataset(name, path, split=side) for side in ("train", "heldout"))
    assert (len(train), len(heldout)) == (16, 4)
    assert not {example.query for example in train} & {example.query for example in heldout}


def test_wikihop(write_rows: WriteRows) -> None:
    (example,) = read_dataset("wikihop", write_rows(WIKIHOP))
    assert (example.query, texts(example)) == ("part of juan r", ["one", "two"])
    path = write_rows(*({**WIKIHOP, "query": f"{relation} s{n}"} for n in range(5) for relation in ("a_of", "b_of")))
    sides = [{e.query[-2:] for e in read_dataset("wikihop", path, split=side)} for side in ("train", "heldout")]
    assert not sides[0] & sides[1]  # subjects
    dataset = read_dataset("wikihop", path, limit=5)
    assert (len(dataset), dataset.counts.dropped) == (5, {"over the limit": 5})
    assert list(dataset) == list(read_dataset("wikihop", path, limit=5))
    cut = read_dataset("wikihop", path, num_documents=1)
    assert texts(cut[0]) == ["one"]
    assert cut.counts.truncated == {"row with more documents than num_documents": 10}


def test_samsum_shows_other_rows_of_the_same_side(write_rows: WriteRows) -> None:
    path = write_rows(*map(dialogue, range(10)))
    for split in ("train", "heldout"):
        dataset = read_dataset("samsum", path, split=split, num_documents=2, heldout_share=0.4)
        own = {str(example.id) for example in dataset}
        assert len(own) == (6 if split == "train" else 4) == dataset.counts.kept
        for example in dataset:
            assert example.query == f"Dialogue:\nA: {example.id}\nB: hm\nSummary:"
            shown = {str(text).split("A: ")[1][0] for text in texts(example)}
            assert len(shown) == 2
            assert shown <= own - {str(example.id)}
    again = read_dataset("samsum", path, seed=0, num_documents=2)
    assert list(again) == list(read_dataset("samsum", path, seed=0, num_documents=2))
    assert list(again) != list(read_dataset("samsum", path, seed=1, num_documents=2))
    test_row = {"fname": "t", "dialogue": "d", "summary1": "s", "summary2": "t", "summary3": "u"}
    dataset = read_dataset("samsum", write_rows(test_row, dialogue(1)), num_documents=3)
    assert dataset[0].references == ("s", "t", "u")
    assert dataset.counts.truncated == {"fewer dialogues in the file than num_documents": 2}


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


def test_multi_news(write_rows: WriteRows) -> None:
    row = {"document": "one ||||| \n ||||| two", "summary": "– both"}
    dataset = read_dataset("multi_news", write_rows(row, {"document": " ||||| ", "summary": "s"}))
    assert (texts(dataset[0]), dataset[0].answer) == (["one", "two"], "both")
    assert dataset.counts.truncated == {"empty document left out": 1}  # of the row that is kept
    assert dataset.counts.dropped == {"no documents": 1}


def test_kv_retrieval(write_rows: WriteRows) -> None:
    (example,) = read_dataset("kv_retrieval", write_rows(KV, name="rows.jsonl.gz"), records_per_document=2)
    assert texts(example) == ['"k0": "v0"\n"k1": "v1"', '"k2": "v2"\n"k3": "v3"', '"k4": "v4"']
    assert (example.query, example.answer) == ('Which value belongs to the key "k3"?', "v3")
    dropped = read_dataset(
        "kv_retrieval", write_rows(KV, {**KV, "key": "absent"}, {**KV, "value": "v2"})
    ).counts.dropped
    assert dropped == {"records that don't give the value for the key": 2}


def test_nq_open_puts_the_gold_passage_among_others(write_rows: WriteRows) -> None:
    path = write_rows(*map(nq, range(12)))
    for position in (0, 2):
        for number, example in enumerate(read_dataset("nq_open", path, num_documents=3, gold_position=position)):
            assert example.documents[position].text == f"passage {number}"
            assert len(set(texts(example))) == 3
    drawn = {texts(e).index(f"passage {n}") for n, e in enumerate(read_dataset("nq_open", path, num_documents=3))}
    assert drawn == {0, 1, 2}
    train, heldout = (read_dataset("nq_open", path, split=side, num_documents=3) for side in ("train", "heldout"))
    seen = [{text for example in side for text in texts(example)} for side in (train, heldout)]
    assert not seen[0] & seen[1]
    assert len(train) + len(heldout) == 12


@pytest.mark.parametrize(
    ("name", "row", "message"),
    [
        ("musique", {**MUSIQUE, "question": 3}, r"rows.json\[0\]: 'question' is a text, got '3'"),
        ("musique", {**MUSIQUE, "answers": "x"}, "'answers' is a list of str"),
        ("musique", {"question": "q"}, "'ctxs' is a list of dict"),
        ("hotpotqa", {**HOTPOT, "context": 7}, r"'context' is a list of \[title"),
        ("hotpotqa", {**HOTPOT, "context": [["T", "not a list"]]}, "'sentences' is a list of str"),
        ("hotpotqa", {**HOTPOT, "context": {"title": ["T", "U"], "sentences": [["One."]]}}, "'context' is a list of"),
        ("hotpotqa", {**HOTPOT, "answer": None}, "1 dropped: no answer"),
        ("musique", {**MUSIQUE, "ctxs": [{"title": 3, "text": "a"}]}, "'title' is a text"),
        ("musique", {"question": "q", "answer": "x", "answer_aliases": 3, "paragraphs": []}, "'answer_aliases' is a"),
        ("wikihop", {**WIKIHOP, "supports": [1]}, "'supports' is a list of str"),
        ("samsum", {"dialogue": "d"}, "there is no 'summary' or 'summary1'"),
        ("multi_news", {"document": ["x"], "summary": "s"}, "'document' is a text"),
        ("xsum", article(1, document=["x"]), r"rows.json\[0\]: 'document' is a text"),
        ("kv_retrieval", {**KV, "ordered_kv_records": [["k"]]}, r"list of \[key, value\]"),
        ("nq_open", {**nq(1), "ctxs": [{"title": 3, "text": "t", "isgold": True}]}, "'title' is a text"),
        ("nq_open", "not an object", "expected an object, got str"),
    ],
)
def test_malformed_rows(write_rows: WriteRows, name: str, row: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        read_dataset(name, write_rows(row, name="rows.json"))


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    for name, content, message in (
        ("broken.json", b"[{", "is not JSON"),
        ("object.json", b"{}", "expected a list of rows, got dict"),
        ("broken.jsonl", b'{"a": 1}\n{', "broken.jsonl:2 is not JSON"),
        ("broken.jsonl.gz", b"plain", "is not gzipped, or cut off"),
        ("damaged.jsonl.gz", gzip.compress(b'{"a": 1}')[:10] + b"\xff" * 20, "is not gzipped, or cut off"),
        ("latin.json", b'["\xe9"]', "is not UTF-8 text"),
    ):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=message):
            read_dataset("musique", tmp_path / name)


def test_samsum_never_shows_or_splits_a_dialogue_that_stands_there_twice(write_rows: WriteRows) -> None:
    rows = [{**dialogue(n // 3), "id": f"test_{n}", "summary": f"summary {n}"} for n in range(18)]
    path = write_rows(*rows)
    for example in read_dataset("samsum", path, num_documents=9):
        assert not any(str(text).startswith(example.query) for text in texts(example))
        assert len(example.documents) == 5
    sides = [{e.query for e in read_dataset("samsum", path, split=side)} for side in ("train", "heldout")]
    assert not sides[0] & sides[1]


def test_nq_open_distractors_hold_no_accepted_answer(write_rows: WriteRows) -> None:
    rows = [{**nq(n), "answers": ["nobody", f"PASSAGE {(n + 1) % 5}"]} for n in range(5)]
    dataset = read_dataset("nq_open", write_rows(*rows), num_documents=5)
    for number, example in enumerate(dataset):
        assert f"passage {(number + 1) % 5}" not in texts(example)
        assert len(example.documents) == 4
    assert dataset.counts.truncated["fewer passages in the file than num_documents"] == 5


def test_what_is_left_out_of_a_row_counts_on_its_side(write_rows: WriteRows) -> None:
    path = write_rows(*({"document": f"a{n} ||||| ", "summary": "s"} for n in range(10)))
    for side, count in (("train", 8), ("heldout", 2)):
        dataset = read_dataset("multi_news", path, split=side)
        assert (len(dataset), dataset.counts.truncated["empty document left out"]) == (count, count)
    dataset = read_dataset(
        "musique", write_rows({**MUSIQUE, "ctxs": [{"text": " "}, {"text": "b"}], "answers": ["", "y"]})
    )
    assert (texts(dataset[0]), dataset[0].references) == (["b"], ("y",))
    assert dataset.counts.truncated == {"empty document left out": 1, "empty answer left out": 1}


@pytest.mark.parametrize(
    ("name", "path", "count", "documents", "found"),
    [
        ("musique", SHARED / "musique/musique_s.json", 120, (10, 10), 0.65),
        ("hotpotqa", HOTPOTQA, 117, (10, 10), 0.95),
        ("wikihop", SHARED / "wikihop/wikihop_sample.json", 160, (3, 44), 0.98),
        ("samsum", RESTRICTED / "samsum/samsum_sample.jsonl", 160, (4, 4), 0.0),
        ("multi_news", RESTRICTED / "multi_news/multi_news_sample.jsonl", 160, (1, 6), 0.0),
        ("kv_retrieval", SHARED / "kv_retrieval/kv-retrieval-75_keys.jsonl.gz", 48, (5, 5), 1.0),
        ("nq_open", SHARED / "nq_open/nq-open-oracle.jsonl.gz", 2124, (10, 10), 0.99),
        ("xsum", RESTRICTED / "xsum/xsum_sample.jsonl", 480, (1, 1), 0.0),
    ],
)
def test_real_samples(name: str, path: Path, count: int, documents: tuple[int, int], found: float) -> None:
    if not path.exists():
        pytest.skip(f"the sample {path.name} is not here")
    dataset = read_dataset(name, path)
    sizes = [len(example.documents) for example in dataset]
    assert (len(dataset), min(sizes), max(sizes)) == (count, *documents)
    assert not dataset.counts.dropped
    holds = [
        any(answer.lower() in f"{d.title} {d.text}".lower() for answer in example.references for d in example.documents)
        for example in dataset
    ]
    assert sum(holds) / count >= found
