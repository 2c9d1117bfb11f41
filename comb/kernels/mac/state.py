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

from dataclasses import dataclass

import torch
from torch import Tensor

from comb.kernels.mac.algebra import EMPTY, accumulator
from comb.kernels.mac.mac_config import MacConfig


@dataclass
class RingEntries:
    """What queries leave behind, ready to be written: [B, N, ...] for N positions of every row.

    Shapes: query [B, N, H, D], o [B, N, H, V], lse, chain and drift [B, N, H], pos [B, N] (negative: not written).
    Positions of a row must lie within one window.
    """

    query: Tensor
    o: Tensor
    lse: Tensor
    chain: Tensor
    drift: Tensor
    pos: Tensor


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
        """K."""
        return self.pos.shape[1]

    @property
    def nbytes(self) -> int:
        """Bytes of all rings."""
        return sum(tensor.nbytes for tensor in vars(self).values())

    def invalidate(self, rows: Tensor) -> None:
        """Forgets the rows [B] that are True."""
        self.pos.masked_fill_(rows[:, None], -1)

    def crop(self, length: Tensor | int) -> None:
        """Forgets all positions from `length` on: one number, or one per row [B]."""
        bound = torch.as_tensor(length, device=self.pos.device).reshape(-1, 1)
        self.pos.masked_fill_(self.pos >= bound, -1)

    def write(self, rows: RingEntries) -> None:
        """Puts `rows` into their slots, over whatever was there."""
        row, slot = torch.arange(len(rows.pos), device=rows.pos.device)[:, None], rows.pos % self.window
        # to pick out those that are written, the host would have to wait for the device; so the others, whose slots
        # are their own as all lie within one window, get what they had
        written = rows.pos >= 0
        for name, ring in vars(self).items():
            new = getattr(rows, name)
            chosen = written.view(*written.shape, *[1] * (new.ndim - 2))
            ring[row, slot] = torch.where(chosen, new.to(ring.dtype), ring[row, slot])
