"""Dataset readers: what becomes document, query and answer, what is held out, what is dropped and counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import Dataset, datasets, read_dataset
from comb.documents.document import Document, Example
from comb_training import plugin
from comb_training.data.side import pick_distractors, seeded, split_groups
from tests.helpers.rows import SHARED, texts

SQUAD = SHARED / "squad" / "squad_v2_dev_sample.json"
BABI = SHARED / "babi" / "en-10k"


def squad_file(folder: Path, articles: int = 5, paragraphs: int = 3) -> Path:
    def questions(article: int, paragraph: int) -> list[dict[str, Any]]:
        name = f"{article}-{paragraph}"
        right = {"id": f"{name}-a", "question": f"Who is {name}?", "is_impossible": False}
        right["answers"] = [{"text": "Ann", "answer_start": 0}, {"text": "Ann B", "answer_start": 0}] * 2
        twin = {"id": f"{name}-b", "question": "Where?", "answers": [{"text": "Rome", "answer_start": 0}]}
        none = {"id": f"{name}-c", "question": "Why?", "answers": [], "is_impossible": True}
        return [right, twin, none]

    data = [
        {
            "title": f"article {a}",
            "paragraphs": [{"context": f"Text {p} of article {a}.", "qas": questions(a, p)} for p in range(paragraphs)],
        }
        for a in range(articles)
    ]
    path = folder / "squad.json"
    path.write_text(json.dumps({"version": "v2.0", "data": data}))
    return path


def groups(dataset: Dataset) -> set[str | None]:
    return {example.group for example in dataset}


def test_split_is_disjoint_complete_and_a_function_of_the_seed() -> None:
    names = [f"group {i}" for i in range(20)]
    sides = {s: split_groups(names, s, heldout_share=0.2, seed=3) for s in ("train", "heldout", "all")}
    assert len(sides["heldout"]) == 4
    assert not sides["train"] & sides["heldout"]
    assert sides["train"] | sides["heldout"] == sides["all"] == set(names)
    assert split_groups(reversed(names), "heldout", heldout_share=0.2, seed=3) == sides["heldout"]
    assert split_groups(names, "heldout", heldout_share=0.2, seed=4) != sides["heldout"]


def test_split_refuses_to_cut_a_group() -> None:
    with pytest.raises(ValueError, match="can't hold out part of 1 group"):
        split_groups(["only"], "heldout", heldout_share=0.2, seed=0)
    with pytest.raises(ValueError, match="split is one of"):
        split_groups(["a", "b"], "test", heldout_share=0.2, seed=0)  # type: ignore[arg-type]  # that is the point
    with pytest.raises(ValueError, match="heldout_share"):
        split_groups(["a", "b"], "train", heldout_share=1.5, seed=0)


def test_distractors_are_different_and_never_the_excluded_one() -> None:
    picked = pick_distractors(seeded(0, "x"), [(["a", "a", "b"], 1), (list("abcd"), 9)], exclude=["b"], total=5)
    assert picked[0] == "a"  # all that the first pool has besides the excluded one
    assert sorted(picked) == ["a", "c", "d"]


def test_squad_example(tmp_path: Path) -> None:
    dataset = read_dataset("squad", squad_file(tmp_path), num_documents=4, same_article=2)
    assert (dataset.counts.read, dataset.counts.kept, len(dataset)) == (45, 30, 30)
    assert dict(dataset.counts.dropped) == {"unanswerable question": 15}
    example = next(e for e in dataset if e.id == "1-2-a")
    assert example.query == "Who is 1-2?"
    assert (example.answer, example.answers) == ("Ann", ("Ann", "Ann B"))
    texts = [document.text for document in example.documents]
    assert "Text 2 of article 1." in texts
    assert len(set(texts)) == 4
    assert sum("article 1" in str(text) for text in texts) == 3
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
    texts = [{d.text for e in side for d in e.documents} for side in (train, heldout)]
    assert not texts[0] & texts[1]
    dataset = read_dataset("squad", path, seed=1)
    assert dataset.examples == read_dataset("squad", path, seed=1).examples
    assert dataset.examples != read_dataset("squad", path, seed=2).examples
    places, by_paragraph = set(), dict[str, set[tuple[Document, ...]]]()
    for example in dataset:
        by_paragraph.setdefault(str(example.id)[:-2], set()).add(example.documents)
        places.add([document.title for document in example.documents].index(example.group))
    assert len(places) > 1  # the right document does not always stand first
    assert all(len(documents) == 1 for documents in by_paragraph.values())


@pytest.mark.skipif(not SQUAD.exists(), reason=f"needs the SQuAD sample at {SQUAD}")
def test_squad_reads_the_real_sample() -> None:
    dataset = read_dataset("squad", SQUAD)
    assert dataset.counts.read == 4871
    assert len(dataset) + dataset.counts.dropped["unanswerable question"] == 4871
    example = next(e for e in dataset if e.query == "In what country is Normandy located?")
    assert example.answers == ("France",)
    assert sum("Normandy" in str(d.text) for d in example.documents) >= 1
    assert all(any(a in str(d.text) for a in e.answers for d in e.documents) for e in dataset)


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
    assert (example.answer, example.references) == (
        "Mary is in the bathroom.",
        ("Mary is in the bathroom.", "bathroom"),
    )
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
    with pytest.raises(ValueError, match="no bAbI file"):
        read_dataset("babi", SHARED.parent / "design" if SHARED.exists() else tmp_path.parent, **options)


@pytest.mark.skipif(not BABI.exists(), reason=f"needs the bAbI sample at {BABI}")
def test_babi_reads_the_real_sample() -> None:
    train, heldout = (read_dataset("babi", BABI, split=s) for s in ("train", "heldout"))
    assert (len(train), len(heldout)) == (8000, 800)
    assert not train.counts.dropped
    assert all(len(e.documents) == 3 for e in heldout)


def jsonl_file(folder: Path, *rows: Any) -> Path:
    path = folder / "own.jsonl"
    path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows) + "\n")
    return path


def test_jsonl_fields(tmp_path: Path) -> None:
    path = jsonl_file(
        tmp_path,
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
    first, second = read_dataset("jsonl", jsonl_file(tmp_path, *rows))
    assert first.references == ("a", "b")  # the target is an accepted answer
    assert first.group == second.group
    rows = [{"documents": [f"text {i // 3}"], "query": f"q{i}", "answer": "a"} for i in range(30)]
    path = jsonl_file(tmp_path, *rows)
    train, heldout = (read_dataset("jsonl", path, split=s, heldout_share=0.3) for s in ("train", "heldout"))
    assert (len(train), len(heldout)) == (21, 9)
    assert not {e.documents for e in train} & {e.documents for e in heldout}


def test_jsonl_drops_empty_rows_and_counts_them(tmp_path: Path) -> None:
    row = {"documents": ["one"], "query": "q?", "answer": "a"}
    empty = [{**row, "documents": ["one", " "]}, {**row, "query": ""}, {**row, "answer": ""}, {**row, "documents": []}]
    dataset = read_dataset("jsonl", jsonl_file(tmp_path, row, *empty))
    assert [texts(example) for example in dataset] == [["one"], ["one"]]
    assert dataset.counts.truncated == {"empty document left out": 1}
    assert dataset.counts.dropped == {"empty query": 1, "no answer": 1, "no documents": 1}
    assert "1 dropped: no answer" in str(dataset.counts)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("{not json", "own.jsonl:2 is not JSON"),
        ([1], "own.jsonl:2: expected an object"),
        ({"documents": "text", "query": "q", "answer": "a"}, "'documents' is a list of str or dict, got 'text'"),
        ({"documents": ["x"], "query": "\ud83d", "answer": "a"}, "own.jsonl:2 holds half of a character"),
        ({"documents": [3], "query": "q", "answer": "a"}, "'documents' is a list of str or dict"),
        ({"documents": ["x"], "answer": "a"}, "there is no 'query'; there is 'documents', 'answer'"),
        ({"documents": ["x"], "query": "q"}, "own.jsonl:2: there is no 'answer'"),
    ],
)
def test_jsonl_names_the_line_that_is_wrong(tmp_path: Path, row: Any, message: str) -> None:
    good = {"documents": ["one"], "query": "q?", "answer": "a"}
    with pytest.raises(ValueError, match=message):
        read_dataset("jsonl", jsonl_file(tmp_path, good, row))


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
    with pytest.raises(ValueError, match="fewest_documents"):
        read_dataset("nano", fewest_documents=5, most_documents=2)


def test_unknown_names_options_and_files_are_clear_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"unknown dataset 'squat'; known: 2wikimultihopqa, babi, hotpotqa, jsonl"):
        read_dataset("squat")
    with pytest.raises(ValueError, match=r"'squad' has no option 'num_docs'; it knows: .*num_documents"):
        read_dataset("squad", squad_file(tmp_path), num_docs=3)
    with pytest.raises(ValueError, match="there is no file or folder"):
        read_dataset("squad", tmp_path / "absent.json")
    for name in ("squad", "wikihop"):
        with pytest.raises(ValueError, match=rf"'{name}' needs a path \(data\.path=PATH, or --path PATH\)"):
            read_dataset(name)
        with pytest.raises(ValueError, match="num_documents must be at least 1, not 0"):
            read_dataset(name, squad_file(tmp_path), num_documents=0)
    with pytest.raises(ValueError, match=r"gives no example .*1 dropped: no answer"):
        read_dataset("jsonl", jsonl_file(tmp_path, {"documents": ["x"], "query": "q", "answer": ""}))


def test_registering_is_light_and_repeatable() -> None:
    plugin.register()
    assert {"babi", "jsonl", "nano", "squad"} <= set(datasets.names())
    code = """
