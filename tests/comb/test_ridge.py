"""Heads in closed form: they say the backbone's keys and values as well as the encoder's depth allows."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comb.model.modeling import CombForCausalLM
from comb.model.ridge import fit_to_backbone
from tests.helpers.families import tiny


def passages(count: int = 40) -> list[tuple[int, ...]]:
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(6, 20, (count,), generator=generator).tolist()
    return [tuple(torch.randint(3, 60, (length,), generator=generator).tolist()) for length in lengths]


def encoder_of_first_layers(family: str, depth: int) -> CombForCausalLM:
    return CombForCausalLM.from_backbone(
        tiny(family), num_encoder_layers=depth, cross_attention_layers=[2], initialization="first_layers"
    )


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_an_encoder_as_deep_as_the_layer_is_fitted_exactly(family: str) -> None:
    """Its output is what the layer is given, so keys and values are linear in it (but for Qwen3's norms)."""
    model = encoder_of_first_layers(family, 2)
    head: Any = model.encoder.key_value_heads[0]
    torch.nn.init.normal_(head.k_proj.weight)
    torch.nn.init.normal_(head.v_proj.weight)
    [fit] = fit_to_backbone(model, passages(), ridge=1e-6)
    assert fit.layer == 2
    assert fit.values > (0.9 if family == "gemma3" else 0.999)  # its sliding layers see less than the encoder
    assert fit.keys > (0.999 if family == "llama" else 0.8)


def test_less_depth_says_less() -> None:
    deep, flat = encoder_of_first_layers("llama", 2), encoder_of_first_layers("llama", 1)
    [exact], [approximate] = (
        fit_to_backbone(deep, passages(), ridge=1e-6),
        fit_to_backbone(flat, passages(), ridge=1e-6),
    )
    assert approximate.values < exact.values - 1e-3


def test_the_solution_is_the_least_squares_one() -> None:
    model = encoder_of_first_layers("llama", 1)
    data = passages(12)
    fit_to_backbone(model, data, ridge=0.5)
    head: Any = model.encoder.key_value_heads[0]
    rows, wanted = [], []
    layer: Any = model.backbone.model.layers[2]
    for passage in data:
        with torch.no_grad():
            states = model.backbone.model(torch.tensor([passage]), output_hidden_states=True).hidden_states
            given: list[torch.Tensor] = []
            hook = head.register_forward_pre_hook(lambda _, args, given=given: given.append(args[0]))
            model.encode([passage])
            hook.remove()
            rows.append(head.norm(given[0])[0, 1:].double())
            wanted.append(layer.self_attn.v_proj(layer.input_layernorm(states[2]))[0, 1:].double())
    x, y = torch.cat(rows), torch.cat(wanted)
    x = torch.cat((x, torch.ones(len(x), 1, dtype=torch.float64)), 1)
    penalty = torch.eye(x.shape[1], dtype=torch.float64) * 0.5
    penalty[-1, -1] = 0
    solution = torch.linalg.solve(x.T @ x + penalty, x.T @ y)
    torch.testing.assert_close(head.v_proj.weight.double(), solution[:-1].T, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(head.v_proj.bias.double(), solution[-1], atol=1e-4, rtol=1e-4)


def test_heads_of_latent_attention_stay_as_they_are() -> None:
    model = encoder_of_first_layers("deepseek_v3", 1)
    before = model.encoder.key_value_heads[0].k_proj.weight.clone()  # type: ignore[operator, union-attr]
    assert fit_to_backbone(model, passages(8)) == []
    assert torch.equal(before, model.encoder.key_value_heads[0].k_proj.weight)  # type: ignore[arg-type, union-attr]
