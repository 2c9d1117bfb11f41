"""vLLM's rotary modules, asked in this process: what they turn keys by is found, below and beyond their lengths."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("vllm")

MOST, SIZE, ORIGINAL = 128, 16, 32
_LONG = {"rope_type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0 + n for n in range(8)],
         "original_max_position_embeddings": ORIGINAL}  # fmt: skip
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "partial": {"partial_rotary_factor": 0.5},
    "llama3": {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": ORIGINAL},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "proportional": {"rope_type": "proportional", "partial_rotary_factor": 0.5},
    "longrope": _LONG,
    "longrope, magnitudes": {**_LONG, "short_mscale": 1.1, "long_mscale": 1.4},
}  # fmt: skip


class OneLayer(nn.Module):
    """Brings keys of two heads to one attention layer."""

    def __init__(self, rotary: nn.Module, attention: Any, step: int = 1) -> None:
        super().__init__()
        self.rotary, self.attention, self.step = rotary, [attention], step
        generator = torch.Generator().manual_seed(0)
        self.key = nn.Parameter(torch.randn(1, 2 * SIZE, generator=generator))

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        key = self.key.expand(len(positions), -1).contiguous()
        query, key = self.rotary(positions // self.step, key.clone(), key.clone())
        return self.attention[0].forward(query, key, key.new_ones(key.shape))


def found(monkeypatch: pytest.MonkeyPatch, rope: dict[str, Any], length: int, step: int = 1) -> tuple[Any, OneLayer]:
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import rotary_embedding
    from vllm.model_executor.layers.attention.attention import Attention
    from vllm.model_executor.layers.rotary_embedding import phi3_long_rope_scaled_rope as phi3

    from comb_serving.vllm.linking.positions import find_positions

    config: Any = VllmConfig()
    text = SimpleNamespace(to_dict=lambda: {"rope_parameters": rope})
    config.model_config = SimpleNamespace(max_model_len=length, hf_text_config=text)
    monkeypatch.setattr(phi3, "get_current_vllm_config", lambda: config)
    layer: Any = Attention.__new__(Attention)
    nn.Module.__init__(layer)
    layer.num_heads = layer.num_kv_heads = 2
    layer.head_size = SIZE
    with set_current_vllm_config(config):
        monkeypatch.setattr(rotary_embedding, "_ROPE_DICT", {})
        parameters = {"rope_theta": 1e4, **rope}
        rotary = rotary_embedding.get_rope(SIZE, MOST, rope_parameters=parameters, dtype=torch.float32)
        config.compilation_config.static_forward_context = {"layer": layer}
        model = OneLayer(rotary, layer, step)
        return find_positions(model, {"layer": layer}, config), model


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("length", [ORIGINAL - 8, MOST])
def test_keys_are_taken_to_where_the_module_turns_them(name: str, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    positions, model = found(monkeypatch, ROPES[name], length)
    compiled, linked = torch.arange(8), torch.arange(length - 8, length)
    key = model.key.detach().expand(8, -1).contiguous()
    here, there = (model.rotary(at, key.clone(), key.clone())[1].reshape(8, 2, SIZE) for at in (compiled, linked))
    moved = positions.rerotation(compiled, linked).apply(here.clone(), positions.layers["layer"])
    assert float((moved - there).abs().max()) < 1e-4
    assert float((here - there).abs().max()) > 1e-2


def test_positions_that_the_table_does_not_have_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="no rotary embedding of the model explains"):
        found(monkeypatch, ROPES["default"], MOST, step=3)
