"""MAC as an attention implementation of transformers: registered under names of its own, nothing is patched.

While no pass is under way in this thread (an encoder, another model), it is the exact attention that it stands in for,
with the same masks, so that padded batches and prompts are computed as ever.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from comb.backbones.transformers_private import eager_attention
from comb.linking.masks import STAND_INS

Attended = tuple[Tensor, Tensor | None]


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
        """The attention that MAC stands in for: [B, N, H, V] and its weights, if it gives any."""
        return self.exact_function(
            self.module, self.query, self.keys, self.values, self.mask,
            scaling=self.scaling, dropout=self.dropout, **self.options,
        )  # fmt: skip

    @property
    def scale(self) -> float:
        """What scores are multiplied with."""
        return float(self.query.shape[-1] ** -0.5 if self.scaling is None else self.scaling)


class AttentionHandler(Protocol):
    """Whoever answers the attention calls of a forward pass."""

    def attend(self, call: AttentionCall) -> Attended:
        """The call's output [B, N, H, V]."""


ANSWERING: ContextVar[AttentionHandler | None] = ContextVar("comb_mac_pass", default=None)
"""Who answers this thread's attention calls; None: the exact attention."""


def register() -> None:
    """Makes the names known to transformers; harmless when called again."""
    AttentionInterface.register("comb_mac", _over_sdpa)
    AttentionInterface.register("comb_mac_eager", _over_eager)
    # without a mask function of its own, an attention implementation gets no mask at all, and padding is attended to
    AttentionMaskInterface.register("comb_mac", sdpa_mask)
    AttentionMaskInterface.register("comb_mac_eager", eager_mask)


def stand_in(exact: str) -> str:
    """The name under which MAC stands in for the attention `exact`; for sdpa where that is neither sdpa nor eager."""
    return next((name for name, meant in STAND_INS.items() if meant == exact), "comb_mac")


def _over_sdpa(*args: Any, **kwargs: Any) -> Attended:
    return _answer(sdpa_attention_forward, *args, **kwargs)


def _over_eager(module: nn.Module, *args: Any, **kwargs: Any) -> Attended:
    return _answer(eager_attention(module), module, *args, **kwargs)


def _answer(
    exact: Callable[..., Attended],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **options: Any,
) -> Attended:
    call = AttentionCall(exact, module, query, key, value, attention_mask, scaling, dropout, options)
    current = ANSWERING.get()
    return call.exact() if current is None else current.attend(call)
