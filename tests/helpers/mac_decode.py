"""One request after another, decoded token by token by the plain step of MAC attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import EMPTY, MacState, accumulator, prompt_rows
from comb.kernels.mac.step import MacStep, attend, merge, step


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
        self.state.write(
            prompt_rows(
                self.unrotated(index), self.rotated[:, :, index], self.keys[:, :, :length],
                self.values[:, :, :length], index, self.start, self.config, self.scale,
            )
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
        done, self.rows = step(*self.inputs(m))
        self.state.write(self.rows)
        return done

    def exact(self, m: int) -> Tensor:
        _, _, rotated, keys, values, start, *_ = self.inputs(m)
        group = torch.arange(rotated.shape[1]) // (rotated.shape[1] // keys.shape[1])
        inside = torch.arange(m + 1) >= start[:, None, None]
        return attend(rotated, keys[:, group], values[:, group], self.scale, inside)[0]


def attend_range(
    query: Tensor, keys: Tensor, values: Tensor, low: int, high: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend` to the keys [low, high) of [..., T, D]; an empty range where `high` is not above `low`."""
    low = max(low, 0)
    return attend(query, keys[..., low : max(high, low), :], values[..., low : max(high, low), :], scale)


def step_in_order(
    state: MacState,
    unrotated: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    config: MacConfig,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The plain twin of `step`, row by row and head by head.

    Returns:
        outputs [B, H, V], entries' o [B, H, V] and lse [B, H], keys read [B, H].
    """
    kind = accumulator(query.dtype)
    rows, heads = query.shape[:2]
    output = torch.zeros(rows, heads, values.shape[-1], dtype=kind)
    entries, lses = torch.zeros_like(output), torch.zeros(rows, heads, dtype=kind)
    read = torch.zeros(rows, heads, dtype=torch.long)
    limit = config.threshold(query.shape[-1])
    for b in range(rows):
        m = keys.shape[2] - 1 - int(start[b])
        for h in range(heads):
            g = h // (heads // keys.shape[1])
            k, v = keys[b, g, int(start[b]) :], values[b, g, int(start[b]) :]
            best: tuple[float, int] | None = None
            for p in range(max(0, m - min(config.window, config.max_gap or config.window)), m):
                slot = p % config.window
                if m < config.min_length or int(state.pos[b, slot]) != p:
                    continue
                if p + 1 - config.band < max(config.sink, 1) or float(state.lse[b, slot, h]) == EMPTY:
                    continue
                if config.max_chain is not None and int(state.chain[b, slot, h]) >= config.max_chain:
                    continue
                far = float((unrotated[b, h].to(kind) - state.query[b, slot, h].to(kind)).square().sum())
                if config.max_drift and (far**0.5 + float(state.drift[b, slot, h])) ** 2 >= limit:
                    continue
                if far < limit and (best is None or far < best[0]):
                    best = far, p
            own_end = max(m + 1 - config.band, 0)
            sink_end = min(config.sink, own_end)
            if best is None:
                o, lse = attend_range(query[b, h], k, v, sink_end, own_end, scale)
                read[b, h] = m + 1
            else:
                low, slot = best[1] + 1 - config.band, best[1] % config.window
                o, lse = state.o[b, slot, h].to(kind), state.lse[b, slot, h]
                band = attend_range(query[b, h], k, v, low, own_end, scale)
                o, lse = merge(o, lse, *band)
                read[b, h] = m + 1 - low + config.sink
            entries[b, h], lses[b, h] = o, lse
            o, lse = merge(o, lse, *attend_range(query[b, h], k, v, own_end, m + 1, scale))
            output[b, h] = merge(o, lse, *attend_range(query[b, h], k, v, 0, sink_end, scale))[0]
    return output, entries, lses, read
