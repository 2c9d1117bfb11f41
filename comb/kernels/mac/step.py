"""One decode step of MAC attention: match, amend, complete. A function of tensors; `MacState.write` keeps its rows.

Positions are counted per row without its padding: row b's keys begin at key index ``start[b]``, its query stands at
m = L - 1 - start[b]. With sink F and E(p) = max(p + 1 - r, 0), per row and query head:

    hit at p   entry = merge(summary of p, attention of the query to [E(p), E(m)))
    miss       entry = attention of the query to [F, E(m))
    output     merge(entry, attention to [0, F), attention to [E(m), m + 1))

so a hit reads m + 1 - E(p) + F keys and a miss m + 1. Attention takes the rotated query, the match the unrotated one.
The kernels do the same in three launches.

Shapes: B rows, H query heads, G key/value heads, L keys, D and V channels.
Source: MAC-Attention sec. 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comb.kernels.mac.algebra import EMPTY, accumulator, attend_ranges, merge
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState, RingEntries

RANGES = ("amend", "tail", "sink")
"""Of keys that a step reads: what a reused summary doesn't hold, up to E(m); tail and sink, which are never kept."""


@dataclass(frozen=True)
class Match:
    """Per row and query head, all [B, H].

    Args:
        slot: where the summary to reuse lies in the ring; anything where there is none.
        pos: the position p of its query; -1 where there is none.
        distance: to that query, with the drift along its chain not added; inf where there is none.
    """

    slot: Tensor
    pos: Tensor
    distance: Tensor

    @property
    def hit(self) -> Tensor:
        """Whether there is a summary to reuse."""
        return self.pos >= 0


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
    return Match(slot, torch.where(hit, found, torch.full_like(found, -1)), nearest.sqrt())


@dataclass(frozen=True)
class MacStep:
    """What one step gave.

    Args:
        output: [B, H, V], in the accumulator's dtype.
        match: which earlier query each head reused.
        position: m per row [B].
        keys_read: per row and query head [B, H].
        groups: G, key/value heads.
        tail_lse: log-sum-exp of the band [E(m), m + 1) alone [B, H], and `lse` of all keys: their difference is the
            band's share of the attention.
    """

    output: Tensor
    match: Match
    position: Tensor
    keys_read: Tensor
    groups: int
    tail_lse: Tensor
    lse: Tensor

    @property
    def group_keys_read(self) -> Tensor:
        """As far back as the worst of the query heads that share a key/value head, read once for all [B, G]."""
        worst: Tensor = self.keys_read.unflatten(1, (self.groups, -1)).amax(-1)
        return worst


def step(
    state: MacState,
    unrotated: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    config: MacConfig,
    scale: float,
) -> tuple[MacStep, RingEntries]:
    """Attention of one new token per row, its own key included, and what to write into `state`, which it only reads.

    The plain twin of `comb.kernels.mac.kernel.fused_step`.

    Args:
        unrotated, query: [B, H, D] before and after the rotary embedding.
        keys, values: [B, G, L, D] and [B, G, L, V].
        start: [B], how many keys of padding stand in front.
    """
    kind, heads = accumulator(query.dtype), query.shape[1]
    position = keys.shape[2] - 1 - start
    match = find_match(state, unrotated, position, config)
    own_end = end(position, config)
    sink_end = own_end.clamp_max(config.sink)[:, None]
    low = torch.where(match.hit, end(match.pos, config), sink_end)
    bounds = (
        (low, own_end[:, None]),
        (own_end[:, None], position[:, None] + 1),
        (torch.zeros_like(sink_end), sink_end),
    )
    lows, highs = (
        torch.stack([(bound[side] + start[:, None]).expand(-1, heads) for bound in bounds]) for side in (0, 1)
    )
    (fresh_o, tail_o, sink_o), (fresh_lse, tail_lse, sink_lse) = attend_ranges(query, keys, values, lows, highs, scale)
    o, lse, chain, drift = _reused(state, match)
    entry_o, entry_lse = merge(o, lse.masked_fill(~match.hit, EMPTY), fresh_o, fresh_lse)
    output, lse = merge(*merge(entry_o, entry_lse, tail_o, tail_lse), sink_o, sink_lse)
    keys_read = torch.where(match.hit, position[:, None] + 1 - low + config.sink, position[:, None] + 1)
    rows = RingEntries(
        query=unrotated.to(kind)[:, None],
        o=entry_o[:, None],
        lse=entry_lse[:, None],
        chain=torch.where(match.hit, chain + 1, torch.zeros_like(chain))[:, None],
        drift=torch.where(match.hit, drift + match.distance.to(drift.dtype), torch.zeros_like(drift))[:, None],
        pos=position[:, None],
    )
    return MacStep(output, match, position, keys_read, keys.shape[1], tail_lse, lse), rows


def _reused(state: MacState, match: Match) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summary, chain and drift of the matched slots: o [B, H, V], the others [B, H]."""
    index = match.slot[:, None]
    lse, chain, drift = (ring.gather(1, index)[:, 0] for ring in (state.lse, state.chain, state.drift))
    o = state.o.gather(1, index[..., None].expand(-1, -1, -1, state.o.shape[-1]))[:, 0]
    return o.to(lse.dtype), lse, chain, drift
