"""The rings of MAC attention: the latest queries and the summaries that they left, per request row and query head.

Layout (B rows of the batch, K window, H query heads, D query channels, V value channels):

    query  [B, K, H, D]  queries before their rotary embedding, ring dtype
    o      [B, K, H, V]  summary of the keys [F, E(p)) as a query saw them, ring dtype
    lse    [B, K, H]     its log-sum-exp, 32 bits or more; -inf: nothing to reuse
    pos    [B, K]        position p of the slot's query in its row, padding not counted; -1: empty
    chain  [B, K, H]     matches between this summary and the query that read its keys; 0: it read them itself
    drift  [B, K, H]     distances between queries, added up along that chain

The query at position p lies in slot p mod K, and E(p) = max(p + 1 - r, 0). A slot is valid for p only if ``pos`` says
p, so positions may be missing anywhere. Position m searches [m - K, m): the oldest of these shares m's own slot, so a
step must read before it writes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.waits import on_device

EMPTY = -math.inf
"""The log-sum-exp of no keys."""
_MAX_SCORES = 2**24


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which scores and sums of `dtype` inputs are taken: never fewer than 32 bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def finite(lse: Tensor) -> Tensor:
    """`lse` with 0 for -inf, so that differences to it are never NaN."""
    return torch.where(lse == EMPTY, torch.zeros_like(lse), lse)


@dataclass
class MacState:
    """The rings of one layer; see the module's text for their layout. Made by `MacState.empty`."""

    query: Tensor
    o: Tensor
    lse: Tensor
    pos: Tensor
    chain: Tensor
    drift: Tensor

    @classmethod
    def empty(cls, rows: int, heads: int, width: int, value_width: int, config: MacConfig, like: Tensor) -> MacState:
        """Rings without entries, on the device of `like`, whose dtype decides what `auto` means."""
        kind = accumulator(like.dtype)
        ring = kind if config.ring_dtype == "auto" else getattr(torch, config.ring_dtype)
        size, device = (rows, config.window, heads), like.device
        return cls(
            query=torch.zeros(*size, width, dtype=ring, device=device),
            o=torch.zeros(*size, value_width, dtype=ring, device=device),
            lse=torch.full(size, EMPTY, dtype=kind, device=device),
            pos=torch.full(size[:2], -1, dtype=torch.long, device=device),
            chain=torch.zeros(size, dtype=torch.int32, device=device),
            drift=torch.zeros(size, dtype=torch.float32, device=device),
        )

    @property
    def window(self) -> int:
        return self.pos.shape[1]

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in vars(self).values())

    def invalidate(self, rows: Tensor) -> None:
        """Forgets the rows [B] that are True."""
        self.pos.masked_fill_(rows[:, None], -1)

    def crop(self, length: Tensor | int) -> None:
        """Forgets all positions from `length` on: one number, or one per row [B]."""
        bound = torch.as_tensor(length, device=self.pos.device).reshape(-1, 1)
        self.pos.masked_fill_(self.pos >= bound, -1)

    def write(self, pos: Tensor, **entries: Tensor) -> None:
        """Puts what queries at `pos` [B, N] leave into their slots, over whatever was there; for every ring its
        `entries` [B, N, ...]. Positions lie within one window; at negative ones nothing is written."""
        row, slot = torch.arange(len(pos), device=pos.device)[:, None], pos % self.window
        # to pick out those that are written, the host would have to wait for the device; so the others, whose slots
        # are their own as all lie within one window, get what they had
        written = pos >= 0
        for name, new in {"pos": pos, **entries}.items():
            ring = getattr(self, name)
            chosen = written.view(*written.shape, *[1] * (new.ndim - 2))
            ring[row, slot] = torch.where(chosen, new.to(ring.dtype), ring[row, slot])


def write_prompt(
    state: MacState, unrotated: Tensor, query: Tensor, keys: Tensor, values: Tensor, index: Tensor, start: Tensor,
    config: MacConfig, scale: float,
) -> None:  # fmt: skip
    """Puts into the rings what a prompt's last queries [B, H, N, D] leave, at key indices `index` [N] of keys
    [B, G, L, D].

    Source: MAC-Attention sec. 4.2 (rectify-append), computed without subtraction.

    Args:
        index: sorted, and on the host, where the last one says how many keys are read.
        start: [B], keys of padding in front of a row; queries inside of it give no row.
    """
    # to take the band out of the attention that the model has computed anyway would be cheaper, but what is left then
    # has the rounding of the whole: 1e-2 and worse in 16 bits once the band holds 99% of the mass
    kind, heads, groups = accumulator(query.dtype), query.shape[1], keys.shape[1]
    position = on_device(index, start.device)[None] - start[:, None]
    high = config.end(position)  # [B, N]
    shape = query.shape[:3]
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
        low, behind = (start + config.sink)[:, None, None], (high[:, part] + start[:, None])[..., None]
        inside = (place >= low) & (place < behind)
        scores = scores.masked_fill(~inside[:, None, None], EMPTY)
        sums = torch.logsumexp(scores, dim=-1)
        weights = torch.exp(scores - finite(sums)[..., None])
        o[:, :, part] = torch.einsum("bghnt,bgtv->bghnv", weights, some_values).flatten(1, 2)
        lse[:, :, part] = sums.flatten(1, 2)
    zeros = torch.zeros(shape, device=query.device).transpose(1, 2)
    state.write(
        position,
        query=unrotated.to(kind).transpose(1, 2),
        o=o.transpose(1, 2),
        lse=lse.transpose(1, 2),
        chain=zeros.to(torch.int32),
        drift=zeros,
    )


def rows_to_keep(index: Tensor, config: MacConfig) -> int:
    """How many of the sorted key indices [N] of a prompt's queries, on the host, are worth a row: the last ones."""
    last = int(index[-1])
    first = last - config.window + 1
    # positions from which nothing is ever searched: the first search is at min_length, or at the next token
    if last < config.min_length:
        first = max(first, config.min_length - config.window)
    return int((index >= first).sum())
