"""One request after another, decoded token by token by the plain step of MAC attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState, accumulator, write_prompt
from comb.kernels.mac.step import MacStep, attend, step


def noise(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Decode:
    """Queries [B, H, N, D], keys and values [B, G, N, .]; no rotary embedding unless `rotated` queries are given."""

    def __init__(
        self, config: MacConfig, queries: Tensor, keys: Tensor, values: Tensor, *, rotated: Tensor | None = None,
        start: tuple[int, ...] | None = None,
    ) -> None:  # fmt: skip
        self.config, self.queries, self.keys, self.values = config, queries, keys, values
        self.rotated = queries if rotated is None else rotated
        self.scale = queries.shape[-1] ** -0.5
        self.start = torch.tensor(start or (0,) * len(queries))
        sizes = queries.shape[0], queries.shape[1], queries.shape[-1], values.shape[-1]
        self.state = MacState.empty(*sizes, config, queries)

    def fill(self, length: int) -> None:
        index = torch.arange(max(0, length - self.config.window), length)
        write_prompt(
            self.state, self.unrotated(index), self.rotated[:, :, index], self.keys[:, :, :length],
            self.values[:, :, :length], index, self.start, self.config, self.scale,
        )  # fmt: skip

    def unrotated(self, index: Any) -> Tensor:
        return self.queries[:, :, index].to(accumulator(self.queries.dtype))

    def inputs(self, m: int) -> tuple[Any, ...]:
        """What a step at position m is given."""
        seen = slice(0, m + 1)
        return (
            self.state, self.unrotated(m), self.rotated[:, :, m], self.keys[:, :, seen], self.values[:, :, seen],
            self.start, self.config, self.scale,
        )  # fmt: skip

    def step(self, m: int) -> MacStep:
        return step(*self.inputs(m))

    def exact(self, m: int) -> Tensor:
        _, _, rotated, keys, values, start, *_ = self.inputs(m)
        group = torch.arange(rotated.shape[1]) // (rotated.shape[1] // keys.shape[1])
        inside = torch.arange(m + 1) >= start[:, None, None]
        return attend(rotated, keys[:, group], values[:, group], self.scale, inside)[0]
