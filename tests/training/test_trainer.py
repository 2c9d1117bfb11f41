"""The trainer: gradients that don't depend on batching, groups, schedule, checkpoints without the backbone, resume."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import typer
import yaml
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from typer.testing import CliRunner

from comb import CombForCausalLM, Prompt
from comb.documents.document import PromptBuilder
from comb.evaluation.run import evaluate
from comb_training import plugin
from comb_training.cli import demo
from comb_training.config import TrainConfig, config_from_dict, load_config
from comb_training.data.batches import Collator, TrainingExample
from comb_training.data.mixture import read_examples
from comb_training.models.checkpoints import CheckpointError, TrainingDivergedError, checkpoints, load_trainable
from comb_training.nano import CHECKPOINT
from comb_training.train import run_training, trained_config
from comb_training.trainer.losses import target_loss
from comb_training.trainer.prepare import prepare
from comb_training.trainer.schedule import Schedule, total_steps
from comb_training.trainer.trainer import CombTrainer, batch_sampler, parameter_groups


def byte_tokenizer() -> PreTrainedTokenizerFast:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(["<pad>", "<end>", *alphabet])}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, pad_token="<pad>", eos_token="<end>")


TOKENIZER = byte_tokenizer()


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    """The demo sets torch's threads for its process."""
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def backbone(seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(TOKENIZER), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        initializer_range=0.1,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval()


def comb_model(gate: float = 0.0, on: Any = None) -> CombForCausalLM:
    on = backbone() if on is None else on
    model = CombForCausalLM.from_backbone(on, num_encoder_layers=1, cross_attention_layers=[1])
    for name, parameter in model.named_parameters():
        if name.endswith("gate"):
            torch.nn.init.constant_(parameter, gate)
    return model


def examples(count: int = 12) -> list[TrainingExample]:
    """Questions over three sets of documents, with targets of very different lengths."""
    generator = torch.Generator().manual_seed(3)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(2, len(TOKENIZER), (length,), generator=generator).tolist())

    documents = [(ids(9), ids(5)), (ids(7),), (ids(4), ids(6), ids(3))]
    return [
        TrainingExample(Prompt((2,), documents[n % 3], ids(2 + n % 4)), (*ids(1 + (5 * n) % 11), 1), str(n))
        for n in range(count)
    ]


def trainer(model: Any, folder: Path, rows: list[TrainingExample] | None = None, **config: Any) -> CombTrainer:
    settings = TrainConfig(**{"steps": 4, "batch_size": 4, "logging_steps": 1, "output_dir": str(folder), **config})
    return CombTrainer(model, settings, examples() if rows is None else rows, TOKENIZER, progress=False)


class GradientCatcher(TrainerCallback):
    def __init__(self) -> None:
        self.gradients: dict[str, torch.Tensor] = {}

    def on_pre_optimizer_step(self, *_: Any, model: Any = None, **__: Any) -> None:
        self.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


# --- the loss -------------------------------------------------------------------------------------------------------


def one_step(folder: Path, batch_size: int, accumulation: int, **budget: int) -> tuple[float, dict[str, torch.Tensor]]:
    catcher = GradientCatcher()
    config = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "steps": 1, "max_grad_norm": 0.0}
    config |= budget
    run = trainer(comb_model(gate=0.5), folder, **config)
    run.add_callback(catcher)
    run.train()
    return run.losses[0][1], catcher.gradients


