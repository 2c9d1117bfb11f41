"""The trainer: gradients that don't depend on batching, groups, schedule, checkpoints without the backbone, resume."""

from __future__ import annotations

import errno
import itertools
import json
import math
import resource
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from comb import CombForCausalLM
from comb.evaluation.metrics import bootstrap
from comb_training.config import Config, ModelConfig, TrainConfig
from comb_training.data.batches import Collator, TrainingExample
from comb_training.models import training_method
from comb_training.trainer import checkpoints as saved
from comb_training.trainer import distributed
from comb_training.trainer.checkpoints import (
    CheckpointError,
    TrainingDivergedError,
    checkpoint_to_resume,
    checkpoints,
)
from comb_training.trainer.losses import target_loss
from comb_training.trainer.objective import Objective
from comb_training.trainer.optimizer import LearningRateSchedule, adamw, total_steps
from comb_training.trainer.sampler import BatchSampler
from comb_training.trainer.trainer import CombTrainer
from tests.helpers.training import backbone, comb_model, examples, trainer


def one_step(folder: Path, batch_size: int, accumulation: int, **more: Any) -> tuple[float, dict[str, torch.Tensor]]:
    """Its loss and gradients."""
    config = {"batch_size": batch_size, "gradient_accumulation_steps": accumulation, "steps": 1, "max_grad_norm": 0.0}
    run = trainer(comb_model(gate=0.5), folder, **config, **more)
    gradients: dict[str, torch.Tensor] = {}

    def catch(*_: Any) -> None:
        gradients.update({n: p.grad.clone() for n, p in run.model.named_parameters() if p.grad is not None})

    run.optimizer.register_step_pre_hook(catch)
    run.train()
    return run.losses[0][1], gradients


