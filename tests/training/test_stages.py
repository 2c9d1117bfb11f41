"""`train.stages`: several trainings one after the other, each from the adapter of the one before, in one run."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from comb.hub.card.facts import read_training
from comb_training.config import Config, config_from_dict, trained_config
from comb_training.models.loading import load_checkpoint
from comb_training.train import run_training
from comb_training.trainer.run_log import RunLog
from comb_training.trainer.stages import run_stages, starting_point
from tests.helpers.training import TOKENIZER, backbone, invoke

STAGES = [
    {"name": "copies", "train": {"steps": 3, "learning_rate": 1e-2}, "data": {"query_template": "Repeat {query}"}},
    {"name": "questions", "train": {"epochs": 2, "kl_weight": 1.0, "ce_weight": 0.0}},
]


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Config]:
    backbone().save_pretrained(tmp_path / "backbone")
    TOKENIZER.save_pretrained(tmp_path / "backbone")
    rows = [{"documents": [f"Key {n} is {7 * n}."], "query": f"Key {n}?", "answer": f"{7 * n}"} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def configured(out: str = "out", stages: Any = STAGES, **train: Any) -> Config:
        shape = {"num_encoder_layers": 1, "cross_attention_layers": [1], "options": {"gate": 0.5, "sink": "null"}}
        return config_from_dict(
            {
                "model": {"backbone": str(tmp_path / "backbone"), **shape},
                "data": {"dataset": "jsonl", "path": str(tmp_path / "data.jsonl"), "heldout_share": 0.2},
                "train": {
                    "batch_size": 4, "answers": "gold", "output_dir": str(tmp_path / out), "logging_steps": 1,
                    "eval_answers": 0, "stages": stages, **train,
                },
            }
        )  # fmt: skip

    return configured


class KilledError(BaseException):
    """Ends a run as a signal would: nothing of ours catches it."""


def killed(monkeypatch: pytest.MonkeyPatch, config: Config, stage: str, step: int) -> None:
    whole = RunLog.advance

    def advance(log: RunLog, done: int) -> None:
        if done == step and (log.path.parent.name.endswith(stage) or stage == ""):
            raise KilledError
        whole(log, done)

    with monkeypatch.context() as patch:
        patch.setattr(RunLog, "advance", advance)
        with pytest.raises(KilledError):
            run_training(config, progress=False)


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def test_stages_are_the_runs_they_stand_for(make: Callable[..., Config], tmp_path: Path) -> None:
    """By hand: one run per stage, the second from the adapter of the first."""
    result = run_training(make(eval_steps=2), progress=False)
    first, second = run_stages(make(eval_steps=2))
    by_hand = [
        run_training(config_from_dict(_at(stage.config.to_dict(), tmp_path / name, init_from)), progress=False)
        for stage, name, init_from in ((first, "a", None), (second, "b", tmp_path / "a"))
    ]
    expected = weights(tmp_path / "b")
    assert weights(tmp_path / "out").keys() == expected.keys()
    for name, tensor in weights(tmp_path / "out").items():
        assert torch.equal(tensor, expected[name]), name
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["losses"] == [list(pair) for pair in result.record["losses"]]
    losses = [*by_hand[0].record["losses"], *((3 + step, loss) for step, loss in by_hand[1].record["losses"])]
    assert result.record["losses"] == losses
    assert [step for step, _ in record["heldout_losses"]] == [0, 2, 3, 3, 5, 7, 9]
    assert [(part["name"], part["first_step"], part["steps"]) for part in record["stages"]] == [
        ("copies", 0, 3), ("questions", 3, 6),
    ]  # fmt: skip
    assert record["steps"] == 9
    assert trained_config(tmp_path / "out") == make(eval_steps=2)
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    load_checkpoint(str(tmp_path / "out"), make())
    # negative control: the second stage alone, or with a first one that learned nothing, is another adapter
    other = run_training(make("alone", stages=STAGES[1:]), progress=False)
    assert other.record["losses"][0][1] != pytest.approx(by_hand[1].record["losses"][0][1], rel=1e-4)


def _at(config: dict[str, Any], folder: Path, init_from: Path | None) -> dict[str, Any]:
    """The same run in another folder, from another adapter."""
    config["train"]["output_dir"] = str(folder)
    if init_from is not None:
        config["model"] |= {"init_from": str(init_from), "options": {}, "cross_attention_layers": None}
    return config


@pytest.mark.parametrize(("stage", "step"), [("copies", 2), ("", 4)], ids=["first", "second"])
def test_killed_in_a_stage_and_resumed_is_the_same_run(
    make: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stage: str, step: int
) -> None:
    straight = run_training(make("straight", save_steps=1), progress=False)
    killed(monkeypatch, make(save_steps=1), stage, step)
    assert not (tmp_path / "out" / "training.json").exists()
    resumed = run_training(make(save_steps=1), resume="auto", progress=False)
    assert resumed.record["losses"] == straight.record["losses"]
    for name, tensor in weights(tmp_path / "straight").items():
        assert torch.equal(tensor, weights(tmp_path / "out")[name]), name


def test_a_resumed_run_knows_its_stage(
    make: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make(save_steps=1)
    killed(monkeypatch, config, "", 4)
    stages = run_stages(config)
    auto = starting_point(stages, "auto")
    assert (auto.stage, auto.checkpoint) == (1, tmp_path / "out" / "checkpoint-3")
    assert [record["steps"] for record in auto.records] == [3]
    named = starting_point(stages, tmp_path / "out" / "stages" / "1-copies" / "checkpoint-2")
    assert (named.stage, named.records) == (0, [])
    assert caplog.messages == []
    changed = run_stages(make(save_steps=1, stages=[{**STAGES[0], "train": {"steps": 5}}, STAGES[1]]))
    assert starting_point(changed, "auto").stage == 1
    assert "stays as it is, though train.steps, train.learning_rate changed" in caplog.text
    (tmp_path / "elsewhere" / "checkpoint-1").mkdir(parents=True)
    with pytest.raises(ValueError, match="is no checkpoint of a stage"):
        starting_point(stages, tmp_path / "elsewhere" / "checkpoint-1")
    # between two stages: the second begins at its beginning
    for old in (tmp_path / "out").glob("checkpoint-*"):
        shutil.rmtree(old)
    assert (starting_point(stages, "auto").stage, starting_point(stages, "auto").checkpoint) == (1, None)
    # a run that starts anew leaves nothing that could be taken for its own
    killed(monkeypatch, config, "copies", 1)
    assert (starting_point(stages, "auto").stage, starting_point(stages, "auto").checkpoint) == (0, None)


def test_what_a_stage_has_of_its_own() -> None:
    first, second = run_stages(
        config_from_dict(
            {
                "data": {"mixture": [{"dataset": "squad"}], "epoch_examples": 9, "path": "data", "head": "Read."},
                "train": {
                    "epochs": 1, "warmup": 0.1, "output_dir": "out",
                    "stages": [
                        {"name": "a", "data": {"dataset": "passages", "path": "books.jsonl"}, "train": {"steps": 7}},
                        {"name": "b", "train": {"warmup": 0.2}},
                    ],
                },
            }
        )
    )  # fmt: skip
    assert (first.config.data.dataset, first.config.data.mixture, first.config.data.head) == ("passages", (), "Read.")
    assert (first.config.train.steps, first.config.train.epochs, first.config.train.warmup) == (7, None, 0.1)
    assert (second.config.data.dataset, second.config.data.epoch_examples) == ("mixture", 9)
    assert (second.config.train.steps, second.config.train.epochs, second.config.train.warmup) == (None, 1, 0.2)
    assert [stage.folder for stage in (first, second)] == [Path("out/stages/1-a"), Path("out")]
    assert first.config.train.answers_dir == second.config.train.answers_dir == str(Path("out/answers"))


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"stages": [{"train": {"steps": 2}}]}, r"stages\[0\] needs a name"),
        ({"stages": [{"name": "a", "step": 2}]}, r"unknown key train\.stages\[0\]\.step"),
        ({"stages": [{"name": "a/b"}]}, "letters, digits"),
        ({"stages": [{"name": "a"}, {"name": "a"}]}, "two stages have the same name"),
        ({"stages": [{"name": "a", "train": {"output_dir": "x"}}]}, "holds for all stages"),
        ({"stages": [{"name": "a"}], "method": "block"}, "train.method=block makes none"),
    ],
)
def test_refused_stages(train: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        config_from_dict({"train": train})


def test_a_mistake_in_the_last_stage_is_found_before_the_first_one_runs(make: Callable[..., Config]) -> None:
    config = make(stages=[{"name": "a"}, {"name": "b", "train": {"learning_rat": 1}}])
    with pytest.raises(ValueError, match=r"train\.stages, b: unknown key train\.learning_rat; did you mean"):
        run_training(config, progress=False)
    assert not Path(config.train.output_dir).exists()


def test_the_command_shows_all_stages(make: Callable[..., Config], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(make().to_dict()))
    planned = invoke("train", str(path), "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert "Optimizer steps: 3." in planned.output
    assert "Optimizer steps: 6." in planned.output
    assert not (tmp_path / "out").exists()
    trained = invoke("train", str(path), "--no-eval")
    assert trained.exit_code == 0, trained.output
    for text in ("stage copies", "stage questions", "copies: loss", "questions: loss", "in 6 steps"):
        assert text in trained.output
    assert "stages" not in json.loads((tmp_path / "out" / "stages" / "1-copies" / "training.json").read_text())
    found = read_training(tmp_path / "out")
    assert found is not None
    assert [name for name, _ in found["datasets"]] == ["data.jsonl"]
