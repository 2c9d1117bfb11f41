"""Counts what really passes through a model's layers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from comb.backbones.forward import decoder_of


class LayerTokens:
    """Tokens by decoder layer; a pass that was stopped inside of a layer has not passed it."""

    def __init__(self, layers: nn.ModuleList) -> None:
        self.counts = [0] * len(layers)

    @property
    def tokens(self) -> int:
        """Whole tokens: a share of the layers is that share of one."""
        return math.ceil(sum(self.counts) / len(self.counts))


@contextmanager
def layer_tokens(model: Any) -> Iterator[LayerTokens]:
    """Inside of the block, every token of every row that leaves one of `model`'s decoder layers."""
    layers = max((m for m in decoder_of(model).children() if isinstance(m, nn.ModuleList)), key=len)
    count = LayerTokens(layers)

    numbers = {layer: number for number, layer in enumerate(layers)}

    def note(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if module in numbers:
            hidden = next(each for each in (*args, *kwargs.values()) if isinstance(each, Tensor) and each.ndim == 3)
            count.counts[numbers[module]] += hidden.shape[0] * hidden.shape[1]

    # of all modules, as a model with hooks of its own is another
    with register_module_forward_hook(note, with_kwargs=True):
        yield count
