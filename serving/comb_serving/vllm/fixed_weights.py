"""Weights that stay: documents are compiled with them, here or by an encoder, and named after them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

from torch import nn

from comb.backbones.identity import identity_of
from comb.backbones.whole import check_finite

_ASK = "documents are compiled with the weights that the engine was started with: close it, and start another"


def check_no_transfer(vllm_config: Any) -> None:
    """Raises ValueError for an engine whose weights a trainer is to send."""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ValueError("documents are linked without weight_transfer_config: they are compiled with today's weights")


class FixedWeights:
    """The part of a worker that refuses vLLM's ways to change them; comes first among the bases."""

    vllm_config: Any

    def load_model(self, **options: Any) -> None:
        """As vLLM's. Raises ValueError for weights with NaN or infinity, with which vLLM would answer."""
        super().load_model(**options)  # type: ignore[misc]
        model = self.vllm_config.model_config
        if model.quantization is None:  # what a quantiser keeps beside its weights is its own to know
            check_finite(self.get_model(), model.model)  # type: ignore[attr-defined]

    def reload_weights(self, *_: Any, **__: Any) -> NoReturn:
        """Raises RuntimeError."""
        raise RuntimeError(f"reload_weights: {_ASK}")

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        """As vLLM's. Raises RuntimeError if `fn` has written weights."""
        model = self.get_model()  # type: ignore[attr-defined]
        before = identity_of(model)
        found = fn(model)
        if identity_of(model) is not before:
            raise RuntimeError(f"apply_model has changed weights: {_ASK}")
        return found
