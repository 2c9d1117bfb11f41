"""Elementwise decay: T_i multiplies every entry of the state by its own factor exp(dt_c A_cn) (Mamba-1).

Stored as log decays of the state's own shape [channels, state]. Not in the HYPIC paper; it composes the same way.
Source: Mamba, arXiv:2312.00752.
"""

from __future__ import annotations

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor

from comb.hybrid.scans import ScanCall, reads_scan
from comb.hybrid.transition import LogDecay, register_family


@register_family
class ElementwiseTransition(LogDecay):
    """Log decays of the same shape as the state."""

    family: ClassVar[str] = "elementwise"

    def apply(self, state: Tensor) -> Tensor:
        return state * self.decay(state)


def of_steps(steps: Tensor, rates: Tensor) -> ElementwiseTransition:
    """T of tokens with step sizes [tokens, channels] under rates A [channels, state]."""
    return ElementwiseTransition(steps.sum(dim=0)[:, None] * rates)


def recurrence(steps: Tensor, rates: Tensor, keys: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """The plain twin: S_i = exp(dt_i A) * S_{i-1} + dt_i x_i B_i^T.

    Shapes: steps and values [tokens, channels], keys [tokens, state], rates and state [channels, state].
    """
    for step, key, value in zip(steps, keys, values, strict=True):
        state = (step[:, None] * rates).exp() * state + (step * value)[:, None] * key[None, :]
    return state


@reads_scan("mamba_selective_scan")
def mamba(call: ScanCall, start: int) -> tuple[ElementwiseTransition, None]:
    """Arguments: dt [1, channels, tokens], A [channels, state]."""
    arguments = call.arguments
    steps: Tensor = arguments["dt"][0, :, start:]
    if arguments.get("delta_bias") is not None:
        steps = steps + arguments["delta_bias"].to(steps.dtype)[:, None]
    if arguments.get("delta_softplus"):
        steps = F.softplus(steps)
    return of_steps(steps.float().T, arguments["A"].float()), None
