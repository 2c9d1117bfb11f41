"""Short causal convolutions: their state is the last raw columns in front of the convolution, and nothing else.

Every column is forgotten after kernel - 1 tokens, so a segment's tail replaces what was there: a monoid as well, with
T = 0 once the segment is as long as the kernel. LFM2's layers have no other state; in most others a convolution stands
in front of the recurrence, and a segment's first kernel - 1 tokens depend on its left neighbour (HYPIC sec. 4.2).
"""

from __future__ import annotations

import torch
from torch import Tensor


def tail(columns: Tensor, tokens: int) -> Tensor:
    """The last columns of [C, kernel] that belong to the last `tokens` tokens, [C, min(kernel, tokens)]."""
    return columns[:, max(0, columns.shape[1] - tokens) :].clone()


def shift_in(columns: Tensor | None, tail: Tensor, kernel: int) -> Tensor:
    """[C, kernel] behind `tail` [C, at most kernel]: earlier columns move up, zeros in front of a prompt's first."""
    before = tail.new_zeros(tail.shape[0], kernel) if columns is None else columns.to(tail)
    return torch.cat([before, tail], dim=1)[:, -kernel:]
