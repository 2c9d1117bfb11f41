"""A mixture through a whole run: order, teacher, evaluation of one set, and what is never kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from comb.documents.datasets import Dataset, datasets
from comb.documents.document import PromptBuilder
from comb_training.answers import answer_prepared
from comb_training.config import Config, DataConfig, config_from_dict
from comb_training.data import mixture
from comb_training.data.sources import Source
from comb_training.nano import CHECKPOINT
from comb_training.train import run_training
from comb_training.trainer.prepare import prepare
from tests.helpers.training import invoke

SETS = [
    {"dataset": "nano", "name": "a", "weight": 3, "options": {"scenes": 40, "questions": 4}},
    {"dataset": "nano", "name": "b", "options": {"scenes": 20, "questions": 2}, "query_template": "Now: {query}"},
]


def config(folder: Path, data: dict[str, Any] | None = None, **train: Any) -> Config:
    content = {
        "model": {"backbone": "nano", "num_encoder_layers": 1, "cpu_threads": 1, "device": "cpu"},
        "data": {"mixture": SETS, "epoch_examples": 24, "cache_dir": str(folder / "cache"), **(data or {})},
        "train": {"steps": 2, "batch_size": 8, "output_dir": str(folder / "out"), "answers": "gold", **train},
        "eval": {"limit": 8, "methods": ["none"], "timing_examples": 0, "max_new_tokens": 4},
    }
    return config_from_dict(content)


def test_a_run_from_the_cache_gives_the_same_losses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_training(config(tmp_path, eval_steps=1), progress=False)
    monkeypatch.setattr(mixture, "tokenize", None)
    again = run_training(config(tmp_path, eval_steps=1), progress=False)
    assert again.record["losses"] == first.record["losses"]
    assert again.record["heldout_losses"] == first.record["heldout_losses"]
    assert len(first.record["heldout_losses"]) == 3
    told = json.loads((tmp_path / "out" / "training.json").read_text())
    assert {name: own["examples"] for name, own in told["tokens_by_set"].items()} == {"a": 18, "b": 6}
    assert told["tokens"]["document_tokens"].keys() == {"min", "median", "p90", "max", "total"}
    assert told["data"]["sets"]["a"]["kept"] == 18


def test_a_teacher_reads_what_the_student_reads(tmp_path: Path) -> None:
    # long questions are dropped before the shares are taken: both sides must do that
    data = {"epoch_examples": None, "max_query_tokens": 24}
    own = answer_prepared(prepare(config(tmp_path, data, answers="on_policy")), progress=False)
    taught = prepare(config(tmp_path, data, answers="on_policy", teacher=str(CHECKPOINT), answers_dir=str(tmp_path)))
    assert sum(counts.dropped[f"query and answer of more than {24} tokens"] for counts in taught.counts.sets.values())
    assert answer_prepared(taught, progress=False).examples == own.examples
    assert {mixture.set_name(example.id) for example in own.examples} == {"a", "b"}


def test_the_card_and_one_set_alone_are_evaluated(tmp_path: Path) -> None:
    run_training(config(tmp_path), progress=False)
    arguments = ["eval", str(tmp_path / "out"), "--out", str(tmp_path / "r.json")]
    for more, sets in (((), {"a", "b"}), (("--dataset", "b"), {"b"})):
        result = invoke(*arguments, *more)
        assert result.exit_code == 0, result.output
        written = json.loads((tmp_path / "r.json").read_text())
        assert set(written["data"]["sets"]) == sets
        assert written["data"]["kept"] == 8


COMMIT = "0123456789" * 4


def source(path: str | None) -> Source:
    return Source(None, "squad", path, {})


@pytest.mark.parametrize(
    ("path", "can_change"),
    [
        ("hf://org/name", True),
        ("hf://org/name?split=train&revision=main", True),
        (f"hf://org/name?revision={COMMIT}0", True),
        (f"hf://org/name?revision={COMMIT}", False),
        (f"hf://org/name?revision={COMMIT}&split=train", False),
        ("hf:///folder?split=train", False),
        ("folder/file.json", False),
        (None, False),
    ],
)
def test_what_can_change_unseen(path: str | None, can_change: bool) -> None:
    assert source(path).can_change == can_change


def test_sets_on_the_hub_are_told_apart(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}")
    paths = [
        f"hf://org/one?revision={COMMIT}", f"hf://org/two?revision={COMMIT}",
        f"hf://org/one?split=train&revision={COMMIT}", f"hf://{tmp_path}?split=a", f"hf://{tmp_path}?split=b",
    ]  # fmt: skip
    keys = [json.dumps(source(path).key((), "train", None)) for path in paths]
    assert len(set(keys)) == len(paths)
    (tmp_path / "train.jsonl").write_text("{ }")
    assert json.dumps(source(paths[-1]).key((), "train", None)) != keys[-1]
    assert json.dumps(source(paths[0]).key((), "train", None)) == keys[0]


def test_a_branch_on_the_hub_is_read_anew(
    tmp_path: Path, builder: PromptBuilder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    generated = datasets.get("nano")(split="train", scenes=4)

    def reader(path: str | None = None, *, split: str, seed: int, limit: int | None) -> Dataset:
        return Dataset(generated.examples[:4], generated.counts)

    monkeypatch.setitem(datasets._entries, "nano", reader)
    data = DataConfig("nano", "hf://org/name", cache_dir=str(tmp_path / "cache"))
    examples, _ = mixture.read_tokenized(data, builder, 64, split="train", limit=None)
    assert "revision=COMMIT" in caplog.text
    assert not (tmp_path / "cache").exists()
    pinned = replace(data, path=f"hf://org/name?revision={COMMIT}")
    kept, _ = mixture.read_tokenized(pinned, builder, 64, split="train", limit=None)
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert kept == examples