def test_loss_and_gradients_do_not_depend_on_the_split_into_batches(tmp_path: Path) -> None:
    loss, gradients = one_step(tmp_path, 12, 1, kl_weight=1.0)
    assert {name.split(".")[0] for name in gradients} == {"encoder", "cross_blocks"}
    buckets = {"batch_query_tokens": 40, "batch_document_tokens": 30}
    batches = len(BatchSampler(examples(), TrainConfig(batch_size=12, **buckets)))
    assert batches > 3
    # (5, 3) ends with a batch of two; the last one sorts by length
    for batch_size, accumulation, budget in ((6, 2, {}), (3, 4, {}), (5, 3, {}), (12, batches, buckets)):
        other_loss, other = one_step(tmp_path, batch_size, accumulation, kl_weight=1.0, **budget)
        assert other_loss == pytest.approx(loss, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(other[name], gradient, rtol=1e-4, atol=1e-7, msg=name)


def test_the_loss_is_the_backbones_own(tmp_path: Path) -> None:
    model, batch = comb_model(gate=0.5), Collator(0)(examples())
    labels = batch["labels"]
    with torch.no_grad():
        output = model(**batch)
    torch.testing.assert_close(target_loss(output, labels), output.loss)
    count = labels[:, 1:].ne(-100).sum()
    torch.testing.assert_close(target_loss(output, labels, num_items_in_batch=2 * count), output.loss / 2)


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
    config = TrainConfig(learning_rate=1e-3, weight_decay=0.1)
    groups = adamw(model, config).param_groups
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


def test_a_loss_that_is_not_a_number_stops_the_run(tmp_path: Path) -> None:
    model = comb_model(gate=0.5)
    with torch.no_grad():
        next(p for name, p in model.named_parameters() if name.startswith("encoder.")).view(-1)[0] = math.nan
    run = trainer(model, tmp_path, steps=3)
    with pytest.raises(TrainingDivergedError, match=r"the loss is nan at step 1 .*step-1-rank-0.pt.*learning_rate"):
        run.train()
    assert not (tmp_path / "model.safetensors").exists()
    kept = torch.load(tmp_path / "bad-batch-step-1-rank-0.pt", weights_only=False)  # it can be looked at
    assert (kept["step"], len(kept["inputs"]["documents"])) == (1, 4)
    assert math.isnan(kept["loss"])
    assert kept["inputs"]["labels"].shape == kept["inputs"]["input_ids"].shape


def test_out_of_memory_names_the_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(comb_model(), tmp_path)

    def full(*_: Any, **__: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(run.model, "forward", full)
    with pytest.raises(RuntimeError, match=r"step 1 in a batch of 4 rows of up to \d+ tokens over \d documents of \d+"):
        run.train()


def evaluations(run: CombTrainer) -> list[dict[str, float]]:
    return [row for row in run.log.history if "eval_loss" in row]


def test_the_held_out_loss_is_the_mean_over_its_target_tokens(tmp_path: Path) -> None:
    rows = examples(11)
    run = trainer(comb_model(gate=0.5), tmp_path, heldout=rows, eval_steps=2, learning_rate=1e-2)
    run.train()
    logged = run.logged("eval_loss")
    assert [step for step, _ in logged] == [0, 2, 4]
    assert len({loss for _, loss in logged}) == 3
    batch = Collator(0, exact_prefix=True)(rows)
    labels = batch.pop("labels")
    with torch.no_grad():
        assert logged[-1][1] == pytest.approx(float(target_loss(run.model.eval()(**batch), labels)), rel=1e-5)


def test_the_share_of_the_divergence_that_is_closed_is_logged(tmp_path: Path) -> None:
    """The teacher's rows have the documents in them, and are longer than the model's."""
    run = trainer(comb_model(gate=0.5), tmp_path, heldout=examples(11), steps=2, kl_weight=1.0, ce_weight=0.0)
    run.train()
    start, end = ([row[f"eval_{name}"] for name in ("closed", "kl", "kl_none")] for row in evaluations(run))
    for closed, kl, none in (start, end):
        assert none > 0
        assert kl > 0
        assert closed == pytest.approx(1 - kl / none)
    assert start[:2] != end[:2]
    assert start[2] == pytest.approx(end[2])


def test_the_interval_of_what_is_closed_is_over_questions(tmp_path: Path) -> None:
    """The same question again and again leaves nothing open; each question's own share is what is drawn from."""

    def evaluation(heldout: list[TrainingExample]) -> dict[str, float]:
        settings = {"steps": 1, "batch_size": 3, "kl_weight": 1.0, "ce_weight": 0.0}
        run = trainer(comb_model(gate=0.5), tmp_path, heldout=heldout, **settings)
        run.train()
        return evaluations(run)[0]

    rows = examples(7)
    each = [evaluation([row]) for row in rows]
    assert all(one["eval_closed_low"] == pytest.approx(one["eval_closed"]) for one in each)
    whole = evaluation(rows)
    assert whole["eval_closed_low"] < whole["eval_closed"] < whole["eval_closed_high"]
    nones = [one["eval_kl_none"] * len(row.target) for one, row in zip(each, rows, strict=True)]
    low, high = bootstrap([one["eval_kl"] / one["eval_kl_none"] for one in each], nones)
    # (the drawn questions are in the order of the batches)
    assert whole["eval_closed_low"] == pytest.approx(1 - high, abs=0.05)
    assert whole["eval_closed_high"] == pytest.approx(1 - low, abs=0.05)


def test_tokens_per_second_are_without_the_time_of_an_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Objective, "heldout_losses", lambda *_: time.sleep(2) or {})
    run = trainer(comb_model(), tmp_path, heldout=examples(2), steps=3, eval_steps=1)
    run.train()
    tokens = max(sum(map(len, (*row.segments, row.prompt.bare, row.target))) for row in examples())
    speeds = run.logged("tokens_per_second")
    assert [step for step, _ in speeds] == [2, 3]  # the first step warms up
    assert all(speed > 4 * tokens / 2 for _, speed in speeds)


def test_schedule_warms_up_and_cools_down_by_steps_or_by_the_clock() -> None:
    lengths = [{"epochs": 2.0}, {"epochs": 0.5}, {"steps": 5, "epochs": 2.0}, {"steps": 500, "epochs": 1.0}]
    assert [total_steps(TrainConfig(**length), 7) for length in lengths] == [14, 4, 5, 7]
    schedule = LearningRateSchedule(100, None, warmup=0.1)
    factors = [schedule(step) for step in range(101)]
    assert 0 < factors[0] <= 0.1
    assert factors[5] == pytest.approx(0.5)
    assert max(factors) == factors[10] == pytest.approx(1.0)
    assert factors[100] == pytest.approx(0.02)
    assert all(earlier >= later for earlier, later in itertools.pairwise(factors[10:]))
    schedule = LearningRateSchedule(10**9, 100.0, warmup=0.1)
    for schedule.used, factor in ((5.0, 0.5), (100.0, 0.02)):
        assert schedule(3) == pytest.approx(factor)
    schedule.steps, schedule.used = 10, 1.0  # the steps are ahead
    assert schedule.progress(9) == pytest.approx(0.9)


def test_a_run_ends_when_its_seconds_are_used_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = itertools.count()  # every look at the clock is a second later
    monkeypatch.setattr("comb_training.trainer.optimizer.time", SimpleNamespace(monotonic=lambda: float(next(seconds))))
    run = trainer(comb_model(), tmp_path, heldout=examples(2), steps=None, max_seconds=20.0, save_steps=100)
    run.train()
    assert run.step == 20
    assert [row["step"] for row in evaluations(run)] == [0, 20]  # as a run of so many steps
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-20"]
    over = trainer(comb_model(), tmp_path, steps=None, max_seconds=20.0)
    over.train(tmp_path / "checkpoint-20")
    assert over.step == 20
    rates = [rate for _, rate in run.logged("learning_rate")]
    # it cooled down although nobody knew the number of steps
    assert rates[1] == pytest.approx(2e-3)
    assert rates[-1] < 0.1 * rates[1]


@pytest.mark.parametrize("accumulation", [1, 2])
def test_resume_is_exact_in_the_middle_of_an_epoch(tmp_path: Path, accumulation: int) -> None:
    # 6 batches an epoch, stopped in the second epoch
    config = {"steps": 10, "batch_size": 2, "save_steps": 5, "logging_steps": 3}
    config |= {"gradient_accumulation_steps": accumulation}
    straight = trainer(comb_model(), tmp_path / "a", **config)
    straight.train()
    resumed = trainer(comb_model(), tmp_path / "a", **config)
    resumed.train(tmp_path / "a" / "checkpoint-5")
    assert resumed.losses == straight.losses
    assert [step for step, _ in straight.losses] == [1, 3, 6, 9, 10]  # a mean goes on over the checkpoint, too
    for name, tensor in straight.model.state_dict().items():
        assert torch.equal(tensor, resumed.model.state_dict()[name]), name
    trained = {name for name, parameter in resumed.model.named_parameters() if parameter.requires_grad}
    assert set(load_file(tmp_path / "a" / "checkpoint-5" / "model.safetensors")) == trained  # no backbone


def test_what_a_run_goes_on_with_has_to_be_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config, some, others = {"steps": 3, "save_steps": 2}, examples(2), examples(3)
    trainer(comb_model(), tmp_path, heldout=some, **config).train()
    same = trainer(comb_model(), tmp_path, heldout=some, **config)
    same.train(tmp_path / "checkpoint-2")
    assert [row["step"] for row in evaluations(same)] == [0, 3]
    assert not caplog.text
    rows = trainer(comb_model(), tmp_path / "rows", examples()[::-1], heldout=some, **config)
    rows.train(tmp_path / "checkpoint-2")
    assert "over other examples" in caplog.text
    other = trainer(comb_model(), tmp_path, heldout=others, **config)
    other.train(tmp_path / "checkpoint-2")
    assert "other held-out questions" in caplog.text
    assert [row["step"] for row in evaluations(other)] == [3]  # none to compare it with
    tuned = comb_model()
    with torch.no_grad():
        tuned.backbone.model.layers[0].mlp.up_proj.weight[0].mul_(1.5)
    trainer(tuned, tmp_path, **config).train(tmp_path / "checkpoint-2")
    assert "trained on other weights of the backbone" in caplog.text
    with torch.no_grad():
        tuned.backbone.model.layers[0].mlp.up_proj.weight.mul_(1.5)
    with pytest.raises(ValueError, match="checkpoint-2 can't go on: the backbone has the adapter's embedding, and not"):
        trainer(tuned, tmp_path, **config).train(tmp_path / "checkpoint-2")
    with torch.no_grad():
        tuned.backbone.get_input_embeddings().weight.mul_(1.5)
    with pytest.raises(ValueError, match="checkpoint-2 can't go on: the backbone's embedding differs"):
        trainer(tuned, tmp_path, **config).train(tmp_path / "checkpoint-2")
    config_file = tmp_path / "checkpoint-2" / "config.json"
    adapter = json.loads(config_file.read_text())
    config_file.write_text(json.dumps(adapter | {"backbone_fingerprint": {"shapes": ""}}))
    with pytest.raises(ValueError, match=r"checkpoint-2 can't go on: .*see its config\.json"):
        trainer(comb_model(), tmp_path, **config).train(tmp_path / "checkpoint-2")
    config_file.write_text(json.dumps(adapter))
    path = tmp_path / "checkpoint-2" / "trainer_state.json"
    state = json.loads(path.read_text())
    path.write_text(json.dumps(state | {"made_by": {"ranks": 2, "zero_stage": None}, "examples": "others"}))
    with pytest.raises(ValueError, match="resume with as many processes"):
        trainer(comb_model(), tmp_path, **config).train(tmp_path / "checkpoint-2")
    trainer(comb_model(), tmp_path, steps=2).train(tmp_path / "checkpoint-2")  # only loaded
    path.write_text(json.dumps({name: state[name] for name in ("global_step", "seconds", "log_history")}))
    (path.parent / "rng_state_0.pth").unlink()
    with pytest.raises(ValueError, match="as many processes as wrote"):  # of an earlier version
        trainer(comb_model(), tmp_path, **config).train(tmp_path / "checkpoint-2")


def test_the_newest_checkpoint_is_this_runs(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = {"steps": 2, "save_steps": 2}
    first = trainer(comb_model(), tmp_path / "a", heldout=examples(2), **config)
    first.train()
    there = tmp_path / "a" / "checkpoint-2"
    assert checkpoint_to_resume(first.config, "auto") == there
    begun = trainer(comb_model(), tmp_path / "a", **config)
    begun.log.start(0)  # and killed before it had a checkpoint
    begun.log.close()
    assert checkpoint_to_resume(begun.config, "auto") is None
    assert f"{there} is of an earlier run" in caplog.text
    # one that goes on in another folder is the same run
    longer = trainer(comb_model(), tmp_path / "b", steps=4, save_steps=4)
    longer.train(there)
    assert checkpoint_to_resume(longer.config, "auto") == tmp_path / "b" / "checkpoint-4"
    # and so is one that goes on from there by name, over other held-out questions, and is killed before its next
    for heldout in (), examples(3):
        again = trainer(comb_model(), tmp_path / "a", heldout=heldout, steps=4)
        again._read_state(there)
        again.log.start(2)
        again.log.close()
        assert checkpoint_to_resume(first.config, "auto") == there


def test_a_checkpoint_that_the_log_lags_behind_is_its_runs_own(tmp_path: Path) -> None:
    run = trainer(comb_model(), tmp_path, steps=4, save_steps=2, logging_steps=9)
    run.train()
    shutil.rmtree(tmp_path / "checkpoint-4")
    (log,) = tmp_path.glob("log.jsonl")
    log.write_text("".join(line for line in log.open() if json.loads(line)["step"] < 2))  # as killed before step 4
    assert checkpoint_to_resume(run.config, "auto") == tmp_path / "checkpoint-2"


def test_a_resumed_run_decays_as_its_own_configuration_says(tmp_path: Path) -> None:
    config = {"steps": 4, "save_steps": 2}
    trainer(comb_model(), tmp_path, **config).train()
    weights = []
    for decay in (0.0, 10.0):
        resumed = trainer(comb_model(), tmp_path / str(decay), **config, weight_decay=decay)
        resumed.train(tmp_path / "checkpoint-2")
        assert max(group["weight_decay"] for group in resumed.optimizer.param_groups) == decay
        weights.append(resumed.model.encoder.layers[0].mlp.up_proj.weight.detach().norm())
    assert weights[1] < weights[0]


def test_scoring_and_saving_are_no_optimisation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(comb_model(), tmp_path, steps=3, save_steps=1, eval_steps=1, max_seconds=100)
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])

    def pass_seconds(seconds: float, function: Any) -> Any:
        return lambda *args, **kwargs: (now.__setitem__(0, now[0] + seconds), function(*args, **kwargs))[1]

    monkeypatch.setattr(run, "evaluate", pass_seconds(20, run.evaluate))
    monkeypatch.setattr(run, "save_checkpoint", pass_seconds(20, run.save_checkpoint))
    monkeypatch.setattr(run, "_train_step", pass_seconds(0, run._train_step))
    monkeypatch.setattr(run.optimizer, "step", pass_seconds(1, run.optimizer.step))
    run.train()
    assert (run.step, run.schedule.used) == (3, 3.0)


