"""Attention over a range of keys with its log-sum-exp, and how two such summaries become one.

A summary of a set of keys is the pair (o, lse): the softmax-weighted mean of their values, and the log of the softmax's
denominator. Disjoint sets merge. An empty set is (0, -inf).

Shapes: D query channels, V value channels, T keys; leading dimensions are arbitrary.
Source: MAC-Attention sec. 3.1 and 3.4, after Milakov & Gimelshein (2018).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

EMPTY = -math.inf
"""The log-sum-exp of no keys."""


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores and sums of `dtype` inputs are taken: never fewer than 32 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


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
    weights = torch.exp(scores - _finite(lse)[..., None])
    return (weights[..., None, :] @ values.to(kind))[..., 0, :], lse


def attend_range(
    query: Tensor, keys: Tensor, values: Tensor, low: int, high: int, scale: float
) -> tuple[Tensor, Tensor]:
    """`attend` to the keys [low, high) of [..., T, D]; an empty range where `high` is not above `low`."""
    low = max(low, 0)
    return attend(query, keys[..., low : max(high, low), :], values[..., low : max(high, low), :], scale)


def attend_ranges(
    query: Tensor, keys: Tensor, values: Tensor, low: Tensor, high: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention of `query` [B, H, D] to R ranges [low, high) of key indices each, all [R, B, H].

    Keys [B, G, L, D] and values [B, G, L, V]; heads that share them read what any of them wants. The plain twin of
    `comb.kernels.mac.kernel.attend_ranges`.

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
    highest = _finite(torch.maximum(lse1, lse2))
    weight1, weight2 = torch.exp(lse1 - highest), torch.exp(lse2 - highest)
    total = weight1 + weight2
    some = total.clamp_min(torch.finfo(total.dtype).tiny)
    o = (o1 * weight1[..., None] + o2 * weight2[..., None]) / some[..., None]
    return o, torch.where(total > 0, highest + torch.log(some), torch.full_like(total, EMPTY))


def _finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for -inf, so that differences to it are never NaN."""
    return torch.where(lse == EMPTY, torch.zeros_like(lse), lse)
