"""The loss, its teacher, and LoRA on the encoder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from test_trainer import TOKENIZER, backbone, comb_model, examples, trainer
from torch.nn.functional import kl_div

from comb import CombForCausalLM, Prompt
from comb_training.batches import IGNORED, Collator, TrainingExample
from comb_training.config import TrainConfig
from comb_training.lora import add_lora, lora_layers, unload
from comb_training.losses import Teacher, divergence, target_loss
from comb_training.trainer import CombTrainer

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape: int) -> torch.Tensor:
    return 3 * torch.randn(*shape, generator=GENERATOR)


def test_the_divergence_over_all_classes_is_the_plain_one() -> None:
    student, teacher = random(2, 5, 40), random(2, 5, 40)
    labels = torch.full((2, 5), IGNORED)
    labels[0, 2:] = 3
    labels[1, 1] = 4
    counted = labels[:, 1:] != IGNORED
    rows = student[:, :-1][counted]
    expected = kl_div(
        rows.double().log_softmax(-1),
        teacher[:, :-1][counted].double().log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    torch.testing.assert_close(
        divergence(rows, Teacher.of(teacher, labels, 40)).double(), expected, rtol=1e-5, atol=1e-6
    )
    # fewer classes tell less apart, never more
    previous = expected
    for k in (20, 5, 1):
        found = divergence(rows, Teacher.of(teacher, labels, k)).double()
        assert bool((found <= previous + 1e-6).all())
        assert bool((found >= -1e-6).all())
        previous = found
    same = divergence(rows, Teacher.of(student, labels, 5))
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-5)


def test_the_divergence_is_added_with_its_weight() -> None:
    logits, labels = random(2, 4, 10), torch.tensor([[IGNORED, 1, 2, IGNORED], [IGNORED, IGNORED, 3, 4]])
    outputs, teacher = SimpleNamespace(logits=logits), Teacher.of(random(2, 4, 10), labels, 3)
    plain, both = target_loss(outputs, labels), target_loss(outputs, labels, teacher=teacher, weight=0.5)
    rows = logits[:, :-1][labels[:, 1:] != IGNORED]
    torch.testing.assert_close(both - plain, 0.5 * divergence(rows, teacher).mean())
    torch.testing.assert_close(target_loss(outputs, labels, 8, teacher=teacher, weight=0.5), both * 4 / 8)


def teacher_divergence(model: Any, rows: list[TrainingExample]) -> float:
    """Over all classes, from the backbone's own forward pass per row."""
    total, count = 0.0, 0
    with torch.no_grad():
        for row in rows:
            batch = Collator(0)([row])
            labels = batch.pop("labels")
            student = model.eval()(**batch).logits[:, :-1][labels[:, 1:] != IGNORED]
            full = torch.tensor([[*row.prompt.flat, *row.target]])
            teacher = model.backbone(full).logits[0, len(row.prompt.flat) - 1 : -1]
            total += float(kl_div(student.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True))
            count += len(row.target)
    return total / count


def test_training_with_a_teacher_comes_nearer_to_it(tmp_path: Path) -> None:
    rows, settings = examples(), {"steps": 40, "batch_size": 6, "learning_rate": 1e-2}
    ends = {}
    for weight in (0.0, 100.0):
        model = comb_model(gate=0.5)
        before = teacher_divergence(model, rows)
        trainer(model, tmp_path / str(weight), rows, kl_weight=weight, kl_top_k=300, **settings).train()
        ends[weight] = teacher_divergence(model, rows)
    assert ends[100.0] < 0.5 * before
    assert ends[100.0] < 0.5 * ends[0.0]  # the control: the answers alone pull elsewhere


def test_the_teachers_loss_does_not_depend_on_the_split_into_batches(tmp_path: Path) -> None:
    losses = []
    for batch_size, accumulation in ((12, 1), (5, 3)):
        run = trainer(
            comb_model(gate=0.5), tmp_path, kl_weight=1.0, steps=1, batch_size=batch_size,
            gradient_accumulation_steps=accumulation,
        )  # fmt: skip
        run.train()
        losses.append(run.losses[0][1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_prompts_that_the_teacher_cannot_read_are_refused(tmp_path: Path) -> None:
    long = TrainingExample(Prompt((2,), ((5,) * 70, (6,) * 70), (3,)), (4,), "long one")
    with pytest.raises(ValueError, match=r"1 examples are longer .*128 positions .*long one"):
        trainer(comb_model(), tmp_path, [*examples(), long], kl_weight=1.0)
    trainer(comb_model(), tmp_path, [*examples(), long])


# --- LoRA ---


def test_lora_trains_less_and_publishes_the_merged_layers(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    model = comb_model(gate=0.5)
    names = set(model.state_dict())
    frozen = {n: p.detach().clone() for n, p in model.encoder.layers.named_parameters()}
    everything, _ = model.num_trainable_parameters()
    add_lora(model, rank=2, alpha=4.0, dropout=0.0)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert model.num_trainable_parameters()[0] < everything
    assert all(".lora_" in name for name in trained if name.startswith("encoder.layers."))
    assert any(name.startswith("cross_blocks.") for name in trained)
    assert any(name.startswith("encoder.key_value_heads.") for name in trained)
    run = CombTrainer(
        model, TrainConfig(steps=10, batch_size=6, learning_rate=1e-2, save_steps=5, output_dir=str(tmp_path)),
        examples(), TOKENIZER, progress=False,
    )  # fmt: skip
    run.train()
    weights = run.trained_weights()
    run.save_model(str(tmp_path / "adapter"))
    assert set(load_file(tmp_path / "checkpoint-10" / "model.safetensors")) == trained
    published = load_file(tmp_path / "adapter" / "model.safetensors")
    assert set(published) == {name for name in names if not name.startswith("backbone.")}
    moved = [n for n, p in frozen.items() if not torch.equal(published[f"encoder.layers.{n}"], p)]
    assert moved
    batch = Collator(0)(examples())
    batch.pop("labels")
    with torch.no_grad():
        expected = model.eval()(**batch).logits
        loaded = CombForCausalLM.from_pretrained(tmp_path / "adapter", backbone=backbone())
        torch.testing.assert_close(loaded(**batch).logits, expected, rtol=1e-4, atol=1e-5)
        unload(model)
        assert not lora_layers(model)
        torch.testing.assert_close(model(**batch).logits, expected, rtol=1e-4, atol=1e-5)
    # resumed in the middle, it is the same run
    again = comb_model(gate=0.5)
    add_lora(again, rank=2, alpha=4.0, dropout=0.0)
    resumed = CombTrainer(
        again, TrainConfig(steps=10, batch_size=6, learning_rate=1e-2, save_steps=5, output_dir=str(tmp_path)),
        examples(), TOKENIZER, progress=False,
    )  # fmt: skip
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert resumed.losses == run.losses
    found = resumed.trained_weights()
    assert all(torch.equal(found[name], weight) for name, weight in weights.items())