def test_a_full_disk_leaves_the_checkpoint_of_before(tmp_path: Path) -> None:
    config = {"steps": 6, "batch_size": 2, "save_steps": 2, "save_total_limit": 1}
    straight = trainer(comb_model(), tmp_path / "a", **config)
    straight.train()
    run = trainer(comb_model(), tmp_path / "b", **config)

    def fill(*_: Any) -> None:
        if run.step == 2:  # the third step is about to be made
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))  # no file beyond this many bytes

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    run.optimizer.register_step_post_hook(fill)
    try:
        with pytest.raises(CheckpointError, match=r"step 4 could not be written .*checkpoint-2 is intact: .* auto$"):
            run.train()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in (tmp_path / "b").iterdir()) == ["checkpoint-2", "log.jsonl"]
    resumed = trainer(comb_model(), tmp_path / "b", **config)
    resumed.train(tmp_path / "b" / "checkpoint-2")
    assert resumed.losses == straight.losses
    assert [path.name for path in checkpoints(tmp_path / "b")] == ["checkpoint-6"]


@pytest.mark.parametrize(
    ("save_steps", "words"), [(None, "then train again"), (1, "then go on from checkpoint-1 with --resume auto")]
)
def test_a_full_disk_at_the_end_leaves_the_adapter_of_before(
    tmp_path: Path, save_steps: int | None, words: str
) -> None:
    trainer(comb_model(), tmp_path, steps=1, save_steps=1).train()  # of an earlier run
    run = trainer(comb_model(), tmp_path, steps=1, save_steps=save_steps)
    run.train()
    run.save_model(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    run.model.config.cross_attention_layers = [0]
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=rf"is as it was before.*\(.*too large.*\); make room, {words}"):
            run.save_model(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_a_tokenizer_that_a_full_disk_does_not_take_is_a_checkpoint_that_was_not_written(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step 3 could not be written"), saved.new_checkpoint(tmp_path, 3, keep=0):
        raise Exception("No space left on device (os error 28)")  # noqa: TRY002  # tokenizers does
    assert not list(tmp_path.iterdir())
    with pytest.raises(KeyError), saved.new_checkpoint(tmp_path, 3, keep=0):
        raise KeyError


def test_a_full_disk_says_whose_checkpoint_is_left(tmp_path: Path) -> None:
    earlier, full = tmp_path / "checkpoint-3", OSError(errno.ENOSPC, "full")
    earlier.mkdir()
    words = f"checkpoint-3 of an earlier run is intact: .* {earlier}$"
    with pytest.raises(CheckpointError, match=words), saved.new_checkpoint(tmp_path, 1, keep=0, first=True):
        raise full


def test_another_process_that_has_ended_is_no_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(comb_model(), tmp_path, steps=1, save_steps=1)

    def end(*_: Any) -> None:
        raise RuntimeError("[/gloo/gloo/transport/tcp/pair.cc:537] Connection closed by peer [127.0.0.1]:29386")

    with monkeypatch.context() as patch:
        patch.setattr(run.accelerator, "backward", end)
        with pytest.raises(distributed.ProcessEndedError, match="see its output; --resume auto goes on"):
            run.train()
    monkeypatch.setattr(torch.distributed, "barrier", end)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(distributed.ProcessEndedError), saved.new_checkpoint(tmp_path, 3, keep=0):
        pass


def test_half_of_a_checkpoint_is_none_and_those_of_a_longer_run_make_way(tmp_path: Path) -> None:
    (tmp_path / "partial" / "checkpoint-9").mkdir(parents=True)
    assert checkpoints(tmp_path) == []
    trainer(comb_model(), tmp_path / "one", steps=2, save_steps=1, save_total_limit=1).train()
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["checkpoint-2", "log.jsonl"]
    # a fresh run's first takes the place of all of the run before
    trainer(comb_model(), tmp_path / "one", steps=6, save_steps=3, save_total_limit=0).train()
    assert [path.name for path in checkpoints(tmp_path / "one")] == ["checkpoint-3", "checkpoint-6"]
    trainer(comb_model(), tmp_path, steps=6, save_steps=3).train()
    trainer(comb_model(), tmp_path, steps=2, save_steps=1).train()
    assert [path.name for path in checkpoints(tmp_path)] == ["checkpoint-1", "checkpoint-2"]


def test_killed_while_checkpoints_make_way_a_run_finds_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, aside = tmp_path / "run", tmp_path / "checkpoint-6"
    trainer(comb_model(), run, steps=6, save_steps=3).train()
    shutil.copytree(run / aside.name, aside)
    fresh, remove = trainer(comb_model(), run, steps=2, save_steps=1), shutil.rmtree

    def killed(path: Path, **options: Any) -> None:
        if (run / "checkpoint-1").exists():
            (_, *half) = [each for each in sorted(path.rglob("*")) if each.is_file()]
            half[0].unlink()
            raise KeyboardInterrupt
        remove(path, **options)

    monkeypatch.setattr(shutil, "rmtree", killed)
    with pytest.raises(KeyboardInterrupt):
        fresh.train()
    assert checkpoints(run) == [run / "checkpoint-1"]
    shutil.move(aside, run)  # as killed just before it was taken away
    assert checkpoint_to_resume(fresh.config, "auto") == run / "checkpoint-1"


def test_another_models_checkpoint_is_refused(tmp_path: Path) -> None:
    comb_model().save_pretrained(tmp_path)
    other = CombForCausalLM.from_backbone(backbone(), num_encoder_layers=2, cross_attention_layers=[0, 1])
    # a quantiser's hooks may write into the frozen weights, where they are asked for
    other.backbone.model.layers[0].register_state_dict_pre_hook(lambda *_: pytest.fail("the frozen weights change"))
    with pytest.raises(ValueError, match="doesn't fit this model: missing"):
        saved.load_trainable(other, tmp_path)
    with pytest.raises(ValueError, match="is no checkpoint, it holds no trainer_state"):
        trainer(comb_model(), tmp_path).train(tmp_path)


@pytest.mark.parametrize("damage", [lambda data: data[: len(data) // 2], lambda data: b"", lambda data: b"[1]"])
@pytest.mark.parametrize("name", ["optimizer.pt", "rng_state_0.pth", "model.safetensors", "trainer_state.json"])
def test_a_damaged_checkpoint_names_its_file_and_another_one(tmp_path: Path, name: str, damage: Any) -> None:
    trainer(comb_model(), tmp_path, steps=4, save_steps=2).train()
    path = tmp_path / "checkpoint-4" / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=rf"{path} can't be read \(.*go on .*--resume {tmp_path}/checkpoint-2\)"):
        trainer(comb_model(), tmp_path, steps=6).train(tmp_path / "checkpoint-4")


def test_blocks_are_fitted_on_prompts_that_the_backbone_has_positions_for() -> None:
    """An encoder's documents may be longer."""
    config = Config(ModelConfig(options={"initialization": "first"}))
    rows, fitted = examples(), []
    long = replace(rows[0], prompt=replace(rows[0].prompt, segments=(tuple(range(2, 130)),)))
    for given in (rows, [*rows, long]):
        model = CombForCausalLM.from_backbone(
            backbone(), num_encoder_layers=1, cross_attention_layers=[1], encoder_causal=True, initialization="first",
            gate=0.5,
        )  # fmt: skip
        before = model.cross_blocks[0].cross_attn.o_proj.weight.clone()
        fitted.append(training_method("comb").fitted(model, config, given, None).cross_blocks[0].cross_attn.o_proj)
        assert not torch.equal(fitted[-1].weight, before)
    assert torch.equal(fitted[0].weight, fitted[1].weight)
    with pytest.raises(ValueError, match="none of 1 fits into the backbone's 128 positions"):
        training_method("comb").fitted(model, config, [long], None)


def test_layers_of_an_encoder_that_no_block_reads_are_refused() -> None:
    """They would train on nothing, and DDP stops over them."""
    options: dict[str, Any] = {"cross_attention_layers": [1], "encoder_causal": True, "initialization": "first"}
    model = CombForCausalLM.from_backbone(backbone(), num_encoder_layers=2, **options)
    with pytest.raises(ValueError, match=r"layers \[1\] read the first 1: give model.num_encoder_layers=1"):
        training_method("comb").fitted(model, Config(), examples(), None)


def test_a_resumed_run_may_be_longer(tmp_path: Path) -> None:
    trainer(comb_model(), tmp_path, steps=6, save_steps=4).train()
    longer = trainer(comb_model(), tmp_path, steps=20)
    longer.train(tmp_path / "checkpoint-4")
    rates = dict(longer.logged("learning_rate"))
    straight = trainer(comb_model(), tmp_path / "straight", steps=20)
    straight.train()
    wanted = dict(straight.logged("learning_rate"))
    assert longer.step == 20
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