def test_loss_and_gradients_do_not_depend_on_the_split_into_batches(tmp_path: Path) -> None:
    loss, gradients = one_step(tmp_path, 12, 1)
    assert {name.split(".")[0] for name in gradients} == {"encoder", "cross_blocks"}
    buckets = {"batch_query_tokens": 40, "batch_document_tokens": 30}
    batches = len(batch_sampler(examples(), TrainConfig(batch_size=12, **buckets)))
    assert batches > 3
    # (5, 3) ends with a batch of two; the last one sorts by length
    for batch_size, accumulation, budget in ((6, 2, {}), (3, 4, {}), (5, 3, {}), (12, batches, buckets)):
        other_loss, other = one_step(tmp_path, batch_size, accumulation, **budget)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_a_mean_of_batch_means_would_not_pass(tmp_path: Path) -> None:
    """Negative control: the examples above tell a mean over tokens from a mean over batches."""
    model, rows = comb_model(gate=0.5), examples()
    order = [index for batch in trainer(model, tmp_path, rows).sampler for index in batch]

    def mean_loss(indices: list[int]) -> float:
        batch = Collator(0)([rows[index] for index in indices])
        labels = batch.pop("labels")
        with torch.no_grad():
            return float(target_loss(model(**batch), labels))

    halves = (mean_loss(order[:6]) + mean_loss(order[6:])) / 2
    loss, _ = one_step(tmp_path, 12, 1)
    assert mean_loss(order) == pytest.approx(loss, rel=1e-5)
    assert halves != pytest.approx(loss, rel=1e-3)


def test_the_loss_is_the_backbones_own(tmp_path: Path) -> None:
    model, batch = comb_model(gate=0.5), Collator(0)(examples())
    labels = batch["labels"]
    with torch.no_grad():
        output = model(**batch)
    torch.testing.assert_close(target_loss(output, labels), output.loss)
    count = labels[:, 1:].ne(-100).sum()
    torch.testing.assert_close(target_loss(output, labels, num_items_in_batch=2 * count), output.loss / 2)


# --- what is trained, and how ---------------------------------------------------------------------------------------


def test_training_lowers_the_loss_and_leaves_the_backbone_alone(tmp_path: Path) -> None:
    model = comb_model()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run = trainer(model, tmp_path, steps=30, batch_size=12, learning_rate=1e-2)
    run.train()
    losses = [loss for _, loss in run.losses]
    assert len(losses) == 30
    assert losses[-1] < 0.8 * losses[0]
    after = model.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in after if name.startswith("backbone."))
    assert any(not torch.equal(before[name], after[name]) for name in after if name.startswith("encoder."))
    assert any(not torch.equal(before[name], after[name]) for name in after if name.startswith("cross_blocks."))


def test_gates_learn_faster_and_only_matrices_decay() -> None:
    model = comb_model()
    groups = parameter_groups(model, learning_rate=1e-3, gate_multiplier=10, weight_decay=0.1)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    matrices, vectors, gates = ([names[id(p)] for p in group["params"]] for group in groups)
    assert gates
    assert all(name.endswith("gate") for name in gates)
    assert not any(name.endswith("gate") for name in matrices + vectors)
    assert [group["lr"] for group in groups] == pytest.approx([1e-3, 1e-3, 1e-2])
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0, 0.0]
    assert any("norm" in name for name in vectors)
    assert not any("norm" in name for name in matrices)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(matrices + vectors + gates) == trainable
    assert not any(name.startswith("backbone.") for name in trainable)


def test_nothing_to_train_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no trainable parameter"):
        trainer(backbone().requires_grad_(False), tmp_path)
    with pytest.raises(ValueError, match="no examples"):
        trainer(comb_model(), tmp_path, [])
    with pytest.raises(ValueError, match="without documents"):
        trainer(comb_model(), tmp_path, [TrainingExample(Prompt((2,), (), (3,)), (4,), "x")])


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    model = comb_model(gate=0.5)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.startswith("encoder.")).view(-1)[0] = math.nan
    run = trainer(model, tmp_path, steps=3)
    with pytest.raises(TrainingDivergedError, match=r"the loss is nan at step 1 .*learning_rate"):
        run.train()
    assert not (tmp_path / "model.safetensors").exists()


