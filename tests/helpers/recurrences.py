"""The plain twins of what `comb.hybrid` composes: linear-attention states, token by token."""

from __future__ import annotations

import torch
from torch import Tensor

from comb.hybrid.transition import DenseTransition


def recurrence(
    log_gates: Tensor, keys: Tensor, values: Tensor, state: Tensor, *, betas: Tensor | None = None
) -> Tensor:
    """S_i = g_i S_{i-1} + k_i v_i^T; with `betas` the delta rule.

    That is S_i = (I - beta_i k_i k_i^T) g_i S_{i-1} + beta_i k_i v_i^T.

    Shapes: log_gates [tokens, H] or [tokens, H, K], keys [tokens, H, K] (normalised for the delta rule), values
    [tokens, H, V], state [H, K, V], betas [tokens, H].
    """
    for index, (gate, key, value) in enumerate(zip(log_gates, keys, values, strict=True)):
        state = gate.reshape(len(gate), -1, 1).exp() * state
        if betas is not None:
            value = betas[index][:, None] * (value - (key[:, :, None] * state).sum(dim=1))
        state = state + key[:, :, None] * value[:, None, :]
    return state


def dense_of(log_gates: Tensor, betas: Tensor, keys: Tensor) -> DenseTransition:
    """T of the delta rule, product by product: the plain twin of running a layer's scan on the identity."""
    heads, channels = keys.shape[1:]
    eye = torch.eye(channels, dtype=keys.dtype).expand(heads, -1, -1)
    return DenseTransition(recurrence(log_gates, keys, torch.zeros_like(keys), eye, betas=betas))


def elementwise_recurrence(steps: Tensor, rates: Tensor, keys: Tensor, values: Tensor, state: Tensor) -> Tensor:
    """S_i = exp(dt_i A) * S_{i-1} + dt_i x_i B_i^T (Mamba-1).

    Shapes: steps and values [tokens, channels], keys [tokens, state], rates and state [channels, state].
    """
    for step, key, value in zip(steps, keys, values, strict=True):
        state = (step[:, None] * rates).exp() * state + (step * value)[:, None] * key[None, :]
    return state
