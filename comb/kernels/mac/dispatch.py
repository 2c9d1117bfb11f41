"""What computes a step: the kernels or their plain twin; needs no triton to say no."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import MacStep, step

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_CHANNELS = 256
MOST_HEADS = 64
"""Per key/value head: their accumulators share one program's registers."""


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def why_no_kernels(device: torch.device) -> str:
    """Why no kernel runs on `device`; empty where they do.

    On a CPU they run under Triton's interpreter (TRITON_INTERPRET=1), to be tested and for nothing else.
    """
    if not has_triton():
        return "triton is not installed"
    if device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"device {device.type}"
    return ""


def why_too_large(channels: int, heads: int, groups: int) -> str:
    """Why no kernel takes heads of so many channels, or that many to `groups` key/value heads; empty if it does."""
    if channels > MOST_CHANNELS:
        return f"heads of more than {MOST_CHANNELS} channels"
    if heads // groups > MOST_HEADS:
        return f"more than {MOST_HEADS} query heads to a key/value head"
    return ""


def why_plain(query: Tensor, keys: Tensor, values: Tensor) -> str:
    """Why a step is left to the plain twin; empty if the kernels take these tensors."""
    if nowhere := why_no_kernels(query.device):
        return nowhere
    if keys.dtype not in KEY_DTYPES or keys.dtype != values.dtype or keys.dtype != query.dtype:
        return f"{str(query.dtype).removeprefix('torch.')} queries, {str(keys.dtype).removeprefix('torch.')} keys"
    return why_too_large(max(query.shape[-1], values.shape[-1]), query.shape[1], keys.shape[1])


def computed_step(
    state: MacState,
    unrotated: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    start: Tensor,
    config: MacConfig,
    scale: float,
) -> tuple[MacStep, str]:
    """One step as `comb.kernels.mac.step.step` takes it, its rows put into `state`.

    Returns:
        the step, and why the kernels didn't compute it; empty where they did or weren't asked to.
    """
    reason = ""
    if config.kernels == "triton" or (config.kernels == "auto" and query.is_cuda):
        reason = why_plain(query, keys, values)
        if not reason:
            from comb.kernels.mac.kernel import fused_step

            return fused_step(state, unrotated, query, keys, values, start, config, scale), ""
    done, rows = step(state, unrotated, query, keys, values, start, config, scale)
    state.write(rows)
    return done, reason
