"""Whole runs from a configuration, and the commands: train, eval, demo."""

from __future__ import annotations

import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from comb import CombForCausalLM
from comb_training.cli import demonstration
from comb_training.config import config_from_dict, load_config, trained_config
from comb_training.models import training_method
from comb_training.nano import CHECKPOINT
from comb_training.train import run_training
from comb_training.trainer.checkpoints import CheckpointError, alone_in
from tests.helpers.processes import wait_for
from tests.helpers.training import TOKENIZER, invoke


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The demo sets torch's threads for its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def config_for(tiny: Path, tmp_path: Path) -> Callable[..., Any]:
    rows = [
        {"documents": [f"The key of {n} is {7 * n}.", "Nothing here."], "query": f"Key of {n}?", "answer": f"{7 * n}"}
        for n in range(12)
    ]
    rows.append({"documents": ["x" * 300], "query": "Too long?", "answer": "yes"})
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))

    def make(**train: Any) -> Any:
        train = {"steps": 4, "batch_size": 4, "answer_max_new_tokens": 6, "output_dir": str(tmp_path / "out"), **train}
        model = {"backbone": str(tiny), "num_encoder_layers": 1, "cross_attention_layers": [1]}
        data = {"dataset": "jsonl", "path": str(tmp_path / "data.jsonl"), "heldout_share": 0.2}
        return config_from_dict({"model": model, "data": data, "train": train})

    return make


@pytest.fixture
def file_for(config_for: Callable[..., Any], tmp_path: Path) -> Callable[..., str]:
    """The same in a file, whose name it gives."""

    def write(**train: Any) -> str:
        (tmp_path / "run.yaml").write_text(yaml.safe_dump(config_for(**train).to_dict()))
        return str(tmp_path / "run.yaml")

    return write


