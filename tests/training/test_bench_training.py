"""`comb bench train`: the same questions for all, counted alike."""

from __future__ import annotations

import copy

import pytest
import torch

from comb_training.bench.training_step import RIVAL, Shape, cost_table, measure_training
from tests.training.test_trainer import backbone

SHAPE = Shape(groups=1, questions=3, documents=2, document_tokens=10, query_tokens=4, target_tokens=3)


def test_costs_are_of_the_same_questions() -> None:
    pytest.importorskip("peft")
    model = backbone()
    before = copy.deepcopy(model.state_dict())
    found = measure_training(model, SHAPE, num_encoder_layers=1, lora_rank=2, repeats=2)
    costs = {cost.name: cost for cost in found}
    assert list(costs) == [RIVAL, "comb", "comb lora"]
    assert costs[RIVAL].faster == (1.0, 1.0, 1.0)
    assert costs[RIVAL].computed_tokens == 3 * (2 * 10 + 4 + 3)
    assert costs["comb"].computed_tokens == 2 * 10 + 3 * (4 + 3)
    for cost in costs.values():
        assert cost.examples_per_s == pytest.approx(3 / cost.step_s)
        assert cost.tokens_per_s == pytest.approx(3 * 27 / cost.step_s)
        assert cost.peak_bytes
    assert costs["comb lora"].trainable < costs["comb"].trainable
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert cost_table(found, SHAPE, "title").row_count == 3


def test_questions_about_the_same_documents_cost_comb_only_their_rows() -> None:
    pytest.importorskip("peft")
    once, often = (
        {
            cost.name: cost.computed_tokens
            for cost in measure_training(backbone(), shape, num_encoder_layers=1, lora_rank=2, repeats=1, memory=False)
        }
        for shape in (SHAPE, Shape(1, 6, 2, 10, 4, 3))
    )
    assert often[RIVAL] == 2 * once[RIVAL]
    assert often["comb"] == once["comb"] + 3 * (4 + 3)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a full prompt has 136 tokens, the backbone 128 positions"):
        measure_training(backbone(), Shape(1, 1, 2, 64, 4, 4))
    with pytest.raises(ValueError, match="questions must be at least 1"):
        measure_training(backbone(), Shape(1, 0, 2, 4, 4, 4))
