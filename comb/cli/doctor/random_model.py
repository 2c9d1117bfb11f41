"""A small random model of an architecture, where the real weights are too large to try things on, or not there."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM

_LAYERS = 4
_LIMITS = {
    "vocab_size": 1024, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4,
}  # fmt: skip
_STD = 0.1


def random_model(config: Any, *, seed: int = 0) -> Any:
    """A random model of `config`'s architecture in float32: same heads, positions and layer kinds, few layers.

    Layers are cut to the first few that show every kind; vocabulary, MLP and number of experts are made small. Its
    matrices are larger than usual at initialisation, so that attention looks at something.

    Raises:
        ValueError: when the shrunken configuration doesn't make a model.
    """
    config = config.get_text_config(decoder=True)
    values = config.to_dict()
    own_name = getattr(config, "attribute_map", {})  # GPT-2 says n_layer
    depth = int(config.num_hidden_layers)
    kinds = values.get("layer_types") or []
    layers = min(depth, max(_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds)))) if kinds else min(depth, _LAYERS)
    for name, value in values.items():
        if isinstance(value, list) and len(value) == depth:
            values[name] = value[:layers]
    for name, limit in ((own_name.get(name, name), limit) for name, limit in _LIMITS.items()):
        if isinstance(values.get(name), int):
            values[name] = min(values[name], limit)
    if isinstance(values.get("num_experts_per_tok"), int):
        values["num_experts_per_tok"] = min(values["num_experts_per_tok"], 2)
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if isinstance(values.get(name), int):
            values[name] = min(values[name], values["vocab_size"] - 1)
        elif isinstance(values.get(name), list):
            values[name] = [min(token, values["vocab_size"] - 1) for token in values[name]]
    values.update({own_name.get("num_hidden_layers", "num_hidden_layers"): layers, "dtype": "float32"})
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(type(config).from_dict(values)).eval()
    except Exception as error:
        raise ValueError(
            f"no small random model of {config.model_type!r} can be made ({type(error).__name__}: {error}); try the "
            "model's own weights, without --random"
        ) from error
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=_STD)
    return model
