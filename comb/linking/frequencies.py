"""The inverse frequencies of a model's rotary embeddings, found in its buffers; some change with the prompt's length.

Shapes: m rotated pairs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comb.backbones.discovery import LENGTH_DEPENDENT


@dataclass(frozen=True)
class Frequencies:
    """The m inverse frequencies of one rotary embedding, in radians per position.

    Args:
        fixed: [m]; used when `module` is None.
        module, buffer: where a rotary module keeps frequencies that may change with the prompt's length.
        arguments: that the module wants beside hidden state and positions (Gemma 3: the layer type).
        scaling: by which the module multiplies cosines and sines (YaRN's attention factor).
    """

    fixed: Tensor
    module: nn.Module | None = None
    buffer: str = ""
    arguments: tuple[tuple[str, Any], ...] = ()
    scaling: float = 1.0

    def now(self) -> Tensor:
        """[m] float64, as the model's last forward pass used them."""
        return self.fixed if self.module is None else getattr(self.module, self.buffer).detach().double()

    def at(self, length: int) -> Tensor:
        """[m] float64, as the model uses them in a prompt of `length` tokens."""
        if self.module is None:
            return self.fixed
        buffer: Tensor = getattr(self.module, self.buffer)
        positions = torch.tensor([[length - 1]], device=buffer.device)
        self.module(torch.zeros(1, 1, 1, device=buffer.device), positions, **dict(self.arguments))
        current: Tensor = getattr(self.module, self.buffer)  # the call may have put another tensor there
        return current.detach().double()


def frequency_sources(model: Any) -> tuple[list[Frequencies], bool]:
    """Every set of inverse frequencies in sight, and whether they change with the prompt's length."""
    found: list[Frequencies] = []
    scaled = False
    for module, name, buffer in _frequency_buffers(model):
        kinds = getattr(module, "rope_type", None)
        layer_type = (
            next((kind for kind in kinds if name == f"{kind}_inv_freq"), None) if isinstance(kinds, dict) else None
        )
        kind = kinds[layer_type] if isinstance(kinds, dict) and layer_type else kinds
        fixed = buffer.detach().double()
        prefix = name.removesuffix("inv_freq")
        scaling = float(getattr(module, f"{prefix}attention_scaling", 1.0))
        if isinstance(kind, str) and any(word in kind for word in LENGTH_DEPENDENT):
            scaled = True
            arguments = (("layer_type", layer_type),) if layer_type else ()
            found.append(Frequencies(fixed, module, name, arguments, scaling))
        elif not any(s.module is None and s.scaling == scaling and torch.equal(s.fixed, fixed) for s in found):
            found.append(Frequencies(fixed, scaling=scaling))
    if not found:
        found = [Frequencies(frequencies) for frequencies in _by_formula(model)]
    return found, scaled


def _frequency_buffers(model: Any) -> Iterator[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            # "original_inv_freq" is the copy that scaled embeddings go back to
            if name.endswith("inv_freq") and "original" not in name and buffer.ndim == 1:
                yield module, name, buffer


def _by_formula(model: Any) -> Iterator[Tensor]:
    """Models that keep a table of sines instead (GPT-J, CodeGen): base 10000 over their rotary width."""
    config = model.config.get_text_config(decoder=True)
    heads = getattr(config, "num_attention_heads", None)
    widths = {getattr(config, "rotary_dim", None), getattr(config, "head_dim", None)}
    if heads and getattr(config, "hidden_size", None):
        widths.add(config.hidden_size // heads)
    for width in sorted(width for width in widths if isinstance(width, int) and width > 1):
        exponents = torch.arange(0, width, 2, dtype=torch.int64) / width
        yield (1.0 / 10_000**exponents).double()


def original_length(model: Any) -> int:
    """Tokens up to which an embedding that changes with the length is the one of short prompts."""
    config = model.config.get_text_config(decoder=True)
    parameters = getattr(config, "rope_parameters", None) or {}
    parts = [parameters, *(part for part in parameters.values() if isinstance(part, dict))]
    lengths = [
        part["original_max_position_embeddings"] for part in parts if part.get("original_max_position_embeddings")
    ]
    return int(min([*lengths, config.max_position_embeddings]))
