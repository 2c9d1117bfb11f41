"""Whether a step can be computed by the kernels; needs no triton to say no."""

from __future__ import annotations

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from comb.mac.state import MacState

KEY_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MOST_CHANNELS = 256
MOST_HEADS = 64
"""Per key/value head: their accumulators share one program's registers."""


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def why_plain(state: MacState, query: Tensor, keys: Tensor, values: Tensor) -> str:
    """Why a step over these tensors is left to the plain one; empty if the kernels take it.

    On a CPU they run under Triton's interpreter (TRITON_INTERPRET=1), to be tested and for nothing else.
    """
    if not has_triton():
        return "triton is not installed"
    if query.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"device {query.device.type}"
    if keys.dtype not in KEY_DTYPES or keys.dtype != values.dtype or keys.dtype != query.dtype:
        return f"{str(query.dtype).removeprefix('torch.')} queries, {str(keys.dtype).removeprefix('torch.')} keys"
    if state.query.dtype == torch.float64 or state.lse.dtype != torch.float32:
        return "float64 rings"
    if max(query.shape[-1], values.shape[-1]) > MOST_CHANNELS:
        return f"heads of more than {MOST_CHANNELS} channels"
    if query.shape[1] // keys.shape[1] > MOST_HEADS:
        return f"more than {MOST_HEADS} query heads to a key/value head"
    return ""
