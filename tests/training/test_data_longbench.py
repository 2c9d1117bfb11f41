"""LongBench: how each task's context becomes documents, its queries, and what is counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import read_dataset
from comb_training.data.readers.longbench import TASKS
from tests.helpers.rows import ROWS, Row, WriteRows, texts

SHOTS = {
    "trec": "Question: Who?\nType: Individual\nQuestion: Where?\nType: City",
    "triviaqa": "Passage:\nA text.\nQuestion:\nWho?\nAnswer:\nAnn\nPassage:\nB text.\nQuestion:\nWhere?\nAnswer:\nRome",
    "samsum": "Dialogue: A: hi\r\nB: hm\nSummary: They met.\nDialogue: C: bye\nSummary: C left.",
    "lsht": "新闻内容：\n一\n类别：体育\n新闻内容：\n二\n类别：经济",
}


def row(dataset: str, context: str, **fields: Any) -> Row:
    return {**ROWS["longbench"](1), "answers": ["x", "y"], "dataset": dataset, "context": context, **fields}


@pytest.mark.parametrize("name", ["hotpotqa", "2wikimqa", "musique", "multi_news"])
def test_numbered_passages(write_rows: WriteRows, name: str) -> None:
    context = "Passage 1:\nT\nOne.\n\nPassage 2:\nU\nsays\nPassage 1:\nand\nPassage 7:\nPassage 3:\nV\nThree.\n"
    (example,) = read_dataset("longbench", write_rows(row(name, context)))
    assert texts(example) == ["T\nOne.", "U\nsays\nPassage 1:\nand\nPassage 7:", "V\nThree."]
    assert (example.answer, example.references, example.id) == ("x", ("x", "y"), "1")
    assert ("q?" in example.query) == (name != "multi_news")


def test_numbers_stay_where_the_answer_is_one(write_rows: WriteRows) -> None:
    for name, mark in (("passage_count", "Paragraph {}: "), ("passage_retrieval_en", "Paragraph {}: "),
                       ("passage_retrieval_zh", "段落{}：")):  # fmt: skip
        parts = [mark.format(n) + "text" for n in (1, 2, 3)]
        (example,) = read_dataset("longbench", write_rows(row(name, "\n\n".join(parts), answers=["Paragraph 2"])))
        assert texts(example) == parts
    (example,) = read_dataset("longbench", write_rows(row("dureader", "文章1\n标题：a\n内容\n文章2\n标题：b")))
    assert texts(example) == ["标题：a\n内容", "标题：b"]


@pytest.mark.parametrize("name", sorted(SHOTS))
def test_worked_examples(write_rows: WriteRows, name: str) -> None:
    dataset = read_dataset("longbench", write_rows(row(name, SHOTS[name])))
    assert len(dataset[0].documents) == 2
    assert "\n".join(map(str, texts(dataset[0]))) == SHOTS[name]
    whole = read_dataset("longbench", write_rows(row(name, SHOTS[name])), whole=True)
    assert texts(whole[0]) == [SHOTS[name]]
    assert not whole.counts.truncated
    assert dataset[0].query.endswith("\nq?")
    assert not dataset.counts.truncated


def test_bare_rows_have_no_words_of_the_reader(write_rows: WriteRows) -> None:
    context = "Passage 1:\nOne.\n\nPassage 2:\nTwo."
    (example,) = read_dataset("longbench", write_rows(row("hotpotqa", context)), bare=True)
    assert texts(example) == ["Passage 1:\nOne.", "Passage 2:\nTwo."]
    assert example.query == "q?"
    (summary,) = read_dataset("longbench", write_rows(row("gov_report", "A report.", input="")), bare=True)
    assert texts(summary) == ["A report."]  # its row has no input, which is no reason to leave it out
    with pytest.raises(ValueError, match="1 dropped: empty query"):
        read_dataset("longbench", write_rows(row("hotpotqa", context, input="")), bare=True)


def test_every_task_has_documents_and_a_query(write_rows: WriteRows) -> None:
    assert len(TASKS) == 21
    plain = "  Passage 1:\na\nPassage 2:\nb {input}\n"
    for name, task in TASKS.items():
        context = plain if task.mark is None else "no mark"
        rows = row(name, context, input="what {input} is"), row(name, context, input="")
        dataset = read_dataset("longbench", write_rows(*rows))
        assert texts(dataset[0]) == [context]  # as one document
        asks = "{input}" in task.query
        assert ("what {input} is" in dataset[0].query) == asks
        assert dataset.counts.dropped == ({"empty query": 1} if asks else {})
        kept = {"context without its task's marks, kept as one document": len(dataset)}
        assert dataset.counts.truncated == ({} if task.mark is None else kept)


def test_tasks_of_a_file_and_of_a_folder(write_rows: WriteRows, tmp_path: Path) -> None:
    path = write_rows(row("hotpotqa", "Passage 1:\na"), row("trec", "Question: b"), row("hotpotqa", "Passage 1:\nc"))
    assert len(read_dataset("longbench", path)) == 3
    dataset = read_dataset("longbench", path, task="hotpotqa")
    assert (texts(dataset[0]), len(dataset)) == (["a"], 2)
    assert dataset.counts.dropped == {"row of another task": 1}
    path.unlink()
    write_rows(row("hotpotqa", "Passage 1:\na"), name="hotpotqa.jsonl")
    write_rows(row("hotpotqa_e", "Passage 1:\nb"), name="hotpotqa_e.jsonl")
    write_rows(row("trec", "Question: b"), name="trec.jsonl")
    assert texts(read_dataset("longbench", tmp_path, task="hotpotqa")[0]) == ["a"]
    assert texts(read_dataset("longbench", tmp_path, task="hotpotqa_e")[0]) == ["b"]
    assert len(read_dataset("longbench", tmp_path)) == 3
    with pytest.raises(ValueError, match=r"there is no lcc.jsonl in"):
        read_dataset("longbench", tmp_path, task="lcc")
    with pytest.raises(ValueError, match="LongBench has no task 'hotpot'; it has: narrativeqa"):
        read_dataset("longbench", tmp_path, task="hotpot")


def test_questions_about_one_context_are_on_one_side(write_rows: WriteRows) -> None:
    path = write_rows(*(row("qasper", f"context {n // 2}", _id=str(n)) for n in range(20)))
    sides = [read_dataset("longbench", path, split=side) for side in ("train", "heldout")]
    assert [len(side) for side in sides] == [16, 4]
    assert not {texts(e)[0] for e in sides[0]} & {texts(e)[0] for e in sides[1]}


def test_what_is_left_out_is_counted(write_rows: WriteRows) -> None:
    context = "Passage 1:\na\nPassage 2:\n \nPassage 3:\nc"
    path = write_rows(row("hotpotqa", context), row("hotpotqa", context, answers=[]), row("hotpotqa", " "))
    dataset = read_dataset("longbench", path, num_documents=1)
    assert texts(dataset[0]) == ["a"]
    assert dataset.counts.dropped == {"no answer": 1, "no documents": 1}
    assert dataset.counts.truncated == {"empty document left out": 1, "row with more documents than num_documents": 1}
