"""One decode step of MAC attention: match, amend, complete.

Positions are counted per row without its padding: row b's keys begin at key index ``start[b]``, its query stands at
m = L - 1 - start[b]. With sink F and E(p) = max(p + 1 - r, 0), per row and query head:

    hit at p   entry = merge(summary of p, attention of the query to [E(p), E(m)))
    miss       entry = attention of the query to [F, E(m))
    output     merge(entry, attention to [0, F), attention to [E(m), m + 1))

so a hit reads m + 1 - E(p) + F keys and a miss m + 1. Attention takes the rotated query, the match the unrotated one.
A summary of a set of keys is the pair (o, lse): the softmax-weighted mean of their values, and the log of the softmax's
denominator. Disjoint sets merge; an empty one is (0, -inf).

Shapes: B rows, H query heads, G key/value heads, L keys, D and V channels.
Source: MAC-Attention sec. 3, after Milakov & Gimelshein (2018).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import EMPTY, MacState, accumulator, finite

RANGES = ("amend", "tail", "sink")
"""Of keys that a step reads: what a reused summary doesn't hold, up to E(m); tail and sink, which are never kept."""


@dataclass(frozen=True)
class Match:
    """Which summary each row and query head reuses, all [B, H]."""

    slot: Tensor  # where it lies in the ring; anything where there is none
    pos: Tensor  # the position p of its query; -1 where there is none
    distance: Tensor  # to that query, with the drift along its chain not added; inf where there is none

    @property
    def hit(self) -> Tensor:
        return self.pos >= 0


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
    able = (pos >= oldest.clamp_min(0)) & (pos < position[:, None, None]) & (config.end(pos) > config.sink)
    able = able & (state.lse > EMPTY)  # [B, K, H]
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
    """What one step gave."""

    output: Tensor  # [B, H, V], in the accumulator's dtype
    match: Match
    position: Tensor  # m per row [B]
    keys_read: Tensor  # [B, H]
    groups: int  # G
    lse: Tensor  # log-sum-exp of all keys [B, H]

    @property
    def group_keys_read(self) -> Tensor:
        """As far back as the worst of the query heads that share a key/value head, read once for all [B, G]."""
        worst: Tensor = self.keys_read.unflatten(1, (self.groups, -1)).amax(-1)
        return worst


def step(
    state: MacState, unrotated: Tensor, query: Tensor, keys: Tensor, values: Tensor, start: Tensor, config: MacConfig,
    scale: float,
) -> MacStep:  # fmt: skip
    """Attention of one new token per row, its own key included; what it leaves is put into `state`.

    The plain twin of `comb.kernels.mac.kernel.fused_step`.

    Args:
        unrotated, query: [B, H, D] before and after the rotary embedding.
        keys, values: [B, G, L, D] and [B, G, L, V].
        start: [B], how many keys of padding stand in front.
    """
    kind, heads = accumulator(query.dtype), query.shape[1]
    position = keys.shape[2] - 1 - start
    match = find_match(state, unrotated, position, config)
    own_end = config.end(position)
    sink_end = own_end.clamp_max(config.sink)[:, None]
    low = torch.where(match.hit, config.end(match.pos), sink_end)
    bounds = (
        (low, own_end[:, None]),
        (own_end[:, None], position[:, None] + 1),
        (torch.zeros_like(sink_end), sink_end),
    )
    lows, highs = (
        torch.stack([(bound[side] + start[:, None]).expand(-1, heads) for bound in bounds]) for side in (0, 1)
    )
    (fresh_o, tail_o, sink_o), (fresh_lse, tail_lse, sink_lse) = attend_ranges(query, keys, values, lows, highs, scale)
    slot, miss = match.slot[:, None], ~match.hit
    lse, chain, drift = (ring.gather(1, slot)[:, 0] for ring in (state.lse, state.chain, state.drift))
    o = state.o.gather(1, slot[..., None].expand(-1, -1, -1, state.o.shape[-1]))[:, 0].to(lse.dtype)
    entry_o, entry_lse = merge(o, lse.masked_fill(miss, EMPTY), fresh_o, fresh_lse)
    output, lse = merge(*merge(entry_o, entry_lse, tail_o, tail_lse), sink_o, sink_lse)
    keys_read = torch.where(match.hit, position[:, None] + 1 - low + config.sink, position[:, None] + 1)
    # behind all reads: the slot that is reused may be the one that is written
    state.write(
        position[:, None],
        query=unrotated.to(kind)[:, None],
        o=entry_o[:, None],
        lse=entry_lse[:, None],
        chain=(chain + 1).masked_fill(miss, 0)[:, None],
        drift=(drift + match.distance.to(drift.dtype)).masked_fill(miss, 0)[:, None],
    )
    return MacStep(output, match, position, keys_read, keys.shape[1], lse)


