"""How COMB's blocks start: as the backbone's own attention, some tokens behind, fitted to what documents add there."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from comb import CombForCausalLM
from comb.documents.document import Prompt
from comb.evaluation.placement import fit_blocks
from comb.model.encoder import apply_rotary
from comb.model.initialization import TURN
from tests.helpers.families import tiny

LAYERS = [1, 3]
PROMPTS = [
    (Prompt((3, 4), ((5, 6, 7, 8), (9, 10, 11)), (12, 13)), (14, 15, 16)),
    (Prompt((3,), ((20, 21, 22, 23, 24),), (25, 26, 27, 28)), (29, 30)),
    (Prompt((), ((31, 32), (33, 34, 35, 36)), (37,)), (38, 39, 40, 41)),
]


def fresh(family: str = "llama", **options: Any) -> CombForCausalLM:
    return CombForCausalLM.from_backbone(
        tiny(family).double(), num_encoder_layers=3, cross_attention_layers=LAYERS, encoder_causal=True,
        initialization="first", **options,
    )  # fmt: skip


def heads(attention: Any, x: Tensor, rotary: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of the backbone's own attention at normed states x [tokens, hidden], for each head."""
    q, k, v = (getattr(attention, f"{name}_proj")(x).unflatten(-1, (-1, attention.head_dim)).transpose(0, 1)
               for name in "qkv")  # fmt: skip
    if rotary is not None:
        q, k = (apply_rotary(each[None], *rotary)[0] for each in (q, k))
    return q, k.repeat_interleave(len(q) // len(k), 0), v.repeat_interleave(len(q) // len(v), 0)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
@torch.no_grad()
def test_a_block_looks_at_a_document_as_the_layer_does_from_so_many_tokens_behind(family: str) -> None:
    model = fresh(family)
    assert model.config.encoder_config.cross_qk_norm == "none"
    document, block = PROMPTS[1][0].segments[0], model.cross_blocks[1]
    (pic,) = model.encode([document])
    own = model.backbone.model.layers[LAYERS[1]]
    states = model.backbone(torch.tensor([document]), output_hidden_states=True).hidden_states[LAYERS[1]][0]
    x = torch.randn(1, model.info.hidden_size, dtype=torch.float64)
    positions = torch.cat((torch.zeros(len(document)), torch.tensor([float(TURN)])))[None]
    q, k, _ = heads(own.self_attn, own.input_layernorm(torch.cat((states, x))), model.encoder.rotary(positions))
    query = block.cross_attn.q_proj(block.input_layernorm(x)).view(-1, 1, model.info.head_dim)
    ours = query @ pic.keys[1].repeat_interleave(len(query) // pic.keys.shape[2], 1).permute(1, 2, 0)
    torch.testing.assert_close(ours[:, 0], (q[:, -1:] @ k.mT)[:, 0, :-1], rtol=1e-5, atol=1e-7)


def test_norms_of_queries_and_keys_stay_where_the_backbone_has_them() -> None:
    assert fresh("qwen3").config.encoder_config.cross_qk_norm == "head"


@torch.no_grad()
def test_heads_are_scaled_as_a_plain_loop_finds() -> None:
    model, unfitted = fresh(gate=0.5), fresh(gate=0.5)
    shares = fit_blocks(model, PROMPTS, batch_tokens=20)
    backbone = unfitted.backbone
    for place, layer in enumerate(LAYERS):
        own, block = backbone.model.layers[layer], unfitted.cross_blocks[place]
        columns: list[Tensor] = []
        wanted: list[Tensor] = []
        for prompt, answer in PROMPTS:
            ids = torch.tensor([[*prompt.flat, *answer]])
            states = backbone(ids, output_hidden_states=True).hidden_states[layer][0]
            rotary = backbone.model.rotary_emb(states[None], torch.arange(len(states))[None])
            q, k, v = heads(own.self_attn, own.input_layernorm(states), rotary)
            documents = torch.zeros(len(states), dtype=torch.bool)
            for position, length in prompt.spans:
                documents[position : position + length] = True
            pics = unfitted.encode(prompt.segments)
            keys, values = (torch.cat(each).transpose(0, 1).repeat_interleave(len(q) // pics[0].keys.shape[2], 0)
                            for each in ([p.keys[place] for p in pics], [p.values[place] for p in pics]))  # fmt: skip
            for at in range(len(prompt.flat) - 1, len(states) - 1):
                said = []
                for seen in (torch.arange(len(states)) <= at, (torch.arange(len(states)) <= at) & ~documents):
                    scores = (q[:, at : at + 1] @ k.mT * own.self_attn.scaling).masked_fill(~seen, -torch.inf)
                    said.append(own.self_attn.o_proj((scores.softmax(-1) @ v).flatten()))
                wanted.append(said[0] - said[1])
                x = block.input_layernorm(states[at])
                query = block.cross_attn.q_proj(x).view(len(q), 1, -1)
                mixed = (query @ keys.mT * own.self_attn.scaling).softmax(-1) @ values
                weight = block.cross_attn.o_proj.weight.unflatten(1, (len(q), -1))
                columns.append(torch.einsum("hd,ohd->oh", mixed[:, 0], weight))
        matrix, target = torch.cat(columns), torch.cat(wanted)
        between = matrix.T @ matrix
        ridge = 0.01 * between.diagonal().mean() * torch.eye(len(between), dtype=torch.float64)
        scale = torch.linalg.solve(between + ridge, matrix.T @ target)
        gate = float(block.attention_gate.tanh())
        fitted = model.cross_blocks[place].cross_attn.o_proj.weight / block.cross_attn.o_proj.weight
        expected = (scale / gate).repeat_interleave(model.info.head_dim).expand_as(fitted)
        torch.testing.assert_close(fitted, expected, rtol=1e-3, atol=1e-5)
        share = 1 - (matrix @ scale - target).square().sum() / target.square().sum()
        assert shares[layer] == pytest.approx(float(share), abs=1e-3)
        assert 0 < shares[layer] < 1


def test_what_cant_be_fitted_is_refused() -> None:
    with pytest.raises(ValueError, match="norms behind it or a factor on it"):
        fit_blocks(fresh("granite"), PROMPTS)
    model = fresh()
    model.backbone.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="attn_implementation=sdpa"):
        fit_blocks(model, PROMPTS)
