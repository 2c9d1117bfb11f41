"""LoRA on layers that stay as they are: small matrices beside their linear maps train.

In COMB these are the encoder's layers, as they came from the backbone; cross blocks and K/V heads, which the backbone
has no counterpart of, train in full. What is published holds the merged weights, so that loading and serving know
nothing of it.

Source: Hu et al. 2021 (LoRA); the layers are peft's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

ALPHA = 16
"""The matrices' product is scaled by this / rank."""


def add_lora(layers: nn.Module, *, rank: int) -> None:
    """Puts LoRA beside every linear map of `layers` and freezes everything else in them.

    Raises:
        ValueError: if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("train.lora_rank: peft is not installed (pip install 'comb-pic[train]')") from error
    names = sorted({path for path, module in layers.named_modules() if isinstance(module, nn.Linear)})
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=ALPHA, target_modules=names, bias="none"), layers)


def lora_layers(model: Any) -> dict[str, Any]:
    """The layers with LoRA beside them, by path; empty where there is none."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}


def merged(weights: Mapping[str, Tensor], base: Mapping[str, Tensor], layers: Mapping[str, Any]) -> dict[str, Tensor]:
    """The adapter's weights under their usual names, LoRA added in float32.

    Args:
        weights: trained ones by name, LoRA's matrices among them.
        base: the frozen ones that are published with them, by name.
        layers: as `lora_layers` gives.
    """
    found = {name: weight for name, weight in weights.items() if ".lora_" not in name}
    for name, weight in base.items():
        found[name.replace(".base_layer.", ".")] = weight
    for path, layer in layers.items():
        for adapter, scaling in layer.scaling.items():
            down, up = (weights[f"{path}.{part}.{adapter}.weight"].float() for part in ("lora_A", "lora_B"))
            found[f"{path}.weight"] = found[f"{path}.weight"].float() + scaling * (up @ down)
    return found


@torch.no_grad()
def unload(model: Any) -> None:
    """Merges LoRA into the layers of `model` itself and takes it away."""
    for path, layer in lora_layers(model).items():
        layer.merge()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.get_base_layer())