def poisoned(run: CombTrainer, *bad: int) -> list[float]:
    """Makes the losses of these calls NaN; the list fills with the clean ones."""
    clean: list[float] = []

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
        value = target_loss(outputs, labels, num_items_in_batch)
        clean.append(float(value.detach()))
        return value * math.nan if len(clean) in bad else value

    run.compute_loss_func = loss
    return clean


def test_bad_batches_are_left_out_up_to_a_limit(tmp_path: Path) -> None:
    config = {"batch_size": 6, "gradient_accumulation_steps": 2, "steps": 1, "max_grad_norm": 0.0}
    half, catcher = GradientCatcher(), GradientCatcher()
    run = trainer(comb_model(gate=0.5), tmp_path / "a", max_bad_steps=1, **config)
    run.add_callback(catcher)
    poisoned(run, 2)
    run.train()
    assert run.bad_batches == 1
    assert all(bool(torch.isfinite(parameter).all()) for parameter in run.trained_model.parameters())
    # what is left is the first batch's gradient, for the same count of tokens
    control = trainer(comb_model(gate=0.5), tmp_path / "b", **config)
    control.compute_loss_func = lambda outputs, labels, num_items_in_batch=None: (
        target_loss(outputs, labels, num_items_in_batch) * (1.0 if next(calls) == 0 else 0.0)
    )
    calls = itertools.count()
    control.add_callback(half)
    control.train()
    assert any(float(gradient.abs().max()) > 0 for gradient in half.gradients.values())
    for name, gradient in half.gradients.items():
        torch.testing.assert_close(catcher.gradients[name], gradient, msg=name)
    # the batch can be looked at
    kept = torch.load(tmp_path / "a" / "bad-batch-step-1-rank-0.pt", weights_only=False)
    assert kept["step"] == 1
    assert math.isnan(kept["loss"])
    assert kept["inputs"]["labels"].shape == kept["inputs"]["input_ids"].shape
    assert len(kept["inputs"]["documents"]) == 6


def test_too_many_bad_batches_stop_the_run(tmp_path: Path) -> None:
    run = trainer(comb_model(gate=0.5), tmp_path, max_bad_steps=1, steps=4)
    poisoned(run, 1, 3)
    with pytest.raises(TrainingDivergedError, match=r"step 3 .*bad-batch-step-3-rank-0.pt"):
        run.train()


def test_out_of_memory_names_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(comb_model(), tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(run.trained_model, "forward", full)
    with pytest.raises(RuntimeError, match=r"step 1 in a batch of 4 rows of up to \d+ tokens over \d documents of \d+"):
        run.train()


def test_the_held_out_loss_is_the_mean_over_its_target_tokens(tmp_path: Path) -> None:
    rows = examples(11)
    run = CombTrainer(
        comb_model(gate=0.5),
        TrainConfig(steps=4, batch_size=4, eval_steps=2, learning_rate=1e-2, output_dir=str(tmp_path)),
        examples(), TOKENIZER, heldout=rows, progress=False,
    )  # fmt: skip
    run.train()
    logged = [(row["step"], row["eval_loss"]) for row in run.state.log_history if "eval_loss" in row]
    assert [step for step, _ in logged] == [2, 4]
    assert logged[0][1] != logged[1][1]
    batch = Collator(0)(rows)
    labels = batch.pop("labels")
    with torch.no_grad():
        assert logged[-1][1] == pytest.approx(float(target_loss(run.trained_model.eval()(**batch), labels)), rel=1e-5)
    with pytest.raises(ValueError, match="eval_steps needs held-out"):
        trainer(comb_model(), tmp_path, eval_steps=2)


# --- schedule -------------------------------------------------------------------------------------------------------


def test_schedule_warms_up_and_cools_down() -> None:
    schedule = Schedule(100, None, warmup=0.1, final=0.02)
    factors = [schedule(step) for step in range(101)]
    assert 0 < factors[0] <= 0.1
    assert factors[5] == pytest.approx(0.5)
    assert max(factors) == factors[10] == pytest.approx(1.0)
    assert factors[100] == pytest.approx(0.02)
    assert all(earlier >= later for earlier, later in itertools.pairwise(factors[10:]))


def test_schedule_follows_the_clock_when_that_is_ahead() -> None:
    schedule = Schedule(10**9, 100.0, warmup=0.1, final=0.0)
    schedule.used = 5.0
    assert schedule(3) == pytest.approx(0.5)
    schedule.used = 100.0
    assert schedule(4) == pytest.approx(0.0)
    by_steps = Schedule(10, 100.0, warmup=0.0, final=0.0)
    by_steps.used = 1.0
    assert by_steps.progress(9) == pytest.approx(0.9)


def test_a_run_ends_when_its_seconds_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # every look at the clock is a second later
    monkeypatch.setattr("comb_training.trainer.callbacks.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    run = trainer(comb_model(), tmp_path, steps=None, max_seconds=20.0)
    run.train()
    assert run.state.global_step == 20
    rates = [row["learning_rate"] for row in run.state.log_history if "learning_rate" in row]
    # it cooled down although nobody knew the number of steps
    assert rates[1] == pytest.approx(2e-3)
    assert rates[-1] < 0.1 * rates[1]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"epochs": 2.0}, 2 * 7),
        ({"epochs": 0.5}, 4),
        ({"steps": 5, "epochs": 2.0}, 5),
        ({"steps": 500, "epochs": 1.0}, 7),
    ],
)
def test_total_steps(config: dict[str, Any], expected: int) -> None:
    assert total_steps(TrainConfig(**config), 7) == expected


