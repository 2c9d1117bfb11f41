"""A mixture through a whole run: order, teacher, and evaluation of one set."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comb_training.answers import answer_prepared
from comb_training.config import Config, config_from_dict
from comb_training.data import mixture
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
        "data": {"mixture": SETS, "epoch_examples": 24, **(data or {})},
        "train": {"steps": 2, "batch_size": 8, "output_dir": str(folder / "out"), "answers": "gold", **train},
        "eval": {"limit": 8, "methods": ["none"], "max_new_tokens": 4},
    }
    return config_from_dict(content)


def test_a_run_tells_of_each_set(tmp_path: Path) -> None:
    result = run_training(config(tmp_path, eval_steps=1), progress=False)
    assert len(result.record["heldout_losses"]) == 3
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
