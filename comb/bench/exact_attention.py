"""The exact attentions that MAC is measured against on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]
"""query [B, H, D], keys [B, G, L, D] and values [B, G, L, V] -> [B, H, V]."""


def exact_attentions(device: torch.device, *, flex: bool) -> dict[str, Attention]:
    """Ways to compute exact attention of one query: SDPA's backends and, where it is asked for, flex attention."""
    backends = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
    if device.type != "cuda":  # one that works here and one that is left out
        backends = {"math": SDPBackend.MATH, "cudnn": SDPBackend.CUDNN_ATTENTION}
        return {f"{name}, grouped": partial(_grouped, backend) for name, backend in backends.items()}
    ways: dict[str, Attention] = {}
    for name, backend in backends.items():
        ways |= {f"{name}, grouped": partial(_grouped, backend), f"{name}, gqa": partial(_gqa, backend)}
    ways["efficient, grouped"] = partial(_grouped, SDPBackend.EFFICIENT_ATTENTION)
    if flex:
        from torch.nn.attention.flex_attention import flex_attention

        # of dynamic sizes: one compilation for all points, not one each
        compiled: Any = torch.compile(flex_attention, dynamic=True)
        ways["flex, gqa"] = lambda query, keys, values: compiled(query[:, :, None], keys, values, enable_gqa=True)[
            :, :, 0
        ]
    return ways


def _grouped(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Query heads that share keys are queries of one head: no mask is needed, and keys are read once."""
    with sdpa_kernel(backend):
        grouped = query.unflatten(1, (keys.shape[1], -1))
        return F.scaled_dot_product_attention(grouped, keys, values).flatten(1, 2)


def _gqa(backend: SDPBackend, query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    with sdpa_kernel(backend):
        return F.scaled_dot_product_attention(query[:, :, None], keys, values, enable_gqa=True)[:, :, 0]
