"""Ring entries of a prompt: the summaries that its last queries leave behind, computed directly.

`MacState` asks for the summary of [F, E(p)) as the query at p saw it. Taking the band out of the attention that the
model has computed anyway (the inverse of `algebra.merge`) would be cheaper, but what is left then has the rounding of
the whole: 1e-2 and worse in 16 bits once the band holds 99% of the mass. One more pass over the last K
queries is exact.

Source: MAC-Attention sec. 4.2 (rectify-append), computed without subtraction.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comb.kernels.mac.algebra import EMPTY, accumulator
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import RingEntries
from comb.kernels.mac.step import end
from comb.waits import on_device

_MAX_SCORES = 2**24


def prompt_rows(
    unrotated: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    index: Tensor,
    start: Tensor,
    config: MacConfig,
    scale: float,
) -> RingEntries:
    """Ring entries of the queries [B, H, N, D] that stand at the key indices `index` [N] of keys [B, G, L, D].

    Args:
        index: sorted, and on the host, where the last one says how many keys are read.
        start: [B], keys of padding in front of a row; queries inside of it give no row.
    """
    kind, heads, groups = accumulator(query.dtype), query.shape[1], keys.shape[1]
    position = on_device(index, start.device)[None] - start[:, None]
    high = end(position, config)  # [B, N]
    shape = (*query.shape[:3],)
    o = torch.zeros(*shape, values.shape[-1], dtype=kind, device=query.device)
    lse = torch.full(shape, EMPTY, dtype=kind, device=query.device)
    last = max(int(index[-1]) + 1 - config.band, 0) if len(index) else 0
    some_keys, some_values = keys[:, :, :last].to(kind), values[:, :, :last].to(kind)
    place = torch.arange(last, device=query.device)
    portion = max(1, _MAX_SCORES // max(1, query.shape[0] * heads * last))
    for first in range(0, query.shape[2] if last else 0, portion):
        part = slice(first, first + portion)
        wide = query[:, :, part].to(kind).unflatten(1, (groups, heads // groups))
        scores = torch.einsum("bghnd,bgtd->bghnt", wide, some_keys) * scale
        low = (start + config.sink)[:, None, None]
        inside = (place >= low) & (place < (high[:, part] + start[:, None])[..., None])
        scores = scores.masked_fill(~inside[:, None, None], EMPTY)
        sums = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - torch.where(sums == EMPTY, torch.zeros_like(sums), sums)[..., None])
        o[:, :, part] = torch.einsum("bghnt,bgtv->bghnv", weights, some_values).flatten(1, 2)
        lse[:, :, part] = sums.flatten(1, 2)
    zeros = torch.zeros(shape, device=query.device).transpose(1, 2)
    return RingEntries(
        query=unrotated.to(kind).transpose(1, 2),
        o=o.transpose(1, 2),
        lse=lse.transpose(1, 2),
        chain=zeros.to(torch.int32),
        drift=zeros,
        pos=position,
    )


def rows_to_keep(index: Tensor, config: MacConfig) -> int:
    """How many of the sorted key indices [N] of a prompt's queries, on the host, are worth a row: the last ones."""
    last = int(index[-1])
    first = last - config.window + 1
    # positions from which nothing is ever searched: the first search is at min_length, or at the next token
    if last < config.min_length:
        first = max(first, config.min_length - config.window)
    return int((index >= first).sum())
