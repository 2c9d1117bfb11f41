"""Readers of multi-document sets: schemas, rows accounted for, groups on one side, needles; samples of real data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comb import Document, Example
from comb.documents.datasets import Dataset, read_dataset
from comb_training.data.readers.haystacks import supporting
from tests.helpers.rows import HUB_ROWS, ROWS, SHARED, WriteRows, texts


def test_musique_in_both_schemas(write_rows: WriteRows) -> None:
    row, official = ROWS["musique"](2), ROWS["musique, official"](2)
    del row["id"]
    (example,) = read_dataset("musique", write_rows(row))
    assert (texts(example), [document.title for document in example.documents]) == (["Text 2.", "Other."], ["T2", None])
    assert (example.id, example.query, example.answer, example.references) == ("1", "q2?", "x", ("x", "y"))
    dataset = read_dataset(
        "musique", write_rows(official, {**official, "answerable": False}, {**official, "paragraphs": []})
    )
    assert [(e.id, texts(e), e.references) for e in dataset] == [("2", ["Text 2.", "Other."], ("x", "y"))]
    assert dataset.counts.dropped == {"unanswerable question": 1, "no documents": 1}
    assert dataset.counts.read == 3


def test_rows_are_drawn_and_their_groups_are_on_one_side(write_rows: WriteRows) -> None:
    path = write_rows(*(ROWS["musique"](n) | {"id": f"{n}{turn}"} for n in range(5) for turn in "ab"))
    sides = [{e.query for e in read_dataset("musique", path, split=side)} for side in ("train", "heldout")]
    assert all(sides)
    assert not sides[0] & sides[1]
    dataset = read_dataset("musique", path, limit=5)
    assert (len(dataset), dataset.counts.dropped) == (5, {"over the limit": 5})
    assert list(dataset) == list(read_dataset("musique", path, limit=5))
    assert list(dataset) != list(read_dataset("musique", path))[:5]
    cut = read_dataset("musique", path, num_documents=1)
    assert texts(cut[0]) == ["Text 0."]
    assert cut.counts.truncated == {"row with more documents than num_documents": 10}


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimultihopqa"])
def test_hotpotqa_s_rows_in_both_schemas(write_rows: WriteRows, name: str) -> None:
    for row in (ROWS["hotpotqa"](7), HUB_ROWS["hotpotqa"](7)):
        dataset = read_dataset(name, write_rows(row))
        assert dataset.name == name
        (example,) = dataset
        assert texts(example) == ["One. Two.", "Three."]  # and sentences never run into each other
        assert [document.title for document in example.documents] == ["T", "U"]
        assert (example.query, example.answer, example.id, example.group) == ("q7?", "x", "7", "q7?")
    empty = {"question": " "}, {"answer": ""}, {"context": [["T", [" "]]]}
    dataset = read_dataset(name, write_rows(*(ROWS["hotpotqa"](7) | row for row in ({}, *empty))))
    assert dataset.counts.dropped == {"empty query": 1, "no answer": 1, "no documents": 1}
    path = write_rows(*(ROWS["hotpotqa"](n % 10) for n in range(20)))
    train, heldout = (read_dataset(name, path, split=side) for side in ("train", "heldout"))
    assert (len(train), len(heldout)) == (16, 4)
    assert not {example.query for example in train} & {example.query for example in heldout}


def test_made_questions_across_documents_are_for_training_and_have_no_answer(write_rows: WriteRows) -> None:
    path = write_rows(*map(ROWS["hotpotqa"], range(10)))
    train = read_dataset("hotpotqa", path, split="train", across=3)
    made = [example for example in train if not example.answer]
    assert len(made) == 3 * 8
    assert all("T" in e.query.split(" ", 1)[1] and "U" in e.query for e in made)
    assert {e.documents for e in made} == {e.documents for e in train}
    assert all(e.answer for e in read_dataset("hotpotqa", path, split="heldout", across=3))
    assert train.counts.kept == len(train)
    assert len(read_dataset("hotpotqa", path, split="train", across=3, limit=5)) == 5


def test_samsum_shows_other_rows_of_the_same_side(write_rows: WriteRows) -> None:
    path = write_rows(*map(ROWS["samsum"], range(10)))
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
    dataset = read_dataset("samsum", write_rows(test_row, ROWS["samsum"](1)), num_documents=3)
    assert dataset[0].references == ("s", "t", "u")
    assert dataset.counts.truncated == {"fewer dialogues in the file than num_documents": 2}


def test_xsum_is_one_article(write_rows: WriteRows) -> None:
    article = ROWS["xsum"]
    dataset = read_dataset("xsum", write_rows(article(1), article(2) | {"summary": " "}, article(3) | {"document": ""}))
    (example,) = dataset
    assert texts(example) == [article(1)["document"]]
    assert (example.query, example.answer, example.id) == ("Summarise the article in one sentence.", "News 1.", "1")
    assert dataset.counts.dropped == {"no answer": 1, "no documents": 1}


def test_xsum_among_other_articles_of_its_side(write_rows: WriteRows) -> None:
    article = ROWS["xsum"]
    path = write_rows(*map(article, range(12)), article(3) | {"id": "again"})
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
    opening = "Ten words that are the same in each of "  # two that begin alike are never shown together
    rows = [article(n) | {"document": opening + f"them {n}"} for n in range(3)] + [article(5)]
    for example in read_dataset("xsum", write_rows(*rows), num_documents=4):
        assert sum(str(text).startswith(opening) for text in texts(example)) == 1
        assert len(example.documents) == 2


def test_multi_news(write_rows: WriteRows) -> None:
    row = {"document": "one ||||| \n ||||| two", "summary": "– both"}
    dataset = read_dataset("multi_news", write_rows(row, {"document": " ||||| ", "summary": "s"}))
    assert (texts(dataset[0]), dataset[0].answer) == (["one", "two"], "both")
    assert dataset.counts.truncated == {"empty document left out": 1}  # of the row that is kept
    assert dataset.counts.dropped == {"no documents": 1}


def test_nq_open_puts_the_gold_passage_among_others(write_rows: WriteRows) -> None:
    path = write_rows(*map(ROWS["nq_open"], range(12)))
    dataset = read_dataset("nq_open", path, num_documents=3)
    assert all(len(set(texts(example))) == 3 for example in dataset)
    assert {texts(example).index(f"Text {number}.") for number, example in enumerate(dataset)} == {0, 1, 2}
    train, heldout = (read_dataset("nq_open", path, split=side, num_documents=3) for side in ("train", "heldout"))
    seen = [{text for example in side for text in texts(example)} for side in (train, heldout)]
    assert not seen[0] & seen[1]
    assert len(train) + len(heldout) == 12


def test_samsum_never_shows_or_splits_a_dialogue_that_stands_there_twice(write_rows: WriteRows) -> None:
    rows = [{**ROWS["samsum"](n // 3), "id": f"test_{n}", "summary": f"summary {n}"} for n in range(18)]
    path = write_rows(*rows)
    for example in read_dataset("samsum", path, num_documents=9):
        assert not any(str(text).startswith(example.query) for text in texts(example))
        assert len(example.documents) == 5
    sides = [{e.query for e in read_dataset("samsum", path, split=side)} for side in ("train", "heldout")]
    assert not sides[0] & sides[1]


def test_nq_open_distractors_hold_no_accepted_answer(write_rows: WriteRows) -> None:
    rows = [{**ROWS["nq_open"](n), "answers": ["nobody", f"TEXT {(n + 1) % 5}"]} for n in range(5)]
    dataset = read_dataset("nq_open", write_rows(*rows), num_documents=5)
    for number, example in enumerate(dataset):
        assert f"Text {(number + 1) % 5}." not in texts(example)
        assert len(example.documents) == 4
    assert dataset.counts.truncated["fewer passages in the file than num_documents"] == 5


def test_what_is_left_out_of_a_row_counts_on_its_side(write_rows: WriteRows) -> None:
    path = write_rows(*({"document": f"a{n} ||||| ", "summary": "s"} for n in range(10)))
    for side, count in (("train", 8), ("heldout", 2)):
        dataset = read_dataset("multi_news", path, split=side)
        assert (len(dataset), dataset.counts.truncated["empty document left out"]) == (count, count)
    row = {**ROWS["musique"](1), "ctxs": [{"text": " "}, {"text": "b"}], "answers": ["", "y"]}
    dataset = read_dataset("musique", write_rows(row))
    assert (texts(dataset[0]), dataset[0].references) == (["b"], ("y",))
    assert dataset.counts.truncated == {"empty document left out": 1, "empty answer left out": 1}


def test_needles_stand_at_every_depth_in_turn() -> None:
    found = read_dataset("needle", num_documents=9, limit=10)
    places = []
    for example in found:
        assert len(set(example.documents)) == 9
        needle = supporting(example)
        assert needle is not None
        places.append(example.documents.index(needle))
    assert places == [0, 2, 4, 6, 8] * 2
    assert found.counts.kept == 10
    assert found.examples == read_dataset("needle", num_documents=9, limit=10).examples


def test_needles_of_another_set(write_rows: WriteRows) -> None:
    rows = [
        {"documents": [f"name{n} went to room{n}.", f"person{n} sat down."], "query": f"Where is name{n}?",
         "answer": f"name{n} is in room{n}."} for n in range(9)
    ]  # fmt: skip
    rows[2]["documents"].append("name1 sang.")  # a word of the question: no filler for name1
    path = write_rows(*rows)
    given = {"of": "jsonl", "split": "all"}
    first = read_dataset("needle", path, **given, num_documents=4)[1]
    assert [text for text in texts(first) if "name1 " in str(text)] == ["name1 went to room1."]
    with pytest.raises(ValueError, match=r"'jsonl' gives \d+ documents beside a needle, not 99: read more"):
        read_dataset("needle", path, **given, num_documents=100)
    with pytest.raises(ValueError, match="2 or more, got 1"):
        read_dataset("needle", num_documents=1)


def test_the_supporting_document_is_the_only_one_with_all_words() -> None:
    right, other = Document("Hannah went to the station."), Document("Felix went to the park.")
    example = Example((other, right), "Where is Hannah?", "Hannah is in the station.")
    assert supporting(example) == right
    two = Example((Document("Ann works at Acme."), Document("Acme is in Rome.")), "Ann's city?", "Acme is in Rome.")
    assert supporting(two) is None
    assert supporting(Example((right, right), "Where is Hannah?", "station")) is None


WORDS = {f"book{number}": [f"b{number}w{place}" for place in range(400)] for number in range(4)}
OPTIONS = {"words": 40, "answer_words": 8, "passages": 30}


@pytest.fixture
def file(write_rows: WriteRows) -> Path:
    rows = [{"id": name, "text": " ".join(words)} for name, words in WORDS.items()]
    return write_rows(*rows, {"id": "short", "text": "too short"})


def passages(file: Path, **options: object) -> Dataset:
    return read_dataset("passages", file, **{**OPTIONS, "split": "all", **options})


def test_answers_of_passages_follow_what_is_quoted(file: Path) -> None:
    examples = passages(file)
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


def test_sides_of_passages_share_no_text_and_draws_repeat(file: Path) -> None:
    sides = {side: passages(file, split=side, heldout_share=0.25) for side in ("train", "heldout")}
    books = {side: {w.split("w")[0] for e in examples for d in e.documents for w in str(d.text).split()}
             for side, examples in sides.items()}  # fmt: skip
    assert books["train"].isdisjoint(books["heldout"])
    assert sides["train"].examples == passages(file, split="train", heldout_share=0.25).examples
    assert sides["train"].examples != passages(file, split="train", heldout_share=0.25, seed=1).examples
    assert len(passages(file, limit=5)) == 5
    assert {e.query.split()[0] for e in passages(file, tasks=["copy"])} == {"Continue"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": ["sing"]}, "tasks are of copy, continue"),
        ({"words": 20}, "words must be at least 32"),
        ({"words": 4000}, "no text of at least 4008 words"),
    ],
)
def test_what_can_not_be_asked_of_passages(file: Path, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        passages(file, **options)


RESTRICTED = "restricted_research_only"
NI = "natural_instructions"


@pytest.mark.parametrize(
    ("name", "path", "options", "count", "documents", "found"),
    [
        ("squad", "squad/squad_v2_dev_sample.json", {}, 2292, (4, 4), 1.0),
        ("babi", "babi/en-10k", {"split": "heldout"}, 800, (3, 3), 1.0),
        ("babi", "babi/en-10k", {"split": "train"}, 8000, (3, 3), 1.0),
        ("musique", "musique/musique_s.json", {}, 120, (10, 10), 0.65),
        ("hotpotqa", "hotpotqa/hotpot_dev_fullwiki_gold_in_context.json", {}, 117, (10, 10), 0.95),
        ("samsum", f"{RESTRICTED}/samsum/samsum_sample.jsonl", {}, 160, (4, 4), 0.0),
        ("multi_news", f"{RESTRICTED}/multi_news/multi_news_sample.jsonl", {}, 160, (1, 6), 0.0),
        ("nq_open", "nq_open/nq-open-oracle.jsonl.gz", {}, 2124, (10, 10), 0.99),
        ("xsum", f"{RESTRICTED}/xsum/xsum_sample.jsonl", {}, 480, (1, 1), 0.0),
        (NI, f"{NI}_v2/tasks", {"num_documents": 5}, 2097, (5, 5), 0.0),
    ],
)
def test_real_samples(
    name: str, path: str, options: dict[str, Any], count: int, documents: tuple[int, int], found: float
) -> None:
    if not (SHARED / path).exists():
        pytest.skip(f"the sample {path} is not here")
    dataset = read_dataset(name, SHARED / path, **options)
    sizes = [len(example.documents) for example in dataset]
    assert (len(dataset), min(sizes), max(sizes)) == (count, *documents)
    assert set(dataset.counts.dropped) == ({"unanswerable question"} if name == "squad" else set())
    holds = [
        any(answer.lower() in f"{d.title} {d.text}".lower() for answer in example.references for d in example.documents)
        for example in dataset
    ]
    assert sum(holds) / count >= found
