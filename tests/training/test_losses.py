"""The loss and its teacher."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import kl_div
from transformers import AutoConfig, AutoModelForCausalLM

from comb import Prompt, methods
from comb_training.data.batches import IGNORED, Collator, TrainingExample
from comb_training.trainer.losses import Teacher, divergence, target_logits_only, target_loss
from tests.helpers.training import comb_model, examples, trainer

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
    said, wanted = (logits.double().log_softmax(-1) for logits in (rows, teacher[:, :-1][counted]))
    expected = kl_div(said, wanted, reduction="none", log_target=True).sum(-1)
    found = divergence(rows, Teacher.of(teacher, labels, 40)).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # fewer classes tell less apart, never more
    previous = expected
    for k in (20, 5, 1):
        found = divergence(rows, Teacher.of(teacher, labels, k)).double()
        assert bool((found <= previous + 1e-6).all())
        assert bool((found >= -1e-6).all())
        previous = found
    same = divergence(rows, Teacher.of(student, labels, 5))
    torch.testing.assert_close(same, torch.zeros_like(same), rtol=0, atol=1e-5)


@pytest.mark.parametrize("exact", [True, False])
def test_a_row_is_trained_as_it_is_linked(exact: bool, tmp_path: Path) -> None:
    """Its prefix reads documents in both, or in neither."""
    model, rows = comb_model(gate=0.9).eval(), examples()[2:6]
    model.config.exact_prefix = exact
    batch = trainer(model, tmp_path, steps=1, batch_size=4).collate(rows)
    labels = batch.pop("labels")
    linking = methods.create("comb", model)
    with torch.no_grad():
        logits, readers = model(**batch).logits, {"prefix_tokens": None if exact else [1] * len(rows)}
        otherwise = model(**{**batch, **readers}).logits
    for row, example in enumerate(rows):
        wanted = (labels[row, 1:] != IGNORED).nonzero()[:, 0]
        state = linking.link(linking.compile(example.segments), example.prompt.query, prefix_ids=example.prompt.prefix)
        linked = state.answer_logits(example.target)
        torch.testing.assert_close(linked, logits[row, wanted], rtol=1e-4, atol=1e-4)
        assert (linked - otherwise[row, wanted]).abs().max() > 1e-3


def test_the_divergence_is_added_with_its_weight() -> None:
    logits, labels = random(2, 4, 10), torch.tensor([[IGNORED, 1, 2, IGNORED], [IGNORED, IGNORED, 3, 4]])
    outputs, teacher = SimpleNamespace(logits=logits), Teacher.of(random(2, 4, 10), labels, 3)
    plain, both = target_loss(outputs, labels), target_loss(outputs, labels, teacher=teacher, weight=0.5)
    rows = logits[:, :-1][labels[:, 1:] != IGNORED]
    torch.testing.assert_close(both - plain, 0.5 * divergence(rows, teacher).mean())
    torch.testing.assert_close(target_loss(outputs, labels, 8, teacher=teacher, weight=0.5), both * 4 / 8)


SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
EXPERTS = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 16}
LINEAR = {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        ("llama", {}),
        ("gemma2", {"final_logit_softcapping": 2.0}),  # bends logits behind the prefix
        ("cohere", {"logit_scale": 0.25}),
        ("qwen3_next", {**LINEAR, **EXPERTS, "shared_expert_intermediate_size": 16}),
    ],
)
def test_the_head_computes_what_targets_need_and_no_more(kind: str, more: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = comb_model(0.5, AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SIZES, **more)))
    batch = Collator(0)(
        [TrainingExample(Prompt((2,), ((5, 6, 7), (8, 9)), tuple(range(10, 10 + n))), (4,) * n) for n in (1, 4, 7)]
    )
    labels = batch.pop("labels")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    whole = model(**batch)
    expected = target_loss(whole, labels)
    gradients = torch.autograd.grad(expected, trained, allow_unused=True)
    with target_logits_only(model, labels):
        few = model(**batch)
        loss = target_loss(few, labels)
    assert few.logits.shape == (1, 12, whole.logits.shape[-1])
    torch.testing.assert_close(few.logits[0], whole.logits[:, :-1][labels[:, 1:] != IGNORED])
    torch.testing.assert_close(loss, expected)
    assert any(gradient is not None and gradient.any() for gradient in gradients)
    for found, gradient in zip(torch.autograd.grad(loss, trained, allow_unused=True), gradients, strict=True):
        if gradient is not None:
            torch.testing.assert_close(found, gradient, rtol=1e-4, atol=1e-6)
    teachers = Teacher.of(few.logits.detach(), labels, 5), Teacher.of(whole.logits.detach(), labels, 5)
    torch.testing.assert_close(teachers[0].logprobs, teachers[1].logprobs)
    assert model(**batch).logits.shape == whole.logits.shape  # afterwards it is as it was


def test_a_head_that_sees_other_rows_than_the_labels_is_not_guessed_at() -> None:
    model = comb_model()
    with target_logits_only(model, torch.zeros(2, 5, dtype=torch.long)), pytest.raises(RuntimeError, match=r"\[2, 5\]"):
        model(torch.ones(2, 7, dtype=torch.long))
    assert model(torch.ones(2, 7, dtype=torch.long)).logits.shape[:2] == (2, 7)
