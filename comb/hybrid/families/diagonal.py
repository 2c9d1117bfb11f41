"""Diagonal decay: T_i = diag(g_i), one number per head and key channel (GLA).

Stored as log g_C [H, K]. Source: HYPIC table 1 and 3; GLA: arXiv:2312.06635.
"""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from comb.hybrid.transition import LogDecay, register_family


@register_family
class DiagonalTransition(LogDecay):
    """log g_C [H, K] for states [H, K, V]."""

    family: ClassVar[str] = "diagonal"

    def apply(self, state: Tensor) -> Tensor:
        return state * self.decay(state)[:, :, None]


def of_gates(log_gates: Tensor) -> DiagonalTransition:
    """T of tokens with log gates [tokens, H, K]."""
    return DiagonalTransition(log_gates.sum(dim=0))


def recurrence(log_gates: Tensor, keys: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """The plain twin: S_i = diag(g_i) S_{i-1} + k_i v_i^T.

    Shapes: log_gates and keys [tokens, H, K], values [tokens, H, V], state [H, K, V].
    """
    for gate, key, value in zip(log_gates, keys, values, strict=True):
        state = gate.exp()[:, :, None] * state + key[:, :, None] * value[:, None, :]
    return state
