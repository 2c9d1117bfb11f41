"""Sets on the Hub, by way of folders that the package datasets loads: splits, configurations, nulls, clear errors."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import read_dataset
from tests.helpers.rows import HUB_ROWS, texts


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder for sets, with a cache of its own."""
    config = pytest.importorskip("datasets.config", reason="the package datasets is not installed")
    monkeypatch.setattr(config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    return tmp_path / "set"


def save(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))


def save_parquet(folder: Path, name: str, *rows: dict[str, Any]) -> None:
    from datasets import Dataset

    Dataset.from_list(list(rows)).to_parquet(folder / f"{name}.parquet")


hotpot = HUB_ROWS["hotpotqa"]


def test_rows_of_a_split(hub: Path) -> None:
    save_parquet(hub, "train", *map(hotpot, range(4)))
    save_parquet(hub, "validation", hotpot(7))
    for name in ("hotpotqa", "2wikimultihopqa"):
        (example,) = read_dataset(name, f"hf://{hub}?split=validation")
        assert texts(example) == ["One. Two.", "Three."]
        assert (example.query, example.answer, example.id) == ("q7?", "x", "7")
    assert len(read_dataset("hotpotqa", f"hf://{hub}?split=train+validation")) == 5
    assert [example.id for example in read_dataset("hotpotqa", f"hf://{hub}?split=train%5B1:3%5D")] == ["1", "2"]
    with pytest.raises(ValueError, match="has the splits train, validation: add split="):
        read_dataset("hotpotqa", f"hf://{hub}")
    with pytest.raises(ValueError, match=r"can't be loaded .*split"):
        read_dataset("hotpotqa", f"hf://{hub}?split=test")


def test_configurations_and_the_only_split(hub: Path) -> None:
    save(hub, "one", hotpot(1))
    save(hub, "two", {**hotpot(2), "answer": "z"})
    (hub / "README.md").write_text(
        "---\nconfigs:\n- config_name: a\n  data_files: one.jsonl\n- config_name: b\n  data_files: two.jsonl\n---\n"
    )
    assert read_dataset("hotpotqa", f"hf://{hub}?config=b")[0].answer == "z"
    assert read_dataset("hotpotqa", f"hf://{hub}?config=a&split=train")[0].answer == "x"
    with pytest.raises(ValueError, match=r"can't be loaded .*onfig"):
        read_dataset("hotpotqa", f"hf://{hub}?config=c")


def test_a_null_is_missing_or_empty(hub: Path) -> None:
    rows = [
        {"fname": "a", "dialogue": "A: hi", "summary": "s", "summary1": None, "summary2": None},
        {"fname": "b", "dialogue": "B: hi", "summary": None, "summary1": "t", "summary2": "u"},
        {"fname": "c", "dialogue": None, "summary": "s", "summary1": None, "summary2": None},
        {"fname": "d", "dialogue": "D: hi", "summary": None, "summary1": None, "summary2": None},
    ]
    save_parquet(hub, "train", *rows)
    dataset = read_dataset("samsum", f"hf://{hub}")
    assert [example.references for example in dataset] == [("s",), ("t", "u")]
    assert dataset.counts.dropped == {"empty dialogue": 1, "no summary": 1}
    with pytest.raises(ValueError, match=r"hf://.*\[0\]: there is no 'document'"):
        read_dataset("xsum", f"hf://{hub}")


def test_squad_rows_become_articles(hub: Path) -> None:
    rows = [HUB_ROWS["squad"](number) for number in range(16)]
    rows[3]["answers"] = {"text": [], "answer_start": []}
    save_parquet(hub, "train", *rows)
    dataset = read_dataset("squad", f"hf://{hub}", num_documents=2)
    assert (len(dataset), dataset.counts.dropped) == (15, {"unanswerable question": 1})
    for example in dataset:
        assert texts(example).count(f"Text {int(str(example.id)) // 2}.") == 1
        assert {document.title for document in example.documents} == {example.group}  # both from one article
        assert example.references == ("Ann", "Ann B")
    save_parquet(hub, "train", {**rows[1], "answers": ["Ann"]})
    with pytest.raises(ValueError, match=r"\[0\]: 'answers' is a list of objects"):
        read_dataset("squad", f"hf://{hub}")


def test_rows_become_tasks(hub: Path) -> None:
    fields = {"definition": "Do it.", "targets": "o"}
    rows = [{"task_name": f"task{n // 3}_k{n // 3}", "id": str(n), "inputs": f"i{n}", **fields} for n in range(6)]
    save(hub, "train", *rows)
    dataset = read_dataset("natural_instructions", f"hf://{hub}", num_examples=0)
    assert list(map(texts, dataset)) == [["Do it."]] * 6
    assert (dataset[4].query, dataset[4].answer, dataset[4].id, dataset[4].group) == ("i4", "o", "4", "task1_k1")
    save(hub, "train", {**rows[0], "definition": " "})
    with pytest.raises(ValueError, match=r"\[0\]: the task has no instruction"):
        read_dataset("natural_instructions", f"hf://{hub}")


def test_what_save_to_disk_wrote_is_one_line(hub: Path) -> None:
    from datasets import Dataset, DatasetDict

    rows = Dataset.from_list([{"documents": ["One."], "query": "Which?", "answer": "One"}] * 4)
    rows.save_to_disk(hub / "one")
    DatasetDict({"train": rows}).save_to_disk(hub / "dict")
    for name in ("one", "dict"):
        for place in (str(hub / name), *([f"hf://{hub / name}"] if name == "one" else [])):
            with pytest.raises(ValueError, match=rf"{name} was written by save_to_disk of .*: write it with \.to_json"):
                read_dataset(place)
    assert len(read_dataset(f"hf://{hub / 'dict'}", split="all")) == 4


def test_what_cannot_be_reached_says_what_to_do(hub: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (hub / f"{hub.name}.py").write_text("")
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    for name, path, message in (
        ("hotpotqa", "hf:///no/such/folder", "hf:///no/such/folder can't be loaded .*Check name, config and split$"),
        ("hotpotqa", f"hf://{hub}", r"can't be loaded \(RuntimeError: Dataset scripts are no longer supported"),
        ("hotpotqa", "hf://nobody/nothing", "can't be loaded .*HF_HUB_OFFLINE not set.*hf download nobody/nothing"),
        ("hotpotqa", "hf://", "names no set; expected hf://org/name"),
        ("hotpotqa", "hf://org/name?splits=train", "has 'splits=train'; expected hf://org/name"),
        ("hotpotqa", "hf://org/name?split=", "has 'split='"),
        ("babi", "hf://org/name", "no bAbI file"),
        ("nano", "hf://org/name", "reads no file"),
    ):
        with pytest.raises(ValueError, match=message):
            read_dataset(name, path)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"hf://org/name needs the package datasets: pip install"):
        read_dataset("hotpotqa", "hf://org/name")