@pytest.mark.parametrize("answers", ["on_policy", "gold"])
def test_run_training_end_to_end(config_for: Callable[..., Any], tmp_path: Path, answers: str) -> None:
    config = config_for(answers=answers)
    result = run_training(config, progress=False)
    assert all(math.isfinite(loss) for _, loss in result.record["losses"])
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert (result.record["steps"], report["steps"], report["seed"]) == (4, 4, 0)
    assert report["data"]["truncated"]["document of more than 128 tokens"] <= 1
    assert report["versions"]["torch"] == torch.__version__
    assert (report["teacher"] is None) == (answers == "gold")
    assert (tmp_path / "out" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert trained_config(tmp_path / "out") == config
    loaded = CombForCausalLM.from_pretrained(tmp_path / "out")
    torch.testing.assert_close(loaded.state_dict(), result.model.state_dict())
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= names
    assert not any(name.endswith((".bin", ".pt")) for name in names)


def test_scores_of_an_older_adapter_do_not_stay_in_the_card(
    config_for: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = {"method": "comb", "n": 1, "em": 1.0, "f1": 1.0}
    (tmp_path / "out").mkdir()
    for name in ("results.json", "results-squad.json"):
        (tmp_path / "out" / name).write_text(json.dumps({"argv": ["comb"], "results": [row]}))
    (tmp_path / "out" / "results.png").write_bytes(b"")
    with monkeypatch.context() as full:
        full.setattr(CombForCausalLM, "save_pretrained", Mock(side_effect=OSError("no space")))
        with pytest.raises(CheckpointError, match="no space"):
            run_training(config_for(answers="gold"), progress=False)
    assert (tmp_path / "out" / "results.json").exists()  # as the adapter that it is of
    run_training(config_for(answers="gold"), progress=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "exact match" not in card
    assert "results.png" not in card
    assert "trained before" not in caplog.text  # there was none
    (tmp_path / "out" / "results-mine.json").write_text(json.dumps({"argv": ["comb"], "results": [row]}))
    monkeypatch.setattr("comb_training.train.prepare", Mock(side_effect=RuntimeError("the first step")))
    with pytest.raises(RuntimeError, match="the first step"):
        run_training(config_for(answers="gold"), progress=False)
    assert (
        "out holds an adapter that was trained before: this run replaces it when it ends, and deletes its"
        in caplog.text
    )
    assert "scores (results-mine.json). To keep it, choose another train.output_dir" in caplog.text
    assert "| data | `data.jsonl` (not on the Hub) |" in card


@pytest.mark.parametrize("trackers", ["[wandb]", "[all]"])
def test_a_tracker_without_a_key_is_named_before_anything_is_answered(
    file_for: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trackers: str
) -> None:
    wandb = pytest.importorskip("wandb")
    monkeypatch.setattr(wandb, "setup", lambda: SimpleNamespace(settings=SimpleNamespace(mode="online")))
    login = Mock(side_effect=wandb.errors.UsageError("no key here"))
    monkeypatch.setattr(wandb, "login", login)
    result = invoke("train", file_for(), f"train.report_to={trackers}")
    assert "train.report_to: wandb has no key that it can use (no key here)" in str(result.exception)
    login.assert_called_once_with()  # versions before 0.31 know no `prompt`
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("own", "message"),
    [
        ({"optimizer": {"type": "AdamW"}}, "leave out 'optimizer': a run has its own, as train.learning_rate"),
        ({"scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": "auto"}}}, "leave out 'scheduler'"),
        ({"train_batch_size": 16}, 'train_batch_size is 16 and the run has 4: write "auto" there'),
    ],
)
def test_deepspeed_s_own_settings_are_refused_before_anything_is_answered(
    file_for: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: dict[str, Any], message: str
) -> None:
    pytest.importorskip("deepspeed")
    monkeypatch.setenv("LOCAL_RANK", "0")
    (tmp_path / "zero.json").write_text(json.dumps({"zero_optimization": {"stage": 2}, **own}))
    result = invoke("train", file_for(), f"train.deepspeed={tmp_path / 'zero.json'}")
    assert message in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_wandb_offline(config_for: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true"), ("PROJECT", "comb-test")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    run_training(config_for(answers="gold", report_to=["wandb"], logging_steps=1), progress=False)
    wandb.finish()
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    [log] = run.glob("*.wandb")
    # written by a process of wandb's own, which may not be through when finish() is
    names = (b"train/loss", b"eval/loss", b"model.backbone", b"data.path")
    wait_for(lambda: all(name in log.read_bytes() for name in names))


def test_the_terminal_keeps_what_was_measured_on_held_out_questions(
    config_for: Callable[..., Any], capsys: pytest.CaptureFixture[str]
) -> None:
    run_training(config_for(answers="gold", eval_steps=2))
    assert re.search(r"^step 2: eval_loss [\d.]+$", capsys.readouterr().out, re.MULTILINE)


def test_documents_on_both_sides_of_the_split_are_said(
    config_for: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record = run_training(config_for(answers="gold", kl_weight=1.0), progress=False).record["heldout"]
    assert (record["documents"], record["also_trained_on"]) == (record["examples"] + 1, 1)
    wanted = f"1 of {record['documents']} documents of the held-out questions stand in rows that are trained on"
    assert wanted in caplog.text
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"1 of their {record['documents']} documents stand in training rows" in card


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("train.report_to=wandbb", "train.report_to: wandbb is not installed"),
        (f"train.output_dir={__file__}/out", "test_runs.py is no folder that can be written to"),
        ("train.deepspeed=configs/deepspeed/zero2.json", "train.deepspeed needs a launcher"),
        ("model.options={max_document_token: 9}", "model.options=.*'max_document_token'.*max_document_tokens"),
        ("data.max_query_tokens=1", "no example is left to train on: .* dropped: query and answer of more than 1"),
        ("eval.methods=[full, comp]", "unknown method 'comp'; known: .*comb"),
        ("eval.methods=['full@fixedd:3']", "unknown splitter 'fixedd'"),
        ("eval.methods=[hypic]", "method 'hypic' is for hybrid models"),
        ("eval.max_new_tokens=5000", "no question is left.*: prompt and 5000 new tokens exceed"),
        ("eval={methods: [comb, none], max_new_tokens: 5000}", "is left.*: prompt without documents and 5000"),
        (f"train.answers_dir={__file__}", "train.answers_dir: .*test_runs.py is no folder that can be written to"),
    ],
)
def test_mistakes_are_named_before_anything_is_answered(
    file_for: Callable[..., str], tmp_path: Path, override: str, message: str
) -> None:
    result = invoke("train", file_for(), override)
    assert isinstance(result.exception, ValueError)
    assert re.search(message, str(result.exception))
    assert not (tmp_path / "out").exists()


