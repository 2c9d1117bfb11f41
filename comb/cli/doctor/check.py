"""One line of the gate, and how close is close enough."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# Relative to the largest logit. Batched attention sums in another order than a row alone, so equality is to
# rounding: 1e-4 in float32, and about the size of one rounding step of the 16-bit types.
_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 2e-2}
_COARSEST = 6e-2


@dataclass(frozen=True)
class Check:
    """One line of the gate: what was compared, whether it held, and the number that decided."""

    name: str
    passed: bool
    detail: str


def tolerance_for(dtype: torch.dtype) -> float:
    """Largest difference that still counts as equal, relative to the largest logit."""
    return _TOLERANCES.get(dtype, _COARSEST)


def gap(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference."""
    return float((left.float() - right.float()).abs().max())


def relative_gap(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference, as a share of `right`'s largest value."""
    return gap(left, right) / float(right.abs().max().clamp_min(1e-12))


def close(name: str, left: Tensor, right: Tensor, tolerance: float) -> Check:
    """Whether logits are those of the reference `right`."""
    error = relative_gap(left, right)
    return Check(name, error <= tolerance, f"max |diff| {error:.1e} of the largest logit, at most {tolerance:.0e}")
