"""Dataset readers: what becomes document, query and answer, what is held out, what is dropped and counted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import Dataset, read_dataset
from comb.documents.document import Document, Example
from comb_training.data.side import DatasetSide, pick_distractors, seeded
from tests.helpers.rows import WriteRows, article, texts


def squad_file(folder: Path, articles: int = 5, paragraphs: int = 3) -> Path:
    """Of each paragraph's three questions the last has no answer."""
    data = [article(number, paragraphs) for number in range(articles)]
    for each in data:
        for paragraph in each["paragraphs"]:
            paragraph["qas"].append({"id": "none", "question": "Why?", "answers": [], "is_impossible": True})
    path = folder / "squad.json"
    path.write_text(json.dumps({"version": "v2.0", "data": data}))
    return path


def groups(dataset: Dataset) -> set[str | None]:
    return {example.group for example in dataset}


def test_split_is_disjoint_complete_and_a_function_of_the_seed() -> None:
    names = [f"group {i}" for i in range(20)]

    def side(split: Any, share: float = 0.2, seed: int = 3, names: list[str] = names) -> set[str]:
        return DatasetSide("mine", "", split, seed, None, share).groups(names)

    sides = {split: side(split) for split in ("train", "heldout", "all")}
    assert len(sides["heldout"]) == 4
    assert not sides["train"] & sides["heldout"]
    assert sides["train"] | sides["heldout"] == sides["all"] == set(names)
    assert side("heldout", names=names[::-1]) == sides["heldout"]
    assert side("heldout", seed=4) != sides["heldout"]
    for one, split, share, message in (
        (["only"], "heldout", 0.2, "can't hold out part of 1 group"),
        (["a", "b"], "test", 0.2, "split is one of"),
        (["a", "b"], "train", 1.5, "heldout_share"),
    ):
        with pytest.raises(ValueError, match=message):
            side(split, share, names=one)


def test_distractors_are_different_and_never_the_excluded_one() -> None:
    picked = pick_distractors(seeded(0, "x"), [(["a", "a", "b"], 1), (list("abcd"), 9)], exclude=["b"], total=5)
    assert picked[0] == "a"  # all that the first pool has besides the excluded one
    assert sorted(picked) == ["a", "c", "d"]


def test_squad_example(tmp_path: Path) -> None:
    dataset = read_dataset("squad", squad_file(tmp_path), num_documents=4, same_article=2)
    assert (dataset.counts.read, dataset.counts.kept, len(dataset)) == (45, 30, 30)
    assert dict(dataset.counts.dropped) == {"unanswerable question": 15}
    example = next(e for e in dataset if e.id == "1-2-a")
    assert (example.query, example.answer, example.answers) == ("Who is 1-2?", "Ann", ("Ann", "Ann B"))
    assert "Text 2 of article 1." in texts(example)
    assert len(set(texts(example))) == 4
    assert sum("article 1" in str(text) for text in texts(example)) == 3
    assert {d.title for d in example.documents} >= {"article 1"}
    kept = read_dataset("squad", squad_file(tmp_path), unanswerable="keep")
    assert len(kept) == 45
    assert {e.answer for e in kept if e.query == "Why?"} == {"unanswerable"}
    few = read_dataset("squad", squad_file(tmp_path), limit=7)
    assert len(few) == few.counts.kept == 7
    assert few.counts.dropped["over the limit"] == 23
    alone = read_dataset("squad", squad_file(tmp_path, articles=1, paragraphs=2), num_documents=4)
    assert alone.counts.truncated == {"fewer documents in the file than num_documents": 4}


def test_squad_sides_seeds_and_shared_documents(tmp_path: Path) -> None:
    path = squad_file(tmp_path)
    train, heldout = (read_dataset("squad", path, split=s, heldout_share=0.4) for s in ("train", "heldout"))
    assert len(groups(heldout)) == 2  # whole articles
    assert not groups(train) & groups(heldout)
    shown = [{d.text for e in side for d in e.documents} for side in (train, heldout)]
    assert not shown[0] & shown[1]
    dataset = read_dataset("squad", path, seed=1)
    assert dataset.examples == read_dataset("squad", path, seed=1).examples
    assert dataset.examples != read_dataset("squad", path, seed=2).examples
    places, by_paragraph = set(), dict[str, set[tuple[Document, ...]]]()
    for example in dataset:
        by_paragraph.setdefault(str(example.id)[:-2], set()).add(example.documents)
        places.add([document.title for document in example.documents].index(example.group))
    assert len(places) > 1  # the right document does not always stand first
    assert all(len(documents) == 1 for documents in by_paragraph.values())