def test_what_stands_in_the_way_of_the_results_is_named_before_the_training(
    file_for: Callable[..., str], tmp_path: Path
) -> None:
    path, out = file_for(answers="gold"), tmp_path / "out"
    for name in ("results.json", "results-squad.json", "loss.png", "model.safetensors"):
        (out / name).mkdir(parents=True)
        result = invoke("train", path)
        assert re.search(rf"train.output_dir: .*{name} is a folder", str(result.exception))
        assert [file.name for file in out.iterdir()] == [name]
        (out / name).rmdir()
    for content in (b"---\nlicense: [\n---\n", b"\xff"):
        (out / "README.md").write_bytes(content)
        result = invoke("train", path)
        assert re.fullmatch(r".*: train.output_dir: \S*README.md.*", str(result.exception))  # one line
        assert (out / "README.md").read_bytes() == content
        assert not (out / "log.jsonl").exists()


def test_a_model_s_own_folder_is_no_output_dir(file_for: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny, tmp_path / "model")
    result = invoke("train", file_for(answers="gold"), f"train.output_dir={tmp_path / 'model'}")
    assert re.search("train.output_dir: .*model holds a model of another kind", str(result.exception))
    assert {path.name for path in (tmp_path / "model").iterdir()} == {path.name for path in tiny.iterdir()}


def test_a_run_without_an_evaluation_ends_well(file_for: Callable[..., str], tmp_path: Path) -> None:
    path, losses = file_for(answers="gold", steps=2), []
    for options in (["eval.methods=[]"], ["eval.limit=0"], ["--no-eval"], ["eval.methods=[comb]"]):
        result = invoke("train", path, *options)
        assert result.exit_code == 0, result.output
        assert ("no evaluation" in result.output) == ("[comb]" not in options[0])
        losses.append(json.loads((tmp_path / "out" / "training.json").read_text())["losses"])
    with pytest.raises(ValueError, match=r"train\.eval_steps measures held-out examples and eval\.limit=0 takes none"):
        load_config(path, ["eval.limit=0", "train.eval_steps=1"])
    # what was tried before the training left no trace in it
    assert losses[1:] == losses[:-1]
    result = invoke("eval", str(tmp_path / "out"), "eval.methods=[]")
    assert "eval.methods is empty" in str(result.exception)


