"""`comb bench train`: the same questions for all, counted alike."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from comb.evaluation.run import Timing
from comb_training.bench.train import RIVAL, TrainOptions, measure_training, tables
from tests.training.test_trainer import backbone

OPTIONS = TrainOptions(
    groups=1, questions=3, documents=2, document_tokens=10, query_tokens=4, target_tokens=3, encoder_layers=1,
    lora_rank=2, repeats=2,
)  # fmt: skip


def test_costs_are_of_the_same_questions() -> None:
    pytest.importorskip("peft")
    model = backbone()
    before = copy.deepcopy(model.state_dict())
    found = measure_training(model, OPTIONS)
    costs = {row["name"]: row for row in found}
    assert list(costs) == [RIVAL, "comb", "comb lora"]
    assert costs[RIVAL]["faster"] == Timing(1.0, 1.0, 1.0, 2)
    assert costs[RIVAL]["computed_tokens"] == 3 * (2 * 10 + 4 + 3)
    assert costs["comb"]["computed_tokens"] == 2 * 10 + 3 * (4 + 3)
    for row in found:
        assert row["tokens_per_s"] == pytest.approx(3 * 27 / row["step_s"])
        assert row["peak_bytes"]
    assert costs["comb lora"]["trainable"] < costs["comb"]["trainable"]
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert len(tables(found)[0].lines()) == 3


def test_questions_about_the_same_documents_cost_comb_only_their_rows() -> None:
    pytest.importorskip("peft")
    once, often = (
        {
            row["name"]: row["computed_tokens"]
            for row in measure_training(backbone(), replace(OPTIONS, questions=count, repeats=1))
        }
        for count in (3, 6)
    )
    assert often[RIVAL] == 2 * once[RIVAL]
    assert often["comb"] == once["comb"] + 3 * (4 + 3)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match=r"a full prompt has 136 tokens, the backbone 128 positions"):
        measure_training(backbone(), replace(OPTIONS, document_tokens=64, query_tokens=4, target_tokens=4))