# --- checkpoints ----------------------------------------------------------------------------------------------------


def test_checkpoints_hold_the_trained_parameters_only(tmp_path: Path) -> None:
    model = comb_model()
    trainer(model, tmp_path, steps=2, save_steps=2).train()
    folder = tmp_path / "checkpoint-2"
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert set(load_file(folder / "model.safetensors")) == trained
    assert not (folder / "training_args.bin").exists()
    optimizer = torch.load(folder / "optimizer.pt", weights_only=True)
    assert len(optimizer["state"]) == len(trained)
    loaded = CombForCausalLM.from_pretrained(folder, backbone=backbone())
    torch.testing.assert_close(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_is_exact_in_the_middle_of_an_epoch(tmp_path: Path, accumulation: int) -> None:
    # 6 batches an epoch, stopped in the second epoch
    config = {"steps": 10, "batch_size": 2, "save_steps": 5, "gradient_accumulation_steps": accumulation}
    straight = trainer(comb_model(), tmp_path / "a", **config)
    straight.train()
    resumed = trainer(comb_model(), tmp_path / "a", **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "a" / "checkpoint-5"))
    assert resumed.losses == straight.losses
    assert len(straight.losses) == 10
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name


def test_a_full_disk_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    config = {"steps": 6, "batch_size": 2, "save_steps": 2, "save_total_limit": 1}
    straight = trainer(comb_model(), tmp_path / "a", **config)
    straight.train()
    run = trainer(comb_model(), tmp_path / "b", **config)

    class Full(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 3:
                resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # no file beyond this many bytes

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run.add_callback(Full())
    try:
        with pytest.raises(CheckpointError, match=r"step 4 could not be written .*checkpoint-2 is intact"):
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["checkpoint-2", "log.jsonl"]
    resumed = trainer(comb_model(), tmp_path / "b", **config)
    resumed.train(resume_from_checkpoint=str(tmp_path / "b" / "checkpoint-2"))
    assert resumed.losses == straight.losses
    assert [path.name for path in checkpoints(tmp_path / "b")] == ["checkpoint-6"]


def test_half_of_a_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "partial" / "checkpoint-9").mkdir(parents=True)
    assert checkpoints(tmp_path) == []
    trainer(comb_model(), tmp_path, steps=2, save_steps=1, save_total_limit=1).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "log.jsonl"]


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    comb_model().save_pretrained(tmp_path)
    other = CombForCausalLM.from_backbone(backbone(), num_encoder_layers=2, cross_attention_layers=[0, 1])
    with pytest.raises(ValueError, match="doesn't fit this model: missing"):
        load_trainable(other, tmp_path)