def test_eval_refuses_results_that_it_could_not_write(config_for: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text(json.dumps({"config": config_for().to_dict()}))
    (tmp_path / "old.json").mkdir()
    for out, message in (
        (Path(__file__) / "r.json", "test_runs.py is no folder that can be written to"),
        (tmp_path / "old.json", "old.json is a folder"),
        (tmp_path / "results.png", "name a .json file"),
    ):
        # there are no weights: it is refused before they are looked for
        result = invoke("eval", str(tmp_path), "--out", str(out))
        assert re.search(message, str(result.exception))


def test_train_then_eval_on_the_same_held_out_rows(
    file_for: Callable[..., str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, out = file_for(answers="gold", save_steps=2), tmp_path / "out"
    trained = invoke("train", path, "eval.methods=[full, comb, none]", "eval.max_new_tokens=4")
    assert trained.exit_code == 0, trained.output
    assert "loss" in trained.output
    assert "none" in trained.output
    first = json.loads((out / "results.json").read_text())
    assert [row["method"] for row in first["results"]] == ["full", "comb", "none"]
    assert (out / "results.png").exists()
    again = invoke("eval", str(out), "--out", str(tmp_path / "again.json"))
    assert again.exit_code == 0, again.output
    second = json.loads((tmp_path / "again.json").read_text())
    assert [row["predictions"] for row in second["results"]] == [row["predictions"] for row in first["results"]]
    assert second["data"] == first["data"]
    caplog.clear()
    resumed = invoke("train", path, "--resume", "auto", "--no-eval", "train.steps=5", "data.seed=1", "eval.limit=3")
    assert resumed.exit_code == 0, resumed.output
    assert "in 5 steps" in resumed.output
    assert "checkpoint-4 was made with other values of data.seed, train.steps: it goes on" in caplog.text
    assert "of an earlier run" not in caplog.text
    assert invoke("train", path, "--no-eval").exit_code == 0
    assert "checkpoint-5 of an earlier run goes when this one writes its first" in caplog.text


def test_eval_finds_the_rows_from_another_folder_and_says_that_they_are_others_now(
    file_for: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert invoke("train", file_for(answers="gold"), "data=data.jsonl", "--no-eval").exit_code == 0
    assert str(tmp_path) not in (tmp_path / "out" / "training.json").read_text()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    asked = ("eval", str(tmp_path / "out"), "--methods", "none", "eval.max_new_tokens=2")
    found = invoke(*asked)
    assert found.exit_code == 0, found.output
    assert "data isn't what it was" not in found.output
    with (tmp_path / "data.jsonl").open("a") as file:  # the split is made anew
        file.write('\n{"documents": ["New."], "query": "What is new?", "answer": "this"}\n')
    assert "the data isn't what it was at the training" in invoke(*asked).output
    assert "data isn't what it was" not in invoke(*asked, "--split", "all").output


def test_rows_that_change_while_they_are_trained_on_are_others_too(
    config_for: Callable[..., Any], tmp_path: Path
) -> None:
    def edit(run: Any) -> None:
        with (tmp_path / "data.jsonl").open("a") as file:
            file.write('\n{"documents": ["New."], "query": "What is new?", "answer": "this"}\n')

    run_training(config_for(answers="gold"), progress=False, prepared=edit)
    asked = invoke("eval", str(tmp_path / "out"), "--methods", "none", "eval.max_new_tokens=2")
    assert "the data isn't what it was at the training" in asked.output


def test_one_run_at_a_time_writes_into_a_folder(config_for: Callable[..., Any], tmp_path: Path) -> None:
    config = config_for(answers="gold")
    with alone_in(tmp_path / "out"), pytest.raises(ValueError, match=r"another run is writing to .*out: wait for"):
        run_training(config, progress=False)
    assert list((tmp_path / "out").iterdir()) == []
    run_training(config, progress=False)


def test_a_pad_token_that_the_backbone_has_no_row_for_fills_no_rows(
    config_for: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    shutil.copytree(tiny, tmp_path / "padded")
    tokenizer = AutoTokenizer.from_pretrained(tiny)
    rows = AutoModelForCausalLM.from_pretrained(tiny).get_input_embeddings().num_embeddings
    tokenizer.add_tokens([f"<unused{n}>" for n in range(rows - len(tokenizer))])
    tokenizer.add_special_tokens({"pad_token": "<pad!>"})
    assert tokenizer.pad_token_id == rows
    tokenizer.save_pretrained(tmp_path / "padded")
    config = config_for()  # its own answers, over prompts of different lengths
    run_training(replace(config, model=replace(config.model, backbone=str(tmp_path / "padded"))), progress=False)


def test_commands_say_what_is_missing(file_for: Callable[..., str], tiny: Path, tmp_path: Path) -> None:
    (tmp_path / "training.json").write_text('{"config": {}}')
    for command, message in (
        (["eval", str(tiny)], "add data=FILE"), (["eval", str(tmp_path / "absent")], "absent is no folder here"),
        (["train", file_for(), "--resume", str(tmp_path / "absent")], "no checkpoint folder"),
        (["eval", str(tmp_path), "data=''"], "is empty: give it a value"),
    ):  # fmt: skip
        result = invoke(*command)
        assert isinstance(result.exception, ValueError)
        assert message in str(result.exception)


def test_a_demo_that_was_stopped_asks_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is in its folder is an earlier run's."""
    monkeypatch.setattr(demonstration, "run_training", lambda config: SimpleNamespace(terminated="SIGTERM"))
    result = invoke("demo", "--output-dir", str(tmp_path))
    assert result.exit_code == 143, result.output
    assert "stopped by SIGTERM" in result.output


def test_the_demo_trains_as_the_nano_recipe_does() -> None:
    recipe = load_config(Path(__file__).resolve().parents[2] / "configs" / "nano.yaml")
    ours = demonstration.demo_config(recipe.train.output_dir, recipe.train.steps, recipe.train.seed)
    assert (ours.data, ours.train) == (recipe.data, recipe.train)
    assert replace(ours.model, device=recipe.model.device) == recipe.model


@pytest.mark.skipif(not (CHECKPOINT / "config.json").exists(), reason=f"needs the nano checkpoint at {CHECKPOINT}")
def test_demo_fails_when_the_encoder_has_learned_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole demo in small: two steps of training are too few, and it must say so."""
    whole = demonstration.demo_config

    def small(*arguments: Any) -> Any:
        config = whole(*arguments)
        data = replace(config.data, options={"scenes": 4, "questions": 4})
        return replace(config, data=data, train=replace(config.train, steps=2))

    monkeypatch.setattr(demonstration, "demo_config", small)
    out = tmp_path / "demo"
    result = invoke("demo", "--output-dir", str(out), "--questions", "12")
    assert result.exit_code == 1, result.output
    assert "missed" in result.output
    assert "encoder on, cached" in result.output
    content = json.loads((out / "results.json").read_text())
    scores = {row["method"]: row["em"] for row in content["results"]}
    assert list(scores) == list(demonstration.METHODS)
    assert scores["full"] == scores["prefix"] > 0.8
    assert scores["comb"] < 0.9 * scores["full"]
    assert scores["none"] < 0.2
    assert "`nano`, held-out side" in (out / "README.md").read_text()
    assert {"model.safetensors", "results.png", "loss.png", "training.json"} <= {path.name for path in out.iterdir()}


def test_evaluating_on_the_training_dataset_keeps_its_split(
    config_for: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comb_training.cli import evaluate

    run_training(config_for(answers="gold"), progress=False)
    seen: list[Any] = []
    monkeypatch.setattr(evaluate, "show_evaluation", lambda model, tokenizer, settings, *a, **k: seen.append(settings))
    evaluate.evaluate(str(tmp_path / "out"), ["data=jsonl", f"data.path={tmp_path / 'data.jsonl'}"])
    specs = "full,naive:rotate=false,quantize=int8"
    evaluate.evaluate(str(tmp_path / "out"), ["data=squad", "data.path=elsewhere.json"], methods=specs)
    assert seen[0].data.heldout_share == 0.2
    data = seen[1].data
    assert (data.dataset, data.path, data.heldout_share) == ("squad", "elsewhere.json", None)
    assert seen[1].eval.methods == ("full", "naive:rotate=false,quantize=int8")


def test_what_earlier_versions_recorded_is_still_evaluated(
    config_for: Callable[..., Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert all(trained_config(folder) for folder in (CHECKPOINT.parents[2] / "adapters").iterdir())
    assert caplog.text == ""  # of those that come with the repository nothing is to be said
    config = config_for(answers="gold").to_dict()
    config["train"] |= {"method": "block", "torch_compile": False, "stages": []}
    config["data"] |= {"cache": True}
    config["model"] |= {"device": "cuda"}  # where it was trained
    (tmp_path / "training.json").write_text(json.dumps({"config": config}))
    found = trained_config(tmp_path)
    assert found is not None
    assert found.data == config_for().data
    assert found.model.device == "auto"
    assert "passed over: data.cache, train.torch_compile, train.stages" in caplog.text


def test_what_is_loaded_to_go_on_trains_and_the_backbone_is_frozen(
    config_for: Callable[..., Any], tiny: Path, tmp_path: Path
) -> None:
    config, adapter = config_for(), str(tmp_path / "adapter")

    def trained(**model: Any) -> set[str]:
        changed = replace(config, model=replace(config.model, **model))
        loaded = training_method("comb").load(changed)
        return {name for name, parameter in loaded.named_parameters() if parameter.requires_grad}

    fresh = training_method("comb").load(config)
    fresh.requires_grad_(False).save_pretrained(adapter, tokenizer=TOKENIZER)
    names = {name for name, _ in fresh.named_parameters()}
    assert trained(init_from=adapter) == {name for name in names if not name.startswith("backbone.")}
    assert trained(init_from=adapter, num_encoder_layers=fresh.config.encoder_config.num_hidden_layers)
    for wrong, message in (
        ({"num_encoder_layers": 7}, "can't change the adapter of model.init_from, which has"),
        ({"cross_attention_layers": (0,)}, "can't change the adapter of model.init_from, which has"),
        ({"options": {"max_document_tokens": 9}}, "can't change the adapter"),
        ({"init_from": str(tiny)}, "not a COMB adapter"),
        ({"backbone": "nano"}, f"model.backbone=nano can't change .* which is on {tiny.resolve()}"),
    ):
        with pytest.raises(ValueError, match=message):
            trained(**{"init_from": adapter, **wrong})


def test_an_adapter_is_saved_in_the_backbones_dtype(config_for: Callable[..., Any], tmp_path: Path) -> None:
    config = config_for(answers="gold", steps=2, save_steps=1)
    config = replace(config, model=replace(config.model, dtype="bfloat16"))
    trained = run_training(config, progress=False).model
    out = Path(config.train.output_dir)
    # the master weights of a run that goes on are not rounded
    for folder, dtype in ((out, torch.bfloat16), (out / "checkpoint-1", torch.float32)):
        assert {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()} == {dtype}
    state = AutoModelForCausalLM.from_pretrained(out).state_dict()
    own = {name: value for name, value in trained.state_dict().items() if not name.startswith("backbone.")}
    assert all(torch.equal(value, state[name]) for name, value in own.items())
