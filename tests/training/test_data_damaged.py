"""Damaged rows and files: whatever is wrong is dropped and counted, or refused by file and row, in every reader."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import Dataset, read_dataset
from comb.documents.document import Example
from tests.helpers.rows import HUB_ROWS, ROWS, Row, WriteRows, article, task

HALF = "half \udc00 of one"
UNSEEN = "\u200b\x00\ufeff"
DAMAGES: tuple[Any, ...] = (" \n", UNSEEN, None, HALF, 3, float("nan"), True, [], ["x", None], {"text": None})

OFFICIAL: dict[str, Callable[[int], Row]] = {
    "squad": article,
    "natural_instructions": lambda n: task(f"kind {n}", count=1),
}


def damaged(value: Any) -> Iterator[tuple[Any, Any]]:
    """What was put where, and the value with it there, for each place in a value and each damage."""
    children: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, child in children:
        for put, changed in [*((damage, damage) for damage in DAMAGES), *damaged(child)]:
            copy = deepcopy(value)
            copy[key] = changed
            yield (key, put), copy
    if isinstance(value, dict):
        for key in value:
            yield (key, "missing"), {name: child for name, child in value.items() if name != key}


def is_whole(example: Example) -> bool:
    texts = [example.query, example.answer, *example.references, *(str(each.text) for each in example.documents)]
    labels = [example.id, example.group, *(text for d in example.documents for text in (d.title, d.id) if text)]
    for text in (*texts, *labels):
        str(text).encode()  # half a character can't be written
    named = {label in (None, "", UNSEEN, "None", "nan", "True", "[]", "{}") for label in labels}
    return bool(example.documents) and all(text.strip(f" \n{UNSEEN}") for text in texts) and named == {False}


def outcome(read: Callable[..., Dataset]) -> Dataset | str:
    try:
        return read()
    except ValueError as error:
        return str(error)


def check(read: Callable[[Any], Dataset], rows: list[Row], where: str, *, per_row: int = 1) -> None:
    """Reads the rows with each damage to the first one."""
    whole = read(rows)
    assert len(whole) == whole.counts.read == per_row * len(rows)
    assert not whole.counts.dropped
    outcomes = set()
    for what, row in damaged(rows[0]):
        found = outcome(lambda row=row: read([row, *rows[1:]]))
        outcomes.add(type(found))
        if isinstance(found, str):
            assert where in found, what
            assert "\n" not in found
        else:
            assert all(map(is_whole, found)), (what, [example for example in found if not is_whole(example)])
            assert len(found) == found.counts.kept, what
    assert outcomes == {str, Dataset}


@pytest.mark.parametrize("name", ROWS)
def test_rows_of_a_file(name: str, tmp_path: Path) -> None:
    def read(rows: list[Row]) -> Dataset:
        path.write_text("\n".join(map(json.dumps, rows)))
        return read_dataset(name.partition(",")[0], path)

    path = tmp_path / "rows.jsonl"
    check(read, [ROWS[name](n) for n in range(4)], "rows.jsonl:1")


def test_texts_that_passages_are_cut_from(write_rows: WriteRows) -> None:
    whole = {"id": 1, "title": "T", "text": " ".join(f"word{n}" for n in range(160))}
    for what, row in damaged({**whole, "id": 2}):
        path = write_rows(row, whole)
        found = outcome(lambda path=path: read_dataset("passages", path, words=40, answer_words=8, passages=4))
        assert "rows.jsonl:1" in found if isinstance(found, str) else all(map(is_whole, found)), what


@pytest.mark.parametrize("name", OFFICIAL)
def test_rows_of_official_files(name: str, tmp_path: Path) -> None:
    def read(rows: list[Row]) -> Dataset:
        if name == "squad":
            (tmp_path / "s.json").write_text(json.dumps({"data": rows}))
            return read_dataset(name, tmp_path / "s.json", num_documents=2)
        for number, row in enumerate(rows):
            (tmp_path / f"task{number}_kind.json").write_text(json.dumps(row))
        return read_dataset(name, tmp_path)

    where = "s.json: data[0]" if name == "squad" else "task0_kind.json"
    check(read, [OFFICIAL[name](n) for n in range(3)], where, per_row=2 if name == "squad" else 1)


@pytest.mark.parametrize("name", HUB_ROWS)
def test_rows_of_the_hub(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

    def read(rows: list[Row]) -> Dataset:
        monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: rows)
        return read_dataset(name.partition(",")[0], "hf://org/name")

    check(read, [HUB_ROWS[name](n) for n in range(4)], "hf://org/name[0]")


def test_files_with_a_mark_in_front_packed_or_of_another_system(tmp_path: Path) -> None:
    squad = json.dumps({"data": [article(n) for n in range(3)]})
    story = "1 Mary went to the hall.\r\n2 Where is Mary? \thall\t1\r\n3 Where is Mary?\t \t1\r\n4  \thall\t1\r\n"
    for name, file, text, count in (
        ("squad", "s.json", squad, 6),
        ("jsonl", "own.jsonl", "\r\n".join(json.dumps(ROWS["jsonl"](n)) for n in range(3)) + "\r\n", 3),
        ("xsum", "rows.json", json.dumps([ROWS["xsum"](n) for n in range(3)], indent=1), 3),
        ("babi", "qa1_train.txt", story, 1),
    ):
        for packed in (False, True):
            data = ("\ufeff" + text).encode()
            path = tmp_path / f"{file}{'.gz' * packed}"
            path.write_bytes(gzip.compress(data) if packed else data)
            dataset = read_dataset(name, path, num_documents=1)
            assert len(dataset) == count
            assert all(map(is_whole, dataset))


OWN = {"documents": ["x"], "query": "q", "answer": "a"}
NI = "natural_instructions"
FILES = {"squad": "s.json", NI: "task1_a.json"}


def question(**fields: Any) -> Row:
    return {"data": [{"title": "T", "paragraphs": [{"context": "Text.", "qas": [fields]}]}]}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("jsonl", "1\n{not json", "rows.json:2 is not JSON"),
        (
            "jsonl",
            [OWN, {**OWN, "documents": "text"}],
            r"rows.json\[1\]: 'documents' is a list of texts or objects, got 'text': put it in brackets",
        ),
        ("jsonl", [{"messages": []}], "there is no 'documents'; there is 'messages'"),
        ("jsonl", json.dumps(question(question="Who?")), "as in SQuAD: data=squad data.path=FILE"),
        ("jsonl", [OWN, {**OWN, "query": "\ud83d"}], r"rows.json\[1\] holds half of a character"),
        ("jsonl", [{"documents": ["x"], "answer": "a"}], "there is no 'query'; there is 'documents', 'answer'"),
        ("squad", [1], "s.json: expected an object"),
        ("squad", question(question="Who?", answers=[{}]), r"qas\[0\]: answers\[0\]: there is no 'text'"),
        ("musique", {}, "expected a list of rows, got dict"),
        ("musique", [{**ROWS["musique"](1), "question": 3}], r"rows.json\[0\]: 'question' is a text, got '3'"),
        ("hotpotqa", [{**ROWS["hotpotqa"](1), "context": 7}], r"'context' is a list of \[title"),
        (
            "hotpotqa",
            [{**ROWS["hotpotqa"](1), "context": {"title": ["T", "U"], "sentences": [["One."]]}}],
            "is a list of",
        ),
        ("samsum", [{"dialogue": "d"}], "there is no 'summary' or 'summary1'"),
        ("nq_open", ["not an object"], "expected an object, got str"),
        (
            "longbench",
            [{**ROWS["longbench"](1), "dataset": "hotpot"}],
            r"\[0\]: LongBench has no task 'hotpot'",
        ),
        (NI, task(Instances=[{"input": 3, "output": ["x"]}]), r"a.json: Instances\[0\]: 'input' is a text, got '3'"),
        (NI, task(Definition=[" "]), "task1_a.json: the task has no instruction"),
    ],
)
def test_what_is_said_of_it(tmp_path: Path, name: str, content: Any, message: str) -> None:
    path = tmp_path / FILES.get(name, "rows.json")
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(ValueError, match=message):
        read_dataset(name, tmp_path if name == NI else path)


@pytest.mark.parametrize("name", ["squad", "jsonl", "xsum", "babi", "natural_instructions", "longbench", "passages"])
def test_files_that_hold_no_rows(name: str, tmp_path: Path) -> None:
    row = json.dumps(ROWS["jsonl"](0))
    for file, content in (
        ("empty.jsonl", b""), ("blank.json", b" \n"), ("none.json", b"[]"), ("utf16.json", row.encode("utf-16")),
        ("list.jsonl", f"[{row}, {row}]".encode()), ("nul.json", b"\0" * 9), ("deep.json", b"[" * 100_000),
        ("big.json", b"1" * 10_000), ("twice.jsonl", b'{"answer": "a", "answer": "b"}'),
    ):  # fmt: skip
        path = tmp_path / file
        path.write_bytes(content)
        with pytest.raises(ValueError, match=file.replace(".", r"\.") + r"|gives no example") as found:
            read_dataset(name, path)
        assert "\n" not in str(found.value)


def test_what_holds_no_questions_is_counted(tmp_path: Path) -> None:
    file = tmp_path / "s.json"
    whole = [article(n) for n in range(4)]
    for change, reason in (
        (lambda rows: rows[1].update(paragraphs=None), "article without paragraphs"),
        (lambda rows: rows[1].update(paragraphs=[]), "article without paragraphs"),
        (lambda rows: rows[1]["paragraphs"][0].update(qas=None), "paragraph without questions"),
        (lambda rows: rows[1]["paragraphs"][0].update(qas=[]), "paragraph without questions"),
    ):
        rows = deepcopy(whole)
        change(rows)
        file.write_text(json.dumps({"data": rows}))
        found = read_dataset("squad", file, num_documents=2)
        assert found.counts.dropped[reason] == 1
        assert len(found) == found.counts.kept == 6
    for content in ({"data": None}, {}, {"data": []}, {"data": "x"}, {"data": [3]}, {"version": 2}):
        file.write_text(json.dumps(content))
        with pytest.raises(ValueError, match=r"s\.json: .*'data'"):
            read_dataset("squad", file)
    for number in range(3):
        task = OFFICIAL["natural_instructions"](number) | ({"Instances": None} if number == 1 else {})
        (tmp_path / f"task{number}_kind.json").write_text(json.dumps(task))
    found = read_dataset("natural_instructions", tmp_path)
    assert (found.counts.dropped["task without instances"], len(found)) == (1, found.counts.kept)


@pytest.mark.parametrize("name", ["squad", "jsonl", "xsum", "babi", "natural_instructions", "longbench", "musique"])
def test_files_of_another_kind(name: str, tmp_path: Path) -> None:
    row = json.dumps(ROWS["jsonl"](0)).encode()
    for file, content, words in (
        ("packed.json", gzip.compress(row), "packed by gzip: let its name end in .gz"),
        ("plain.json.gz", row, "not gzipped, or cut off"),
        ("cut.json.gz", gzip.compress(row)[:-6], "not gzipped, or cut off"),
        ("odd.json.gz", gzip.compress(row)[:10] + b"\xff" * 20, "not gzipped, or cut off"),
        ("table.json", b"PAR1\x15\xff\xfe", "not UTF-8 text"),
        ("table.parquet", b"PAR1\x15\xff\xfe", f"name its folder, hf://{tmp_path}"),
        ("rows.jsonl.zst", b"\x28\xb5\x2f\xfd", "unpack it, or pack it by gzip"),
        ("mine.csv", b"documents,query,answer\nx,y,z\n", 'JSONL, a line for each: {"documents": ["..."], "query"'),
        ("mine.xlsx", b"PK", "JSONL, a line for each"),
    ):
        (tmp_path / file).write_bytes(content)
        with pytest.raises(ValueError, match=re.escape(words)) as found:
            read_dataset(name, tmp_path / file)
        assert f"{file} is" in str(found.value)
    (tmp_path / "folder").mkdir()
    with pytest.raises(ValueError, match=r"folder is a folder: name a file in it|no .* in .*folder"):
        read_dataset(name, tmp_path / "folder")


def test_a_folder_of_several_kinds(tmp_path: Path) -> None:
    """Files of other rows are named before any row is used, those of another kind where rows are counted."""
    for n in range(3):
        (tmp_path / f"{n}.jsonl").write_text(json.dumps(ROWS["jsonl"](n)))
    (tmp_path / "more.csv").write_text("a,b")
    (tmp_path / "info.json").write_text("{}")
    found = read_dataset("jsonl", tmp_path)
    assert len(found) == 3
    assert found.counts.noted == {"files of another kind left out: info.json, more.csv": 2}
    (tmp_path / "log.jsonl").write_text(json.dumps({"step": 1, "loss": 2.0}))
    with pytest.raises(ValueError, match=r"1 of 4 files with other rows than documents, query \(log\.jsonl\): move"):
        read_dataset("jsonl", tmp_path)
    bench = tmp_path / "longbench"
    bench.mkdir()
    (bench / "hotpotqa.jsonl").write_text(json.dumps(ROWS["longbench"](1)))
    (bench / "results.jsonl").write_text(json.dumps({"f1": 0.5}))
    with pytest.raises(ValueError, match=r"1 of 2 files with other rows than .* \(results\.jsonl\)"):
        read_dataset("longbench", bench)


def test_a_cell_of_the_hub_that_can_not_be_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets", reason="the package datasets is not installed")

    def rows() -> Iterator[Row]:
        yield ROWS["xsum"](1)
        raise RuntimeError("a page of the table is cut off")

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: rows())
    with pytest.raises(ValueError, match=r"hf://org/name\[1\] can't be read \(RuntimeError: a page"):
        read_dataset("xsum", "hf://org/name")
