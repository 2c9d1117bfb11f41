"""The operations that `--dry-run` states, against torch's counter over real steps."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaConfig, Qwen3MoeConfig

from comb_training.models.lora import add_lora
from comb_training.plan.activations import PassSize
from comb_training.plan.compute import H200_FLOPS, TOLERANCE, UTILISATION, StepCompute, step_compute
from comb_training.trainer.losses import target_logits_only
from tests.training.test_plan_memory import JOINT, Step, comb_model, sized

SIZES = {
    "vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 2048, "attn_implementation": "eager",
}  # fmt: skip
EXPERTS = {  # torch counts no grouped product
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 96, "experts_implementation": "eager",
}  # fmt: skip
CASES: dict[str, tuple[Any, dict[str, Any], bool]] = {
    "blocks": (LlamaConfig(**SIZES), {"num_encoder_layers": 2, "cross_attention_layers": [1, 3]}, False),
    "checkpointing": (LlamaConfig(**SIZES), {"num_encoder_layers": 2, "cross_attention_layers": [1, 3]}, True),
    "joint": (LlamaConfig(**SIZES), JOINT, False),
    "experts": (Qwen3MoeConfig(**SIZES, **EXPERTS), {"num_encoder_layers": 2, "cross_attention_layers": [1, 3]}, False),
}


def counted(step: Step) -> float:
    with FlopCounterMode(display=False) as counter:
        step()
    return float(counter.get_total_flops())


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_of_a_real_step(name: str) -> None:
    config, shape, checkpointing = CASES[name]
    model = comb_model(config, **shape)
    if checkpointing:
        model.gradient_checkpointing_enable()
    step = Step(model, sized(2, 3, 3, 16, 24, 12))
    found = step_compute(model, step.size, teacher=False, checkpointing=checkpointing)
    assert found.total == pytest.approx(counted(step), rel=TOLERANCE)


def test_what_is_trained_and_what_is_not_make_a_difference() -> None:
    """The controls: as much for a half-frozen encoder, or for a step without its way back, is noticed."""
    step = Step(comb_model(LlamaConfig(**SIZES), num_encoder_layers=4), sized(2, 1, 4, 32, 4, 4))
    whole = step_compute(step.model, step.size, teacher=False, checkpointing=False).total
    assert whole == pytest.approx(counted(step), rel=TOLERANCE)
    add_lora(step.model.encoder.layers, rank=4, alpha=8, dropout=0.0)
    lora = step_compute(step.model, step.size, teacher=False, checkpointing=False).total
    assert lora == pytest.approx(counted(step), rel=TOLERANCE)
    assert lora < (1 - TOLERANCE) * whole


def test_a_teacher_reads_the_full_prompts() -> None:
    model = comb_model(LlamaConfig(**SIZES), **JOINT)
    size = PassSize(documents=96, queries=60, targets=24, linked=192, rows=2)  # rows of 126 tokens
    labels = torch.full((2, 126), -100)
    labels[:, -12:] = 1
    with FlopCounterMode(display=False) as counter, torch.no_grad(), target_logits_only(model.backbone, labels):
        model.backbone(input_ids=torch.ones(2, 126, dtype=torch.long))
    found = step_compute(model, size, teacher=True, checkpointing=False)
    assert found.teacher == pytest.approx(counter.get_total_flops(), rel=TOLERANCE)
    assert step_compute(model, size, teacher=False, checkpointing=False).teacher == 0


def test_seconds_are_those_of_the_share_of_the_peak() -> None:
    assert StepCompute(encoder=H200_FLOPS / 2, decoder=0, teacher=H200_FLOPS / 2, tokens=1).seconds == 1 / UTILISATION
