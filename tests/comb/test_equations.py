"""COMB's equations (sec. 4.2, eq. 1-8) written out in float64, head by head, against encoder and cross blocks.

Independent of the modules' own code and of any file outside the repository: only weights are taken from the model.
Shapes: T document tokens, Q query tokens, D hidden size, d head size.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from comb import CombForCausalLM
from comb.model.cross_attention import LinkedDocuments
from tests.helpers.families import tiny

EPS = 1e-6
TOKENS = torch.tensor([5, 17, 3, 44, 29, 8, 61])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def silu(x: Tensor) -> Tensor:
    return x / (1 + (-x).exp())


def rotate(x: Tensor, theta: float) -> Tensor:
    """[T, d]: pairs (i, i + d/2) turned by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    out = torch.empty_like(x)
    for position in range(len(x)):
        for index in range(half):
            angle = position * theta ** (-2 * index / x.shape[-1])
            a, b = x[position, index], x[position, index + half]
            out[position, index] = a * math.cos(angle) - b * math.sin(angle)
            out[position, index + half] = b * math.cos(angle) + a * math.sin(angle)
    return out


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[Q, d], [T, d], [T, d] -> [Q, d]; every query sees every key."""
    weights = (query @ key.T / math.sqrt(query.shape[-1])).exp()
    return weights / weights.sum(-1, keepdim=True) @ value


def heads_of(x: Tensor, size: int) -> list[Tensor]:
    return list(x.split(size, dim=-1))


def gated_mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (silu(x @ gate.T) * (x @ up.T)) @ down.T


def encode(w: dict[str, Tensor], config: object, layers: int, hidden: Tensor) -> list[Tensor]:
    """Eq. 1-4: every encoder layer's output, [T, D] each. Bidirectional: no mask."""
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads  # type: ignore[attr-defined]
    theta = config.rope_parameters["rope_theta"]  # type: ignore[attr-defined]
    outputs = []
    for index in range(layers):
        at = f"encoder.layers.{index}"
        x = rms_norm(hidden, w[f"{at}.input_layernorm.weight"])
        query, key, value = (heads_of(x @ w[f"{at}.self_attn.{part}_proj.weight"].T, size) for part in ("q", "k", "v"))
        mixed = [
            softmax_attention(rotate(q, theta), rotate(key[head // groups], theta), value[head // groups])
            for head, q in enumerate(query)
        ]
        hidden = hidden + torch.cat(mixed, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        x = rms_norm(hidden, w[f"{at}.post_attention_layernorm.weight"])
        hidden = hidden + gated_mlp(x, w, f"{at}.mlp")
        outputs.append(hidden)
    return outputs


def cross_block(
    w: dict[str, Tensor], config: object, at: int, source: Tensor, hidden: Tensor, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Eq. 5-8: keys and values of one cross block from the encoder's output `source` [T, D], and the gated block."""
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads  # type: ignore[attr-defined]
    head, block = f"encoder.key_value_heads.{at}", f"cross_blocks.{at}"
    norm = w.get(f"{head}.norm.weight")
    source = source if norm is None else rms_norm(source, norm)
    key = [rms_norm(k, w[f"{head}.k_norm.weight"]) for k in heads_of(source @ w[f"{head}.k_proj.weight"].T, size)]
    value = heads_of(source @ w[f"{head}.v_proj.weight"].T, size)
    x = rms_norm(hidden, w[f"{block}.input_layernorm.weight"])
    query = [
        rms_norm(q, w[f"{block}.cross_attn.q_norm.weight"])
        for q in heads_of(x @ w[f"{block}.cross_attn.q_proj.weight"].T, size)
    ]
    mixed = [softmax_attention(q, key[number // groups], value[number // groups]) for number, q in enumerate(query)]
    attended = torch.cat(mixed, -1) @ w[f"{block}.cross_attn.o_proj.weight"].T
    hidden = hidden + gate(w[f"{block}.attention_gate"]) * attended
    x = rms_norm(hidden, w[f"{block}.post_attention_layernorm.weight"])
    return hidden + gate(w[f"{block}.mlp_gate"]) * gated_mlp(x, w, f"{block}.mlp")


@pytest.fixture
def comb_model() -> CombForCausalLM:
    """Two encoder layers, two cross blocks; every trained parameter random, gates far from where tanh(g) is g."""
    torch.manual_seed(4)
    model = CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone."):
                parameter.normal_(0, 0.3)
            if name.endswith("gate"):
                parameter.fill_(1.1)
            elif "norm" in name and not name.startswith("backbone."):
                parameter.add_(1.0)
    return model


@torch.no_grad()
@pytest.mark.parametrize("mutant", [False, True], ids=["tanh", "control without tanh"])
def test_encoder_and_cross_blocks_are_the_papers(comb_model: CombForCausalLM, mutant: bool) -> None:
    gate = (lambda g: g) if mutant else torch.tanh
    model, config = comb_model, comb_model.encoder.config
    assert abs(config.rms_norm_eps - EPS) < 1e-12
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    [picache] = model.encode([TOKENS.tolist()])
    embedded = model.backbone.get_input_embeddings()(TOKENS) * model.config.embedding_scale
    outputs = encode(weights, config, 2, embedded)
    hidden = torch.randn(1, 3, config.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    linked = LinkedDocuments([[(picache.keys, picache.values)]], None)
    for index, block in enumerate(model.cross_blocks):
        ours = block(hidden, linked)[0]
        theirs = cross_block(weights, config, index, outputs[model.encoder.sources[index]], hidden[0], gate)
        distance = float((ours - theirs).abs().max())
        # norms and angles are float32 in the modules
        assert distance > 0.1 if mutant else distance < 1e-5