def test_squad_articles_that_share_a_title_keep_their_paragraphs(tmp_path: Path) -> None:
    qas = [{"question": "Who?", "id": "x", "answers": [{"text": "Ann", "answer_start": 0}]}]
    articles = [{"title": "T", "paragraphs": [{"context": f"Text {n}.", "qas": qas}]} for n in range(2)]
    articles.append({"title": "", "paragraphs": [{"context": " ", "qas": qas}, {"context": "Text 2.", "qas": qas}]})
    (tmp_path / "s.json").write_text(json.dumps({"data": articles}))
    dataset = read_dataset("squad", tmp_path / "s.json", num_documents=1)
    assert [example.documents[0].text for example in dataset] == ["Text 0.", "Text 1.", "Text 2."]
    assert dataset.counts.dropped == {"empty paragraph": 1}


STORIES = """1 Mary moved to the bathroom.
2 John went to the hallway.
3 Where is Mary? \tbathroom\t1
4 Mary went to the office.
5 Where is Mary? \toffice\t4
1 Sandra went to the garden.
2 Mary went to the kitchen.
3 Where is Sandra? \tgarden\t1
1 Daniel went to the garden.
2 Where is Daniel? \tgarden\t1
"""


def babi_file(folder: Path, name: str = "qa1_x.txt") -> Path:
    path = folder / name
    path.write_text(STORIES)
    return path


def test_babi_keeps_a_story_in_one_document_up_to_the_question(tmp_path: Path) -> None:
    dataset = read_dataset("babi", babi_file(tmp_path), num_documents=1)
    assert [(e.documents[0].text, e.query, e.answer) for e in dataset][:2] == [
        ("Mary moved to the bathroom. John went to the hallway.", "Where is Mary?", "bathroom"),
        ("Mary moved to the bathroom. John went to the hallway. Mary went to the office.", "Where is Mary?", "office"),
    ]
    assert len(groups(dataset)) == 3
    example = read_dataset("babi", babi_file(tmp_path), answer_style="sentence")[0]
    assert (example.answer, example.references[1:]) == ("Mary is in the bathroom.", ("bathroom",))
    assert example.references[0] == example.answer
    path = babi_file(tmp_path)
    path.write_text(STORIES + "no number here\n1 Where is Bob? \toffice\t1\n")
    counts = read_dataset("babi", path, num_documents=1).counts
    assert (counts.read, sum(counts.dropped.values())) == (6, 2)


def test_babi_distractors_never_speak_of_whom_is_asked_for(tmp_path: Path) -> None:
    for example in read_dataset("babi", babi_file(tmp_path), num_documents=3):
        name = example.query.removeprefix("Where is ").removesuffix("?")
        assert sum(name in str(document.text) for document in example.documents) == 1
        assert len(example.documents) > 1
    path = babi_file(tmp_path, "qa2_two.txt")  # where they would contradict each other
    with pytest.raises(ValueError, match="beyond task 1"):
        read_dataset("babi", path, num_documents=2)
    assert len(read_dataset("babi", path, num_documents=1)) == 4


def test_babi_folder_uses_the_published_split(tmp_path: Path) -> None:
    babi_file(tmp_path, "qa1_single_train.txt")
    babi_file(tmp_path, "qa2_two_train.txt")  # of another task
    (tmp_path / "qa1_single_test.txt").write_text("1 Ann went to the attic.\n2 Where is Ann? \tattic\t1\n")
    options = {"num_documents": 1}
    assert len(read_dataset("babi", tmp_path, split="train", **options)) == 4
    assert [e.answer for e in read_dataset("babi", tmp_path, split="heldout", **options)] == ["attic"]
    (tmp_path / "none").mkdir()
    with pytest.raises(ValueError, match="no bAbI file"):
        read_dataset("babi", tmp_path / "none", **options)


