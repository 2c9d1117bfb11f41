"""One decode step of MAC attention: match, amend, complete. A function of tensors; `MacState.write` keeps its rows.

Positions are counted per row without its padding: row b's keys begin at key index ``start[b]``, its query stands at
m = L - 1 - start[b]. With sink F and E(p) = max(p + 1 - r, 0), per row and query head:

    hit at p   entry = merge(summary of p, attention of the query to [E(p), E(m)))
    miss       entry = attention of the query to [F, E(m))
    output     merge(entry, attention to [0, F), attention to [E(m), m + 1))

so a hit reads m + 1 - E(p) + F keys and a miss m + 1. Attention takes the rotated query, the match the unrotated one.
`step_in_order` is the plain twin of `step`: row by row, head by head.

Shapes: B rows, H query heads, G key/value heads, L keys, D and V channels.
Source: MAC-Attention sec. 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comb.kernels.mac.algebra import EMPTY, accumulator, attend, attend_range, merge
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.match import Match, end, find_match
from comb.kernels.mac.state import MacState, RingEntries


@dataclass(frozen=True)
class MacStep:
    """What one step gave.

    Args:
        output: [B, H, V], in the accumulator's dtype.
        rows: what to write into the state.
        match: which earlier query each head reused.
        position: m per row [B].
        keys_read: per row and query head [B, H].
        group_keys_read: the same for a kernel that reads a key/value head once for all its query heads, so as far
            back as the worst of them [B, G].
        tail_lse: log-sum-exp of the band [E(m), m + 1) alone [B, H], and `lse` of all keys: their difference is the
            band's share of the attention.
    """

    output: Tensor
    rows: RingEntries
    match: Match
    position: Tensor
    keys_read: Tensor
    group_keys_read: Tensor
    tail_lse: Tensor
    lse: Tensor


def step(
    state: MacState,
    unrotated: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    config: MacConfig,
    scale: float,
) -> MacStep:
    """Attention of one new token per row, its own key included; reads `state`, doesn't change it.

    Args:
        unrotated, query: [B, H, D] before and after the rotary embedding.
        keys, values: [B, G, L, D] and [B, G, L, V].
        start: [B], how many keys of padding stand in front.
    """
    kind, heads, groups = accumulator(query.dtype), query.shape[1], keys.shape[1]
    position = keys.shape[2] - 1 - start
    match = find_match(state, unrotated, position, config)
    own_end = end(position, config)
    low = torch.where(match.hit, end(match.pos, config), _sink_end(own_end, config)[:, None])

    # amend: what the reused summary doesn't hold, up to E(m)
    every = torch.ones_like(match.hit)
    fresh = _gathered(query, keys, values, (low + start[:, None]), (own_end + start)[:, None], match.hit, scale)
    missed_o, missed_lse = _missed(query, keys, values, low + start[:, None], own_end + start, match.hit, scale)
    o, lse, chain, drift = _reused(state, match)
    hit = match.hit[..., None]
    merged_o, merged_lse = merge(o, lse, *fresh)
    entry_o = torch.where(hit, merged_o, missed_o)
    entry_lse = torch.where(match.hit, merged_lse, missed_lse)

    # complete: sink and tail are read fresh and never kept
    last = (position + 1 + start)[:, None]
    tail = _gathered(query, keys, values, (own_end + start)[:, None].expand(-1, heads), last, every, scale)
    result = merge(entry_o, entry_lse, *tail)
    if config.sink:
        sink_end = (_sink_end(own_end, config) + start)[:, None]
        result = merge(
            *result, *_gathered(query, keys, values, start[:, None].expand(-1, heads), sink_end, every, scale)
        )
    keys_read = torch.where(match.hit, position[:, None] + 1 - low + config.sink, position[:, None] + 1)
    rows = RingEntries(
        query=unrotated.to(kind)[:, None],
        o=entry_o[:, None],
        lse=entry_lse[:, None],
        chain=torch.where(match.hit, chain + 1, torch.zeros_like(chain))[:, None],
        drift=torch.where(match.hit, drift + match.distance.to(drift.dtype), torch.zeros_like(drift))[:, None],
        pos=position[:, None],
    )
    worst = keys_read.unflatten(1, (groups, heads // groups)).amax(-1)
    return MacStep(result[0], rows, match, position, keys_read, worst, tail[1], result[1])


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
    """`step`, row by row and head by head: outputs [B, H, V], entries' o [B, H, V] and lse [B, H], keys read [B, H]."""
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


def _sink_end(own_end: Tensor, config: MacConfig) -> Tensor:
    return own_end.clamp_max(config.sink)


def _reused(state: MacState, match: Match) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Summary, chain and drift of the matched slots: o [B, H, V], the others [B, H]."""
    index = match.slot[:, None]
    lse, chain, drift = (ring.gather(1, index)[:, 0] for ring in (state.lse, state.chain, state.drift))
    return _at_slot(state.o, match.slot).to(lse.dtype), lse, chain, drift


def _at_slot(ring: Tensor, slot: Tensor) -> Tensor:
    """What lies in a ring [B, K, H, D] at the slots [B, H]: [B, H, D]."""
    return ring.gather(1, slot[:, None, :, None].expand(-1, -1, -1, ring.shape[-1]))[:, 0]


def _gathered(
    query: Tensor, keys: Tensor, values: Tensor, low: Tensor, high: Tensor, wanted: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the key indices [low, high) of each row and head [B, H], as wide as the widest of them."""
    rows, heads = low.shape
    spans = torch.where(wanted, high - low, torch.zeros_like(low))
    width = max(int(spans.max()), 0)
    index = low[..., None] + torch.arange(width, device=low.device)
    inside = (index < (low + spans)[..., None]) & (index >= 0)
    index = index.clamp(0, keys.shape[2] - 1)
    row = torch.arange(rows, device=low.device)[:, None, None]
    group = (torch.arange(heads, device=low.device) // (heads // keys.shape[1]))[None, :, None]
    return attend(query, keys[row, group, index], values[row, group, index], scale, inside)


def _missed(
    query: Tensor, keys: Tensor, values: Tensor, low: Tensor, high: Tensor, hit: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention to the key indices [low, high) where a head has no match; heads that all hit aren't read."""
    kind, groups = accumulator(query.dtype), keys.shape[1]
    per_group = query.shape[1] // groups
    o = torch.zeros(*query.shape[:2], values.shape[-1], dtype=kind, device=query.device)
    lse = torch.full(query.shape[:2], EMPTY, dtype=kind, device=query.device)
    missing = (~hit).unflatten(1, (groups, per_group)).any(-1)
    for b, g in missing.nonzero().tolist():
        own = slice(g * per_group, (g + 1) * per_group)
        first = int(low[b, own][~hit[b, own]].min())
        one = attend_range(query[b, own], keys[b, g][None], values[b, g][None], first, int(high[b]), scale)
        o[b, own], lse[b, own] = one
    return o, lse
