"""Dense transitions: T_i = g_i (I - beta_i k_i k_i^T) and its relatives (DeltaNet, gated DeltaNet, KDA).

The product of such matrices has no smaller form: [H, K, K] is stored. Keys are L2-normalised and beta <= 2, so no T_i
has a norm above one: composing never amplifies an earlier error, and a stored T that does is damaged.
Source: HYPIC table 1 and 3; gated DeltaNet: arXiv:2412.06464; KDA: arXiv:2510.26692.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor

from comb.hybrid.scans import ScanCall, reads_scan
from comb.hybrid.transition import Rerotate, Transition, TransitionError, register_family
from comb.waits import on_device

_POWER_STEPS = 4
_NORM_SLACK = 1e-3
_NORM_SLACK_16_BIT = 1e-2


@register_family
class DenseTransition(Transition):
    """T [H, K, K] for states [H, K, V]."""

    family: ClassVar[str] = "dense"

    def apply(self, state: Tensor) -> Tensor:
        return self.tensor.to(state.device, state.dtype) @ state

    def after(self, earlier: DenseTransition) -> DenseTransition:
        return DenseTransition(self.tensor @ earlier.tensor)

    def rerotated(self, rerotate: Rerotate) -> DenseTransition:
        """R T R^T: exact where gates are scalar (DeltaNet, gated DeltaNet), not for KDA's. An extension of eq. 7."""
        columns = rerotate(self.tensor)
        return DenseTransition(rerotate(columns.transpose(-1, -2)).transpose(-1, -2))

    def amplification(self) -> Tensor:
        return self.norm_bound().amax()

    def judge(self, finite: float, amplification: float) -> None:
        super().judge(finite, amplification)
        slack = _NORM_SLACK if self.tensor.itemsize > 2 else _NORM_SLACK_16_BIT
        if amplification > 1 + slack:
            raise TransitionError(
                f"a dense transition amplifies the state by {amplification:.4g}, expected at most 1: "
                "compile the document again"
            )

    def norm_bound(self) -> Tensor:
        """A lower bound [H] on the spectral norms, close from below, by a few steps of power iteration."""
        matrix = self.tensor if self.tensor.itemsize > 4 else self.tensor.float()
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(matrix.shape[-1], 1, generator=generator).to(matrix.dtype)
        vector = on_device(start, matrix.device).expand(len(matrix), -1, 1)
        growth = torch.zeros(len(matrix), device=matrix.device, dtype=matrix.dtype)
        for _ in range(_POWER_STEPS):
            # by the largest entry first: the squares of a long segment's transition underflow
            largest = vector.abs().amax(dim=-2, keepdim=True)
            seen = largest > torch.finfo(matrix.dtype).tiny
            vector = torch.where(seen, vector / largest.where(seen, torch.ones_like(largest)), torch.zeros_like(vector))
            vector = vector / vector.norm(dim=-2, keepdim=True).clamp_min(1)
            after = matrix @ vector
            growth = torch.maximum(growth, after.norm(dim=-2)[:, 0])
            vector = matrix.transpose(-1, -2) @ after
        return growth

    def stored(self, dtype: torch.dtype) -> DenseTransition:
        return DenseTransition(self.tensor.to(dtype))


def of_gates(log_gates: Tensor, betas: Tensor, keys: Tensor) -> DenseTransition:
    """T of tokens, product by product: the plain twin of running a layer's scan on the identity.

    Shapes: log_gates [tokens, H] (GDN; zeros for DeltaNet) or [tokens, H, K] (KDA), betas [tokens, H], normalised keys
    [tokens, H, K].
    """
    heads, channels = keys.shape[1:]
    eye = torch.eye(channels, dtype=keys.dtype).expand(heads, -1, -1)
    return DenseTransition(recurrence(log_gates, betas, keys, torch.zeros_like(keys), eye))


def recurrence(log_gates: Tensor, betas: Tensor, keys: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """The plain twin: S_i = (I - beta_i k_i k_i^T) diag(g_i) S_{i-1} + beta_i k_i v_i^T.

    Shapes as in `of_gates`; values [tokens, H, V], state [H, K, V].
    """
    if log_gates.ndim == 2:
        log_gates = log_gates[:, :, None]
    for gate, beta, key, value in zip(log_gates, betas, keys, values, strict=True):
        state = gate.exp()[:, :, None] * state
        seen = (key[:, :, None] * state).sum(dim=1)
        state = state + key[:, :, None] * (beta[:, None] * (value - seen))[:, None, :]
    return state


@reads_scan("torch_chunk_gated_delta_rule", "chunk_kimi_delta_attention")
def delta_rule(call: ScanCall, start: int) -> tuple[DenseTransition, Tensor]:
    """T and S by the layer's own scan, run once more with values [v | 0] from the state [0 | I].

    A scan treats the columns of its state alike, so the columns behind the zero values come out as T. Arguments:
    query, key, g, beta [1, tokens, H, ...] (as many heads as values), value [1, tokens, H, V].
    """
    arguments: dict[str, Any] = dict(call.arguments)
    for name in ("query", "key", "value", "g", "beta"):
        arguments[name] = arguments[name][:, start:]
    key, value = arguments["key"], arguments["value"]
    heads, width, channels = value.shape[2], value.shape[3], key.shape[3]
    nothing = value.new_zeros(*value.shape[:3], channels)
    initial = torch.zeros(1, heads, channels, width + channels, device=value.device)
    initial[..., width:] = torch.eye(channels, device=value.device)
    arguments |= {
        "value": torch.cat([value, nothing], dim=-1), "initial_state": initial, "output_final_state": True,
    }  # fmt: skip
    _, last = call.function(**arguments)
    last = last[0].float()
    return DenseTransition(last[..., width:].contiguous()), last[..., :width].contiguous()
