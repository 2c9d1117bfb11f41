"""The mask of prompts whose documents see only themselves, as cached ones do, for whole rows at once (training).

Legend: B rows, T tokens of the longest row, K keys.
"""

from __future__ import annotations

import torch
from torch import Tensor

FRESH, PADDING = 0, -1
"""Segments of tokens outside of documents, which are numbered from 1, and of padding."""


def visible(
    query: Tensor, key: Tensor, query_at: Tensor, key_at: Tensor, window: int | None = None, *, inner: int = 0
) -> Tensor:
    """Where tokens may look, bool [B, 1, T, K]: at their own segment, fresh ones at all, within `window`, no later.

    Args:
        query, key: segments [B, T] and [B, K].
        query_at, key_at: their positions [B or 1, T] and [B or 1, K].
        window: of a sliding-window layer: a token sees itself and window - 1 before it.
        inner: so many keys, the first ones, are seen by their own segments alone.
    """
    shown = (key != PADDING) & (torch.arange(key.shape[1], device=key.device) >= inner)
    query, key, shown = query[:, :, None], key[:, None, :], shown[:, None, :]
    distance = query_at[:, :, None] - key_at[:, None, :]
    near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    # padding sees itself, so that no row of the softmax is empty
    return (((key == query) | ((query == FRESH) & shown)) & near)[:, None]