# --- a whole run ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def backbone_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("backbone")
    backbone().save_pretrained(folder)
    TOKENIZER.save_pretrained(folder)
    return folder


@pytest.fixture
def config_for(backbone_folder: Path, tmp_path: Path) -> Callable[..., Any]:
    data = tmp_path / "data.jsonl"
    rows = [
        {"documents": [f"The key of {n} is {7 * n}.", "Nothing here."], "query": f"Key of {n}?", "answer": f"{7 * n}"}
        for n in range(12)
    ]
    rows.append({"documents": ["x" * 300], "query": "Too long?", "answer": "yes"})
    data.write_text("\n".join(map(json.dumps, rows)))

    def make(**train: Any) -> Any:
        train = {"steps": 4, "batch_size": 4, "answer_max_new_tokens": 6, "output_dir": str(tmp_path / "out"), **train}
        return config_from_dict(
            {
                "model": {"backbone": str(backbone_folder), "num_encoder_layers": 1, "cross_attention_layers": [1]},
                "data": {"dataset": "jsonl", "path": str(data), "heldout_share": 0.2},
                "train": train,
            }
        )

    return make


@pytest.mark.parametrize("answers", ["on_policy", "gold"])
def test_run_training_end_to_end(config_for: Callable[..., Any], tmp_path: Path, answers: str) -> None:
    config = config_for(answers=answers)
    result = run_training(config, progress=False)
    assert result.steps == 4
    assert all(math.isfinite(loss) for _, loss in result.losses)
    report = json.loads((tmp_path / "out" / "training.json").read_text())
    assert report["steps"] == 4
    assert report["seed"] == 0
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


def test_scores_of_an_older_adapter_do_not_stay_in_the_card(config_for: Callable[..., Any], tmp_path: Path) -> None:
    row = {"method": "comb", "n": 1, "em": 1.0, "f1": 1.0}
    (tmp_path / "out").mkdir()
    for name in ("results.json", "results-squad.json"):
        (tmp_path / "out" / name).write_text(json.dumps({"argv": ["comb"], "results": [row]}))
    run_training(config_for(answers="gold"), progress=False)
    card = (tmp_path / "out" / "README.md").read_text()
    assert "exact match" not in card
    assert "| data | `jsonl` (not on the Hub) |" in card


