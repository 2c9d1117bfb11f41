"""`train.torch_compile`: the gradients of the plain run, one graph for batches of all sizes, the same checkpoint."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch._dynamo.utils import counters
from transformers import LlamaConfig

from comb import CombForCausalLM
from comb_training.config import config_from_dict
from comb_training.models.method import training_method
from tests.helpers.training import comb_model, trainer
from tests.training.test_plan_memory import SIZES, Sizes, Step
from tests.training.test_plan_memory import comb_model as sized_model

SHAPES = [Sizes(2, 3, 3, 40, 24, 16), Sizes(1, 3, 3, 33, 20, 16), Sizes(2, 2, 2, 50, 25, 7)]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def heard() -> CombForCausalLM:
    model = sized_model(LlamaConfig(**SIZES), num_encoder_layers=2, cross_attention_layers=[1, 3])
    with torch.no_grad():
        for block in model.cross_blocks:
            for gate in block.gates:
                gate.fill_(0.5)
    return model


def compiled(model: CombForCausalLM) -> CombForCausalLM:
    parts = training_method("comb").compiled_parts(model)
    for part in parts:
        part.compile(dynamic=True, backend="aot_eager")  # as traced and taken apart, without waiting for code
    kept = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    inside = {id(parameter) for part in parts for parameter in part.parameters()}
    assert len(inside & kept) > len(kept) / 2  # the control: parts are those that train
    return model


def gradients(model: CombForCausalLM, shape: object, *, bf16: bool) -> dict[str, torch.Tensor]:
    model.zero_grad()
    Step(model, shape, autocast=bf16)()  # type: ignore[arg-type]
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def furthest(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    assert found.keys() == expected.keys()
    return max(float((found[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def test_gradients_are_the_plain_ones_and_one_graph_serves_all_sizes() -> None:
    plain, fast = heard(), compiled(heard())
    graphs = []
    for shape in SHAPES:
        expected = gradients(plain, shape, bf16=False)
        assert furthest(gradients(fast, shape, bf16=False), expected) < 1e-4
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[-1] == graphs[0]
    # in 16 bits as far from float32 as the plain way is
    own = furthest(gradients(plain, SHAPES[-1], bf16=True), expected)
    assert furthest(gradients(fast, SHAPES[-1], bf16=True), expected) < 1.5 * own


def test_another_size_would_be_another_graph_without_dynamic_shapes() -> None:
    """The control of counting graphs."""
    model = heard()
    model.encoder.layers[0].compile(dynamic=False, backend="aot_eager")
    counts = []
    for shape in SHAPES[:2]:
        gradients(model, shape, bf16=False)
        counts.append(counters["stats"]["unique_graphs"])
    assert counts[1] > counts[0]


@pytest.mark.slow
def test_a_run_ends_with_the_plain_runs_weights(tmp_path: Path) -> None:
    """By torch's own compiler, with checkpointing; names of weights stay, and the folder opens as any other."""
    for name, options in (("plain", {}), ("fast", {"torch_compile": True})):
        run = trainer(comb_model(gate=0.5), tmp_path / name, steps=3, gradient_checkpointing=True, **options)
        run.train()
        run.save_checkpoint()
    [plain, fast] = (
        load_file(next((tmp_path / name).glob("checkpoint-*/model.safetensors"))) for name in ("plain", "fast")
    )
    assert counters["stats"]["unique_graphs"] > 0
    assert plain.keys() == fast.keys()
    for name, weights in plain.items():
        torch.testing.assert_close(fast[name], weights, rtol=1e-3, atol=1e-5, msg=name)


def test_only_an_encoder_is_compiled() -> None:
    with pytest.raises(ValueError, match="compiles an encoder, and"):
        config_from_dict({"model": {"backbone": "x"}, "train": {"method": "linktokens", "torch_compile": True}})
    assert all(isinstance(part, nn.Module) for part in training_method("comb").compiled_parts(heard()))