def attend(
    query: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Attention of `query` [..., D] to `keys` [..., T, D] with `values` [..., T, V], where `mask` [..., T] is True.

    Returns:
        o [..., V] and lse [...], both in the accumulator's dtype; (0, -inf) where there is no key.
    """
    kind = accumulator(query.dtype)
    scores = (keys.to(kind) @ query.to(kind)[..., None])[..., 0] * scale
    if mask is not None:
        scores = scores.masked_fill(~mask, EMPTY)
    lse = torch.logsumexp(scores, dim=-1) if scores.shape[-1] else scores.new_full(scores.shape[:-1], EMPTY)
    weights = torch.exp(scores - finite(lse)[..., None])
    return (weights[..., None, :] @ values.to(kind))[..., 0, :], lse


def attend_ranges(
    query: Tensor, keys: Tensor, values: Tensor, low: Tensor, high: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `query` [B, H, D] to R ranges [low, high) of key indices each, all [R, B, H].

    Keys [B, G, L, D] and values [B, G, L, V]; heads that share them read what any of them wants. The plain twin of
    `comb.kernels.mac.kernel.range_pieces`.

    Returns:
        o [R, B, H, V] and lse [R, B, H], in the accumulator's dtype; (0, -inf) where a range is empty.
    """
    kind, groups = accumulator(query.dtype), keys.shape[1]
    shared = query.shape[1] // groups
    o = torch.zeros(*low.shape, values.shape[-1], dtype=kind, device=query.device)
    lse = torch.full(low.shape, EMPTY, dtype=kind, device=query.device)
    firsts, lasts = low.unflatten(2, (groups, shared)).amin(-1), high.unflatten(2, (groups, shared)).amax(-1)
    wanted = torch.stack([firsts, lasts], -1).flatten(0, 2).tolist()  # one wait for the device
    for place, (first, last) in enumerate(wanted):
        if first >= last:
            continue
        one, (b, g) = place // (len(query) * groups), divmod(place % (len(query) * groups), groups)
        own, index = slice(g * shared, (g + 1) * shared), torch.arange(first, last, device=query.device)
        inside = (index >= low[one, b, own, None]) & (index < high[one, b, own, None])
        key, value = (tensor[b, g, first:last][None] for tensor in (keys, values))
        o[one, b, own], lse[one, b, own] = attend(query[b, own], key, value, scale, inside)
    return o, lse


def merge(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    """The summary of the union of two disjoint sets of keys, from o [..., V] and lse [...] of each."""
    highest = finite(torch.maximum(lse1, lse2))
    weight1, weight2 = torch.exp(lse1 - highest), torch.exp(lse2 - highest)
    total = weight1 + weight2
    some = total.clamp_min(torch.finfo(total.dtype).tiny)
    o = (o1 * weight1[..., None] + o2 * weight2[..., None]) / some[..., None]
    return o, torch.where(total > 0, highest + torch.log(some), torch.full_like(total, EMPTY))
