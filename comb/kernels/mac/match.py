"""Match: the nearest earlier query whose summary may be reused (MAC-Attention sec. 3.2)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comb.kernels.mac.algebra import EMPTY
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.state import MacState


@dataclass(frozen=True)
class Match:
    """Per row and query head, all [B, H].

    Args:
        hit: whether there is a summary to reuse.
        slot: where it lies in the ring; anything where there is none.
        pos: the position p of its query; -1 where there is none.
        distance: to that query, with the drift along its chain not added; inf where there is none.
    """

    hit: Tensor
    slot: Tensor
    pos: Tensor
    distance: Tensor


def end(position: Tensor | int, config: MacConfig) -> Tensor:
    """E(p) = max(p + 1 - r, 0): one behind the last key of the summary that position p leaves."""
    return (torch.as_tensor(position) + 1 - config.band).clamp_min(0)


def find_match(state: MacState, query: Tensor, position: Tensor, config: MacConfig) -> Match:
    """The nearest reusable query for `query` [B, H, D] (before the rotary embedding) at `position` [B].

    Among the queries of the window whose summary holds at least one key, lies no farther back than `max_gap`, and
    whose chain and drift are within their caps; the older one of two at the same distance. It must then be strictly
    below the threshold. Distances are taken in 32 bits or more, from differences (no expansion, no cancellation).
    """
    kind = state.lse.dtype
    pos = state.pos[:, :, None]  # [B, K, 1]
    difference = query.to(kind)[:, None] - state.query.to(kind)
    squared = difference.square_().sum(-1)  # [B, K, H]
    oldest = position[:, None, None] - min(config.window, config.max_gap or config.window)
    able = (pos >= oldest.clamp_min(0)) & (pos < position[:, None, None]) & (end(pos, config) > max(config.sink, 0))
    able = able & (state.lse > EMPTY)
    able &= (position >= config.min_length)[:, None, None]
    limit = config.threshold(query.shape[-1])
    below = squared < limit
    if config.max_drift:
        below &= (squared.sqrt() + state.drift.to(kind)).square() < limit
    if config.max_chain is not None:
        able &= state.chain < config.max_chain
    squared = squared.masked_fill(~(able & below), math.inf)
    nearest = squared.amin(dim=1)  # [B, H]
    tied = squared == nearest[:, None]
    slot = torch.where(tied, pos, torch.iinfo(torch.long).max).argmin(dim=1)
    hit = torch.isfinite(nearest)
    found = pos.expand_as(squared).gather(1, slot[:, None])[:, 0]
    return Match(hit, slot, torch.where(hit, found, torch.full_like(found, -1)), nearest.sqrt())
