"""Natural-Instructions: instruction and examples as documents, tasks on one side, distractors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import Dataset, read_dataset
from tests.helpers.rows import Row, instances, shots, task, texts

NI = "natural_instructions"
Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    def files(**tasks: Row) -> Path:
        for name, content in tasks.items():
            (tmp_path / f"{name}.json").write_text(json.dumps(content))
        return tmp_path

    return files


def ten_tasks(write: Write) -> Path:
    return write(**{f"task00{n}_kind_{n}": task(f"kind {n}") for n in range(10)})


def sides(name: str, path: Path, **options: Any) -> tuple[Dataset, Dataset]:
    return read_dataset(name, path, split="train", **options), read_dataset(name, path, split="heldout", **options)


def test_instruction_and_examples_are_the_documents(write: Write) -> None:
    path = write(task002_quoref_answer_generation=task("this"))
    dataset = read_dataset(NI, path)
    instruction, first, second = dataset[0].documents
    assert (instruction.title, instruction.text) == ("Task: quoref answer generation", "Do this.\nBe short.")
    assert first.text == "Input: shown 0\nOutput: shot 0"
    assert first.title == "Example of the task: quoref answer generation"
    assert second.text == "Input: shown 1\nOutput: shot 1"
    assert (dataset[0].query, dataset[0].answer, dataset[0].references) == ("in this0", "out 0", ("out 0", "other"))
    assert (dataset[0].id, dataset[0].group) == ("this-0", "task002_quoref_answer_generation")
    assert {example.documents for example in dataset} == {dataset[0].documents}
    assert list(read_dataset(NI, path / "task002_quoref_answer_generation.json")) == list(dataset)
    assert texts(read_dataset(NI, path, num_examples=0)[0]) == ["Do this.\nBe short."]


def test_distractors_are_other_tasks_of_the_same_side(write: Write) -> None:
    path = ten_tasks(write)
    for dataset in sides(NI, path, num_documents=4, num_examples=1, heldout_share=0.5):
        groups = {str(example.group) for example in dataset}
        assert len(groups) == 5
        for example in dataset:
            own = f"Task: kind {str(example.group)[-1]}"
            titles = [str(document.title) for document in example.documents]
            assert len(set(titles)) == 4
            assert titles.count(own) == 1
            assert {f"task00{title[-1]}_kind_{title[-1]}" for title in titles} <= groups
            assert example.query.startswith(f"{own}\nInput: in ")
    places = {[str(d.title) for d in e.documents].index(f"Task: kind {e.group[-1]}") for e in dataset if e.group}
    assert len(places) > 1
    again = read_dataset(NI, path, num_documents=4, seed=3)
    assert list(again) == list(read_dataset(NI, path, num_documents=4, seed=3))
    assert [e.documents for e in again] != [e.documents for e in read_dataset(NI, path, num_documents=4, seed=4)]


def test_a_distractor_has_neither_the_instruction_nor_the_name_of_another_document(write: Write) -> None:
    same = {f"task00{n}_a_{n}": task("one", Definition="Do one.") for n in range(4)}
    path = write(**same, task008_kind=task("x"), task009_kind=task("y"))
    dataset = read_dataset(NI, path, num_documents=6, num_examples=0)
    for example in dataset:
        assert len(set(texts(example))) == len(example.documents)
        titles = [document.title for document in example.documents]
        assert len(set(titles)) == len(titles)
    assert dataset.counts.truncated == {"task with fewer other tasks than num_documents needs": 6}


def test_tasks_or_instances_are_on_one_side(write: Write) -> None:
    path = ten_tasks(write)
    train, heldout = sides(NI, path)
    assert (len(train), len(heldout)) == (24, 6)
    assert not {example.group for example in train} & {example.group for example in heldout}
    # the second task has the inputs of the first
    path = write(task010_a=task("k", count=20), task011_b=task("k", count=20))
    train, heldout = sides(NI, path, group_by="instance")
    assert len(train) + len(heldout) == 30 + 40
    assert {document.title for example in heldout for document in example.documents} & {
        document.title for example in train for document in example.documents
    }
    asked = [{example.query for example in side} for side in (train, heldout)]
    assert not asked[0] & asked[1]
    whole = {(example.id, example.query) for example in read_dataset(NI, path)}
    assert {(example.id, example.query) for side in (train, heldout) for example in side} == whole


def test_what_is_left_out_is_counted(write: Write) -> None:
    odd = ((" ", ["x"]), ("i", [" "]), ("shown 1", "o"))
    rows = [*instances(3), *({"input": given, "output": output} for given, output in odd)]
    broken = {"input": "no output", "output": ""}
    path = write(task1_a=task(Instances=rows, **{"Positive Examples": [broken, *shots(2)]}))
    dataset = read_dataset(NI, path, num_examples=3, max_instances_per_task=2)
    assert dataset.counts.dropped == {
        "empty query": 1,
        "no answer": 1,
        "instance that is one of its task's worked examples": 1,
        "over max_instances_per_task": 1,
    }
    assert dataset.counts.truncated == {
        "worked example without input or output left out": 1,
        "task with fewer worked examples than num_examples": 1,
    }
    assert (dataset.counts.read, dataset.counts.kept, len(dataset)) == (6, 2, 2)
    cut = read_dataset(NI, path, num_documents=2)
    assert {len(example.documents) for example in cut} == {2}
    assert cut.counts.truncated["task with more documents than num_documents"] == 1
    limited = read_dataset(NI, path, limit=1)
    assert (len(limited), limited.counts.dropped["over the limit"]) == (1, 2)


def test_paths_and_options_are_checked(write: Write, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"there is no task\*.json in"):
        read_dataset(NI, tmp_path)
    path = write(task1_a=task())
    for options, message in (
        ({"num_examples": -1}, "expected num_examples >= 0"),
        ({"max_instances_per_task": 0}, "max_instances_per_task >= 1"),
        ({"group_by": "row"}, "group_by is 'task' or 'instance'"),
    ):
        with pytest.raises(ValueError, match=message):
            read_dataset(NI, path, **options)