import sys
import comb
before = set(sys.modules)
from comb_training.plugin import register
register()
from comb.documents.datasets import datasets
assert "squad" in datasets.names()
added = set(sys.modules) - before
print(sorted(added & {"torch", "transformers", "datasets", "numpy", "pandas"}))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["[]"]  # nothing that `import comb` did not load anyway


def test_squad_articles_that_share_a_title_keep_their_paragraphs(tmp_path: Path) -> None:
    qas = [{"question": "Who?", "id": "x", "answers": [{"text": "Ann", "answer_start": 0}]}]
    articles = [{"title": "T", "paragraphs": [{"context": f"Text {n}.", "qas": qas}]} for n in range(2)]
    articles.append({"title": "", "paragraphs": [{"context": " ", "qas": qas}, {"context": "Text 2.", "qas": qas}]})
    (tmp_path / "s.json").write_text(json.dumps({"data": articles}))
    dataset = read_dataset("squad", tmp_path / "s.json", num_documents=1)
    assert [example.documents[0].text for example in dataset] == ["Text 0.", "Text 1.", "Text 2."]
    assert dataset.counts.dropped == {"empty paragraph": 1}


def asked(**row: Any) -> str:
    """SQuAD JSON of one question."""
    return json.dumps({"data": [{"title": "T", "paragraphs": [{"context": "Text.", "qas": [row]}]}]})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{}", "s.json: 'data' is a list of dict"),
        ("[1]", "s.json: expected an object"),
        ("not json", "s.json is not JSON"),
        ('{"data": [{"title": "x"}]}', r"data\[0\]: 'paragraphs' is a list of dict"),
        (asked(), r"qas\[0\]: there is no 'question'"),
        (asked(question="Who?", answers=[{}]), r"qas\[0\]: answers\[0\]: there is no 'text'"),
        (asked(question="Who?", answers=None), "1 dropped: no answer"),
    ],
)
def test_squad_refuses_other_files_and_rows(tmp_path: Path, content: str, message: str) -> None:
    (tmp_path / "s.json").write_text(content)
    with pytest.raises(ValueError, match=message):
        read_dataset("squad", tmp_path / "s.json")


