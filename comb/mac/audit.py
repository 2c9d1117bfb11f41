"""The audit of a decode step: exact attention beside MAC's, and how far the two are apart."""

from __future__ import annotations

from torch import Tensor


def relative_error(output: Tensor, exact: Tensor) -> float:
    """Of the worst row: norm of the difference over all heads, over the norm of the exact output (paper sec. 5.6).

    Args:
        output, exact: [B, H, V].
    """
    kind = output.dtype
    difference = (output - exact.to(kind)).flatten(1).norm(dim=-1)
    return float((difference / exact.to(kind).flatten(1).norm(dim=-1).clamp_min(1e-30)).max())


def band_mass(tail_lse: Tensor, lse: Tensor) -> Tensor:
    """Share of a query's attention that falls on its band, [B, H] (paper app. B.3)."""
    return (tail_lse - lse).exp()


def exceeds(error: float, bound: float | None) -> bool:
    """Whether an error calls for switching a layer off; NaN does."""
    return bound is not None and not error <= bound
