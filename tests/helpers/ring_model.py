"""A hybrid that transformers doesn't have: linear layers with rotary positions inside, as in Ring and Bailing-linear.

A Llama whose linear layers are of one class that nothing in the library knows, with one of three recurrences: a
constant scalar decay (Ring), the gated delta rule with rotated keys (dense), or a decay per key channel.
"""

from __future__ import annotations

from typing import Any

import torch
import transformers as tf
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from tests.helpers.hybrids import BASE, PATTERN


class RotaryLinearAttention(nn.Module):
    """State [rows, heads, head_dim, head_dim], float32."""

    def __init__(self, config: Any, layer_idx: int, recurrence: str) -> None:
        super().__init__()
        self.layer_idx, self.recurrence = layer_idx, recurrence
        self.heads, self.width = config.num_attention_heads, config.head_dim
        inner = self.heads * self.width
        self.qkv = nn.Linear(config.hidden_size, 3 * inner, bias=False)
        self.gate = nn.Linear(config.hidden_size, self.heads * (self.width if recurrence == "diagonal" else 1))
        self.out = nn.Linear(inner, config.hidden_size, bias=False)
        self.register_buffer("rate", 0.02 * 2.0 ** torch.arange(self.heads), persistent=False)

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, cache: Any = None, past_key_values: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        cache = past_key_values if cache is None else cache  # the name until transformers 5.24
        rows, tokens, _width = hidden_states.shape
        parts = self.qkv(hidden_states).view(rows, tokens, self.heads, 3 * self.width).transpose(1, 2)
        query, key, value = parts.split(self.width, dim=-1)
        key = nn.functional.normalize(key, dim=-1)
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        gates = torch.sigmoid(self.gate(hidden_states))
        layer = None if cache is None else cache.layers[self.layer_idx]
        state = hidden_states.new_zeros(rows, self.heads, self.width, self.width, dtype=torch.float32)
        if layer is not None and layer.has_previous_state[0]:
            state = layer.recurrent_states[0]
        outputs = []
        for index in range(tokens):
            k, v = key[:, :, index, :, None], value[:, :, index, None, :]
            if self.recurrence == "scalar":
                state = state * torch.exp(-self.rate)[None, :, None, None] + k * v
            elif self.recurrence == "dense":
                beta = gates[:, index, :, None, None]
                state = 0.99 * state
                state = state + beta * k * (v - (k * state).sum(dim=2, keepdim=True))
            else:
                decay = 1 - 0.1 * gates[:, index].view(rows, self.heads, self.width, 1)
                state = decay * state + k * v
            outputs.append((query[:, :, index, :, None] * state).sum(dim=2))
        if layer is not None:
            cache.update_recurrent_state(state, self.layer_idx)
            layer.has_previous_state[0] = True
        mixed = torch.stack(outputs, dim=1).reshape(rows, tokens, -1)
        return self.out(mixed.to(hidden_states.dtype)), None


def tiny_ring(recurrence: str = "scalar") -> Any:
    """Four layers, one of them full, hidden size 48; always the same."""
    torch.manual_seed(0)
    config = tf.LlamaConfig(**BASE, head_dim=12, layer_types=PATTERN)
    model: Any = tf.LlamaForCausalLM(config)
    for index, kind in enumerate(PATTERN):
        if kind == "linear_attention":
            model.model.layers[index].self_attn = RotaryLinearAttention(config, index, recurrence)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.6 * parameter.shape[1] ** -0.5)
    return model.eval()