def test_jsonl_lines_end_at_newlines_only(tmp_path: Path) -> None:
    row = {"documents": ["one\u2028two\x85three"], "query": "q?", "answer": "a"}
    (tmp_path / "own.jsonl").write_text("\ufeff" + json.dumps(row, ensure_ascii=False) + "\r\n", encoding="utf-8")
    (example,) = read_dataset("jsonl", tmp_path / "own.jsonl")
    assert example.documents[0].text == "one\u2028two\x85three"


def test_made_questions_across_documents_are_for_training_and_have_no_answer(tmp_path: Path) -> None:
    rows = [
        {"_id": str(n), "question": f"q{n}?", "answer": "x", "context": [["One", ["A."]], ["Other", ["B."]]]}
        for n in range(10)
    ]
    (tmp_path / "rows.json").write_text(json.dumps(rows))
    train = read_dataset("hotpotqa", tmp_path / "rows.json", split="train", across=3)
    made = [example for example in train if not example.answer]
    assert len(made) == 3 * 8
    assert all("One" in e.query and "Other" in e.query for e in made)
    assert {e.documents for e in made} == {e.documents for e in train}
    assert all(e.answer for e in read_dataset("hotpotqa", tmp_path / "rows.json", split="heldout", across=3))
    assert train.counts.kept == len(train)
    assert len(read_dataset("hotpotqa", tmp_path / "rows.json", split="train", across=3, limit=5)) == 5
