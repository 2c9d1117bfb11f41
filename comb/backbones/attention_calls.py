"""Attention calls of a model seen and answered from outside: implementations registered with transformers, nothing is
patched. Where nobody in this thread answers, each is the exact attention that it stands in for, with the same masks.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from comb.backbones.transformers_private import attention_name, eager_attention

logger = logging.getLogger(__name__)

Attended = tuple[Tensor, Tensor | None]

STAND_INS = {"comb_sdpa": "sdpa", "comb_eager": "eager"}
"""Attention that stands in for another, takes its masks and computes what it does."""


@dataclass(frozen=True)
class AttentionCall:
    """One call of a layer's attention, as transformers makes it.

    Args:
        query, keys, values: [B, H, N, D], [B, G, L, D], [B, G, L, V], after the rotary embedding and the cache.
        options: whatever else the model hands over (sliding window, soft cap, ...).
    """

    exact_function: Callable[..., Attended]
    module: nn.Module
    query: Tensor
    keys: Tensor
    values: Tensor
    mask: Tensor | None
    scaling: float | None
    dropout: float
    options: dict[str, Any]

    def exact(self) -> Attended:
        """The attention that this one stands in for: [B, N, H, V] and its weights, if it gives any."""
        return self.exact_function(
            self.module, self.query, self.keys, self.values, self.mask,
            scaling=self.scaling, dropout=self.dropout, **self.options,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling)

    def scores(self, first: int = 0) -> Tensor:
        """Of the queries from place `first` on, by groups: [B, G, H / G, N - first, L] float32, -inf where the mask
        hides a key; without a mask they see all keys up to their own. What a model adds (soft caps, sinks) isn't in it.
        """
        mask = None if self.mask is None else self.mask[:, :, first:]
        return grouped_scores(self.query[:, :, first:], self.keys, self.scale, mask)


def grouped_scores(query: Tensor, keys: Tensor, scale: float, mask: Tensor | None = None) -> Tensor:
    """Of queries [B, H, N, D] and keys [B, G, L, D]: [B, G, H / G, N, L] float32; `mask` is `AttentionCall`'s."""
    groups = keys.shape[1]
    scores: Tensor = query.unflatten(1, (groups, -1)).float() @ keys[:, :, None].float().transpose(-1, -2) * scale
    if mask is None:
        rows, columns = scores.shape[-2:]
        causal = torch.ones(rows, columns, dtype=torch.bool, device=scores.device).tril(columns - rows)
        return scores.masked_fill(~causal, -math.inf)
    # one for all heads, or one for each (Doge)
    mask = mask.unflatten(1, (groups, -1) if mask.shape[1] > 1 else (1, 1))
    return scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask


ANSWERING: ContextVar[Callable[[AttentionCall], Attended] | None] = ContextVar("what answers them", default=None)
"""What answers this thread's attention calls; None: the exact attention."""
_WATCHING: ContextVar[Callable[[AttentionCall], None] | None] = ContextVar("what sees them", default=None)


@contextmanager
def attention(model: Any, name: str) -> Iterator[None]:
    """For a while, the attention implementation of this name."""
    before = attention_name(model)
    if before != name:
        # parts of a composite model may each have their own; None where nothing has asked a part for one
        parts = {part: getattr(model.config, part) for part in model.config.sub_configs}
        own = {part: each._attn_implementation or before for part, each in parts.items() if each is not None}
        model.set_attn_implementation(name)
    try:
        yield
    finally:
        if before != name:
            model.set_attn_implementation({"": before, **own})


@contextmanager
def watched(model: Any, watcher: Callable[[AttentionCall], None]) -> Iterator[None]:
    """Within it, `watcher` sees each attention call of `model` in this thread before it is answered."""
    with attention(model, stand_in(attention_name(model))):
        token = _WATCHING.set(watcher)
        try:
            yield
        finally:
            _WATCHING.reset(token)


def stand_in(exact: str) -> str:
    """The registered name that stands in for the attention `exact`; for sdpa where that is neither sdpa nor eager."""
    if exact in STAND_INS:
        return exact
    return next((name for name, meant in STAND_INS.items() if meant == exact), "comb_sdpa")


def _answer(
    meant: str,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Attended:
    exact = eager_attention(module) if meant == "eager" else sdpa_attention_forward
    call = AttentionCall(exact, module, query, key, value, attention_mask, scaling, dropout, options)
    if (watcher := _WATCHING.get()) is not None:
        watcher(call)
    answer = ANSWERING.get()
    return call.exact() if answer is None else answer(call)


for _name, _meant in STAND_INS.items():
    AttentionInterface.register(_name, partial(_answer, _meant))
    # without a mask function of its own, an attention implementation gets no mask at all, and padding is attended to
    AttentionMaskInterface.register(_name, eager_mask if _meant == "eager" else sdpa_mask)


# --- which of torch's attention kernels a GPU is left with ---------------------------------------------------
# On Hopper torch tries cuDNN first, and a cuDNN plan holds for one shape. Making one takes 36 ms on an H200, and so
# does every new number of keys, which is every token of an answer, once for all layers.

SLOW_S = 0.005  # more than this for a new length, and a step of decoding is mostly that
_chosen: set[int] = set()


def choose_attention(device: torch.device) -> None:
    """Switches cuDNN's attention off for this process if it is what makes new lengths slow, and says so; once a GPU."""
    if device.type != "cuda" or (device.index or 0) in _chosen:
        return
    _chosen.add(device.index or 0)
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return
    new, again = seconds_of_lengths(device)
    if new - again <= SLOW_S:
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    without, repeated = seconds_of_lengths(device)
    if without - repeated > SLOW_S:  # something else is slow
        torch.backends.cuda.enable_cudnn_sdp(True)
        return
    logger.warning(
        "cuDNN's attention takes %.0f ms for each new number of keys here, without it %.1f ms: switched off for this "
        "process; torch.backends.cuda.enable_cudnn_sdp(True) behind the first engine switches it on again",
        1e3 * new, 1e3 * without,
    )  # fmt: skip


def seconds_of_lengths(device: torch.device, first: int = 1000) -> tuple[float, float]:
    """Seconds of attention to a new number of keys, and to the same again: the least of some, from `first` on."""
    lengths = range(first, first + 4)
    query, keys = (torch.zeros(1, 8, count, 128, dtype=torch.bfloat16, device=device) for count in (1, max(lengths)))

    def seconds(length: int) -> float:
        torch.cuda.synchronize(device)
        start = time.perf_counter()
        F.scaled_dot_product_attention(query, keys[:, :, :length], keys[:, :, :length])
        torch.cuda.synchronize(device)
        return time.perf_counter() - start

    seconds(first - 1)  # what all lengths share
    return min(map(seconds, lengths)), min(map(seconds, lengths))
