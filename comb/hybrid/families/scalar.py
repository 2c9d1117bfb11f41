"""Scalar decay: T_i = a_i I, one number per head (RetNet, Lightning, Mamba-2, simple GLA).

Stored as log a_C = sum of log a_i, [H]. Source: HYPIC table 1 and 3; Mamba-2: arXiv:2405.21060.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from comb.hybrid.scans import ScanCall, reads_scan
from comb.hybrid.transition import LogDecay, Rerotate, register_family


@register_family
class ScalarTransition(LogDecay):
    """log a_C [H] for states [H, ., .], whichever axis holds the keys."""

    family: ClassVar[str] = "scalar"

    def apply(self, state: Tensor) -> Tensor:
        return state * self.decay(state)[:, None, None]

    def rerotated(self, rerotate: Rerotate) -> ScalarTransition:
        return self  # a multiple of the identity commutes with every rotation (HYPIC eq. 7)


def of_gates(log_gates: Tensor) -> ScalarTransition:
    """T of tokens with log gates [tokens, H]."""
    return ScalarTransition(log_gates.sum(dim=0))


def recurrence(log_gates: Tensor, keys: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """The plain twin: S after each token in turn, S_i = a_i S_{i-1} + k_i v_i^T.

    Shapes: log_gates [tokens, H], keys [tokens, H, K], values [tokens, H, V], state [H, K, V].
    """
    for gate, key, value in zip(log_gates, keys, values, strict=True):
        state = gate.exp()[:, None, None] * state + key[:, :, None] * value[:, None, :]
    return state


@reads_scan("mamba2_chunk_scan")
def mamba2(call: ScanCall, start: int) -> tuple[ScalarTransition, None]:
    """log a_i = A dt_i, with dt as the scan makes it: bias, softplus, limits. Arguments: dt [1, tokens, H], A [H]."""
    arguments = call.arguments
    steps: Tensor = arguments["dt"][0, start:]
    if arguments.get("dt_bias") is not None:
        steps = steps + arguments["dt_bias"].to(steps.dtype)
    if arguments.get("dt_softplus"):
        steps = F.softplus(steps)
    least, most = arguments.get("dt_limit") or (0.0, float("inf"))
    steps = steps.clamp(min=least, max=most)
    return of_gates(steps.float() * arguments["A"].float()), None


def constant_decay(module: Any, tokens: int) -> ScalarTransition | None:
    """T of a Lightning layer, whose decay per token is exp(-slope) whatever the token; None for other layers."""
    slope = getattr(module, "slope_rate", None)
    if not isinstance(slope, Tensor):
        return None
    return ScalarTransition(-slope.detach().reshape(-1).to(torch.float32) * tokens)