def test_wandb_offline(config_for: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb")
    for name, value in (("MODE", "offline"), ("DIR", str(tmp_path)), ("SILENT", "true"), ("PROJECT", "comb-test")):
        monkeypatch.setenv(f"WANDB_{name}", value)
    run_training(config_for(answers="gold", report_to=["wandb"], run_name="a run", logging_steps=1), progress=False)
    wandb.finish()
    [run] = (tmp_path / "wandb").glob("offline-run-*")
    [log] = run.glob("*.wandb")
    deadline = time.monotonic() + 60  # written by a process of wandb's own, which may not be through when finish() is
    while b"train/loss" not in log.read_bytes():
        assert time.monotonic() < deadline, log.read_bytes()[:200]
        time.sleep(0.05)


def test_prepare_trains_nothing_and_counts(config_for: Callable[..., Any], tmp_path: Path) -> None:
    run = prepare(config_for())
    assert run.counts.kept == len(run.examples) == run.statistics.examples
    assert run.steps == 4
    assert run.parameters["trainable"] < run.parameters["all"]
    assert not (tmp_path / "out").exists()


def test_trained_config_of_other_folders(tmp_path: Path) -> None:
    assert trained_config(tmp_path) is None
    (tmp_path / "training.json").write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        trained_config(tmp_path)


# --- commands -------------------------------------------------------------------------------------------------------


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    plugin.add_commands(app)
    return CliRunner().invoke(app, list(arguments), env={"COLUMNS": "120"})


def test_dry_run_shows_the_plan_and_writes_nothing(config_for: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(config_for().to_dict()))
    result = invoke("train", str(path), "train.steps=7", "--dry-run")
    assert result.exit_code == 0, result.output
    assert "steps: 7" in result.output
    assert "Optimizer steps: 7." in result.output
    assert "rows kept" in result.output
    assert not (tmp_path / "out").exists()


def test_train_then_eval_on_the_same_held_out_rows(config_for: Callable[..., Any], tmp_path: Path) -> None:
    path, out = tmp_path / "run.yaml", tmp_path / "out"
    content = config_for(answers="gold", save_steps=2).to_dict()
    content["eval"].update(methods=["full", "comb", "none"], max_new_tokens=4, timing_examples=1)
    path.write_text(yaml.safe_dump(content))
    trained = invoke("train", str(path))
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
    resumed = invoke("train", str(path), "--resume", "auto", "--no-eval", "train.steps=5")
    assert resumed.exit_code == 0, resumed.output
    assert "in 5 steps" in resumed.output


def test_commands_say_what_is_missing(backbone_folder: Path, tmp_path: Path) -> None:
    result = invoke("eval", str(backbone_folder))
    assert isinstance(result.exception, ValueError)
    assert "--dataset" in str(result.exception)
    path = tmp_path / "run.yaml"
    path.write_text(f"model: {{backbone: {backbone_folder}}}")
    result = invoke("train", str(path), "--resume", str(tmp_path / "absent"))
    assert "no checkpoint folder" in str(result.exception)


def test_the_demo_trains_as_the_nano_recipe_does() -> None:
    recipe = load_config(Path(__file__).resolve().parents[2] / "configs" / "nano.yaml")
    ours = demo.demo_config(recipe.train.output_dir, recipe.train.max_seconds, recipe.train.seed)
    assert (ours.data, ours.train) == (recipe.data, recipe.train)
    assert dataclasses.replace(ours.model, device=recipe.model.device) == recipe.model


@pytest.mark.skipif(not (CHECKPOINT / "config.json").exists(), reason=f"needs the nano checkpoint at {CHECKPOINT}")
def test_demo_fails_when_the_encoder_has_learned_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole demo in small: two steps of training are too few, and it must say so."""
    whole = demo.demo_config

    def small(*arguments: Any) -> Any:
        config = whole(*arguments)
        data = dataclasses.replace(config.data, options={"scenes": 4, "questions": 4})
        return dataclasses.replace(config, data=data, train=dataclasses.replace(config.train, steps=2))

    monkeypatch.setattr(demo, "demo_config", small)
    out = tmp_path / "demo"
    result = invoke("demo", "--output-dir", str(out), "--questions", "12")
    assert result.exit_code == 1, result.output
    assert "missed" in result.output
    assert "encoder on, cached" in result.output
    content = json.loads((out / "results.json").read_text())
    scores = {row["method"]: row["em"] for row in content["results"]}
    assert list(scores) == list(demo.METHODS)
    assert scores["full"] == scores["prefix"] > 0.8
    assert scores["comb"] < 0.9 * scores["full"]
    assert scores["none"] < 0.2
    assert "`nano`, held-out side" in (out / "README.md").read_text()
    assert {"model.safetensors", "results.png", "loss.png", "training.json"} <= {path.name for path in out.iterdir()}


def test_a_resumed_run_may_be_longer(tmp_path: Path) -> None:
    trainer(comb_model(), tmp_path, steps=6, save_steps=4).train()
    longer = trainer(comb_model(), tmp_path, steps=20)
    longer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    rates = {row["step"]: row["learning_rate"] for row in longer.state.log_history if "learning_rate" in row}
    straight = trainer(comb_model(), tmp_path / "straight", steps=20)
    straight.train()
    wanted = {row["step"]: row["learning_rate"] for row in straight.state.log_history if "learning_rate" in row}
    assert longer.state.global_step == 20
    assert rates[12] == pytest.approx(wanted[12])


def test_no_adapter_with_nan_is_written(tmp_path: Path) -> None:
    model = comb_model()
    run = trainer(model, tmp_path, steps=1)
    run.train()
    with torch.no_grad():
        model.encoder.layers[0].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(TrainingDivergedError, match=r"up_proj\.weight holds NaN"):
        run.save_model(str(tmp_path / "saved"))
    assert not (tmp_path / "saved" / "model.safetensors").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_trained_weights_stay_in_float32(config_for: Callable[..., Any], dtype: str) -> None:
    config = config_for(answers="gold")
    result = run_training(
        dataclasses.replace(config, model=dataclasses.replace(config.model, dtype=dtype)), progress=False
    )
    assert {p.dtype for p in result.model.parameters() if p.requires_grad} == {torch.float32}
    assert str(result.model.backbone.dtype) == f"torch.{dtype}"


def test_evaluating_on_the_training_dataset_keeps_its_split(
    config_for: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from comb_training.cli import commands

    run_training(config_for(answers="gold"), progress=False)
    seen: list[Any] = []
    monkeypatch.setattr(commands, "_evaluate", lambda model, tokenizer, settings, *a, **k: seen.append(settings.data))
    commands.evaluate(str(tmp_path / "out"), dataset="jsonl", path=str(tmp_path / "data.jsonl"))
    commands.evaluate(str(tmp_path / "out"), dataset="squad", path="elsewhere.json")
    assert seen[0].heldout_share == 0.2
    assert (seen[1].dataset, seen[1].path, seen[1].heldout_share) == ("squad", "elsewhere.json", None)


def test_init_from_needs_an_adapter(config_for: Callable[..., Any], backbone_folder: Path) -> None:
    config = config_for()
    for changes, message in [
        ({"init_from": str(backbone_folder)}, "not a COMB adapter"),
        ({"init_from": "x", "options": {"max_document_tokens": 9}}, "can't change the adapter"),
    ]:
        with pytest.raises(ValueError, match=message):
            prepare(dataclasses.replace(config, model=dataclasses.replace(config.model, **changes)))


# --- answers while training ---


def test_heldout_answers_are_scored_and_drawn(tmp_path: Path) -> None:
    settings = config_from_dict(
        {
            "model": {"num_encoder_layers": 1, "cross_attention_layers": [2]},
            "data": {"options": {"scenes": 20, "questions": 2}},
            "train": {
                "steps": 4, "batch_size": 8, "answers": "gold", "eval_steps": 2, "eval_answers": 6,
                "output_dir": str(tmp_path),
            },
            "eval": {"limit": 10},
        }
    )  # fmt: skip
    result = run_training(settings, progress=False)
    assert [step for step, _ in result.heldout_em] == [2, 4] == [step for step, _ in result.heldout_losses]
    record = json.loads((tmp_path / "training.json").read_text())
    assert record["heldout_f1"] == [list(pair) for pair in result.heldout_f1]
    # the last ones are those of the finished model, by the same questions
    model = result.model
    assert model is not None
    examples, _ = read_examples(
        settings.data, PromptBuilder(result.tokenizer), model.max_document_tokens, split="heldout", limit=6
    )
    [found] = evaluate((model, result.tokenizer), examples, ["comb"], timing_examples=0, progress=False)
    assert result.heldout_em[-1] == (4, found.em)
    assert result.heldout_f1[-1] == (4, pytest.approx(found.f1))
    assert (tmp_path / "loss.png").stat().st_size > 5000