def test_jsonl_fields(write_rows: WriteRows) -> None:
    path = write_rows(
        {"documents": ["one", {"text": "two", "title": "T", "id": "d2"}], "query": "q?", "answer": "a"},
        {"documents": ["three"], "query": "r?", "answers": ["b", "c"], "id": 7, "group": "g"},
    )
    first, second = read_dataset("jsonl", path)
    assert first.documents == (Document("one"), Document("two", id="d2", title="T"))
    assert (first.answer, first.references, first.id) == ("a", ("a",), "1")
    assert second == Example((Document("three"),), "r?", "b", ("b", "c"), id="7", group="g")
    # a file stands for itself where a dataset's name is asked for
    assert read_dataset(str(path)).examples == (first, second)
    rows = [{"documents": texts, "query": "q?", "answer": "a", "answers": ["b"]} for texts in (["A", "B"], ["B", "A"])]
    first, second = read_dataset("jsonl", write_rows(*rows))
    assert first.references == ("a", "b")  # the target is an accepted answer
    assert first.group == second.group
    rows = [{"documents": [f"text {i // 3}"], "query": f"q{i}", "answer": "a"} for i in range(30)]
    path = write_rows(*rows)
    train, heldout = (read_dataset("jsonl", path, split=s, heldout_share=0.3) for s in ("train", "heldout"))
    assert (len(train), len(heldout)) == (21, 9)
    assert not {e.documents for e in train} & {e.documents for e in heldout}


def test_jsonl_drops_empty_rows_and_counts_them(write_rows: WriteRows) -> None:
    row = {"documents": ["one"], "query": "q?", "answer": "a"}
    empty = [{**row, "documents": ["one", " "]}, {**row, "query": ""}, {**row, "answer": ""}, {**row, "documents": []}]
    dataset = read_dataset("jsonl", write_rows(row, *empty))
    assert [texts(example) for example in dataset] == [["one"], ["one"]]
    assert dataset.counts.truncated == {"empty document left out": 1}
    assert dataset.counts.dropped == {"empty query": 1, "no answer": 1, "no documents": 1}
    assert "1 dropped: no answer" in str(dataset.counts)


def test_jsonl_lines_end_at_newlines_only(tmp_path: Path) -> None:
    row = {"documents": ["one\u2028two\x85three"], "query": "q?", "answer": "a"}
    (tmp_path / "own.jsonl").write_text("\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    (example,) = read_dataset("jsonl", tmp_path / "own.jsonl")
    assert example.documents[0].text == "one\u2028two\x85three"


def test_nano_is_generated_and_seeded() -> None:
    dataset = read_dataset("nano", split="train", seed=5, scenes=6, questions=4)
    assert dataset.examples == read_dataset("nano", split="train", seed=5, scenes=6, questions=4).examples
    assert dataset.examples != read_dataset("nano", split="heldout", seed=5, scenes=6, questions=4).examples
    assert {len(e.documents) for e in dataset} == {4, 5, 6, 7, 8}
    assert len({(example.group, example.documents) for example in dataset}) == len(groups(dataset))
    with pytest.raises(ValueError, match="is generated and reads no file"):
        read_dataset("nano", Path(__file__))
    with pytest.raises(ValueError, match="train and heldout"):
        read_dataset("nano", split="all")
    with pytest.raises(ValueError, match="num_documents must be at least 1, not 0"):
        read_dataset("nano", num_documents=0)


def test_unknown_names_options_and_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown dataset 'squat'; known: 2wikimultihopqa, babi, hotpotqa, jsonl"):
        read_dataset("squat")
    with pytest.raises(ValueError, match=r"'squad' has no option 'num_docs'; it knows: .*num_documents"):
        read_dataset("squad", squad_file(tmp_path), num_docs=3)
    with pytest.raises(ValueError, match="there is no file or folder"):
        read_dataset("squad", tmp_path / "absent.json")
    for name in ("squad", "musique"):
        with pytest.raises(ValueError, match=rf"'{name}' needs a path \(data\.path=PATH, or --path PATH\)"):
            read_dataset(name)
        with pytest.raises(ValueError, match="num_documents must be at least 1, not 0"):
            read_dataset(name, squad_file(tmp_path), num_documents=0)
