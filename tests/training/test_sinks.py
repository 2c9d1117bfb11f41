"""Null keys in closed form: documents compete with as much as in the layer's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from comb.documents.document import Prompt
from comb.model.modeling import CombForCausalLM
from comb_training.data.batches import TrainingExample
from comb_training.models.sinks import fit_sinks
from tests.helpers.families import tiny

LAYER = 2


def examples(count: int = 24) -> list[TrainingExample]:
    """Of one to three documents."""
    generator = torch.Generator().manual_seed(0)

    def ids(length: int) -> tuple[int, ...]:
        return tuple(torch.randint(3, 60, (length,), generator=generator).tolist())

    return [TrainingExample(Prompt(ids(3), tuple(ids(5) for _ in range(1 + i % 3)), ids(9)), ids(4))
            for i in range(count)]  # fmt: skip


def model_of(family: str, layer: int = LAYER) -> CombForCausalLM:
    backbone = tiny(family)
    for parameter in backbone.parameters():  # as small as they are made, all scores are alike
        if parameter.ndim == 2:
            parameter.data *= 4
    return CombForCausalLM.from_backbone(
        backbone, cross_attention_layers=[layer], shared_layers=True, sink="null", gate=0.5
    )


@torch.no_grad()
def test_the_null_key_is_the_least_squares_one() -> None:
    model = model_of("llama")
    attention: Any = model.backbone.model.layers[LAYER].self_attn
    config = model.backbone.config
    heads, groups, size = config.num_attention_heads, config.num_key_value_heads, attention.head_dim
    model.backbone.set_attn_implementation("eager")
    queries, wanted = [], []
    for example in examples():
        ids = torch.tensor([[*example.prompt.query, *example.target]])
        seen = model.backbone.model(ids, output_hidden_states=True, output_attentions=True)
        hidden = model.backbone.model.layers[LAYER].input_layernorm(seen.hidden_states[LAYER])
        q = attention.q_proj(hidden).unflatten(-1, (-1, size))[0].transpose(0, 1).double() / math.sqrt(size)
        k = attention.k_proj(hidden).unflatten(-1, (-1, size))[0].transpose(0, 1).double()
        # of a token's attention to itself, which no rotation changes: its score less the logarithm of its share
        own = (q * k.repeat_interleave(heads // groups, 0)).sum(-1)
        share = seen.attentions[LAYER][0].double().diagonal(dim1=1, dim2=2)
        queries.append(q)
        wanted.append(own - share.log() - math.log(len(example.segments)))
    model.backbone.set_attn_implementation("sdpa")
    quality = fit_sinks(model, examples(), ridge=0.5)
    x = torch.cat(queries, 1).unflatten(0, (groups, -1)).flatten(1, 2)
    y = torch.cat(wanted, 1).unflatten(0, (groups, -1)).flatten(1)
    penalty = torch.eye(size, dtype=torch.float64) * 0.5
    solution = torch.linalg.solve(x.transpose(1, 2) @ x + penalty, (x.transpose(1, 2) @ y[..., None])[..., 0])
    head: Any = model.encoder.key_value_heads[0]
    torch.testing.assert_close(head.null_key.double(), solution, atol=1e-4, rtol=1e-4)
    left = y - (x @ solution[..., None])[..., 0]
    explained = float((1 - left.pow(2).mean(1) / y.var(1, correction=0)).mean())
    assert quality == {LAYER: pytest.approx(explained, abs=1e-3)}
    assert left.pow(2).mean() < 0.9 * y.pow(2).mean()  # what null keys of zeros leave
    assert not head.null_value.any()


@pytest.mark.parametrize("family", ["qwen3", "gemma3", "mixtral", "granite"])
def test_families(family: str) -> None:
    model = model_of(family)
    assert fit_sinks(model, examples()).keys() == {LAYER}
    assert model.encoder.key_value_heads[0].null_key.any()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize(("family", "layer"), [("deepseek_v3", LAYER), ("qwen3_next", 0)])
def test_where_there_is_no_such_attention_they_stay_zero(family: str, layer: int) -> None:
    model = model_of(family, layer)
    assert fit_sinks(model, examples()) == {}
    assert not model.encoder.key_value_heads[0].null_key.any()  # type: ignore[operator, union-attr]


def test_a_model_is_left_as_it_was() -> None:
    model = model_of("llama")
    before = model.backbone.config._attn_implementation
    fit_sinks(model, examples(3))
    assert model.backbone.config._attn_implementation == before
    assert not any(layer._forward_pre_hooks for layer in model.backbone.model.layers)


def test_an_adapter_without_null_keys_is_refused() -> None:
    model = CombForCausalLM.from_backbone(tiny("llama"), cross_attention_layers=[LAYER], shared_layers=True)
    with pytest.raises(ValueError, match=r"model\.fit_sinks solves for null keys"):
        fit_sinks(model, examples(2))
