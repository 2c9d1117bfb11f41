"""What computes: the kernels where they can, else their plain twins. Needs no triton to say no."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from comb.kernels.launch import INTERPRETED
from comb.kernels.mac.mac_config import MacConfig
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import MacStep, step
from comb.kernels.paged.attention import FP8, PagedBatch, PagedLayer, attend_plain

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_CHANNELS = 256
MOST_HEADS = 64
"""Per key/value head: their accumulators share one program's registers."""


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def computed_step(
    state: MacState, unrotated: Tensor, query: Tensor, keys: Tensor, values: Tensor, start: Tensor, config: MacConfig,
    scale: float,
) -> tuple[MacStep, str]:  # fmt: skip
    """`comb.kernels.mac.step.step`.

    Returns:
        the step, and why the kernels didn't compute it; empty where they did or weren't asked to.
    """
    reason = ""
    if config.kernels == "triton" or (config.kernels == "auto" and query.is_cuda):
        reason = why_plain_step(query, keys, values)
        if not reason:
            from comb.kernels.mac.kernel import fused_step

            return fused_step(state, unrotated, query, keys, values, start, config, scale), ""
    return step(state, unrotated, query, keys, values, start, config, scale), reason


def attend(query: Tensor, layer: PagedLayer, batch: PagedBatch) -> Tensor:
    """Attention of each row's tokens to its own documents in a pool: query [T, H, D], row behind row -> the same."""
    if why_plain_attention(query, layer):
        return attend_plain(query, layer, batch)
    from comb.kernels.paged.kernel import attend_paged

    return attend_paged(query, layer, batch)


def why_plain_step(query: Tensor, keys: Tensor, values: Tensor) -> str:
    """Why a step of MAC is left to the plain twin; empty if the kernels take these tensors."""
    if nowhere := _why_no_kernels(query.device):
        return nowhere
    if keys.dtype not in KEY_DTYPES or keys.dtype != values.dtype or keys.dtype != query.dtype:
        return f"{_name(query.dtype)} queries, {_name(keys.dtype)} keys"
    return _why_too_large(max(query.shape[-1], values.shape[-1]), query.shape[1], keys.shape[1])


def why_plain_attention(query: Tensor, layer: PagedLayer) -> str:
    """Why a layer in a pool is left to `attend_plain`; empty if the kernel takes it."""
    if nowhere := _why_no_kernels(query.device):
        return nowhere
    if layer.keys.device != query.device:
        return f"the pool is on {layer.keys.device}, queries are on {query.device}"
    if query.dtype not in KEY_DTYPES:
        return f"{_name(query.dtype)} queries"
    quantized = layer.keys.dtype == FP8 and layer.key_scales is not None
    if not quantized and layer.keys.dtype != query.dtype:
        return f"{_name(query.dtype)} queries, {_name(layer.keys.dtype)} keys"
    if quantized and query.device.type == "cuda" and torch.cuda.get_device_capability(query.device) < (8, 9):
        return "fp8 needs a GPU of compute capability 8.9 or more"
    return _why_too_large(query.shape[-1], query.shape[1], layer.keys.shape[1])


def _why_no_kernels(device: torch.device) -> str:
    if not has_triton():
        return "triton is not installed"
    return "" if device.type == "cuda" or INTERPRETED else f"device {device.type}"


def _why_too_large(channels: int, heads: int, groups: int) -> str:
    if channels > MOST_CHANNELS:
        return f"heads of more than {MOST_CHANNELS} channels"
    if heads // groups > MOST_HEADS:
        return f"more than {MOST_HEADS} query heads to a key/value head"
    return ""


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
