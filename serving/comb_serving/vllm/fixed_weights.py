"""Weights that stay: documents are compiled with them, here or by an encoder, and named after them once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from comb.backbones.changes import Sample
from comb.backbones.identity import bit_sums, identity_of
from comb.backbones.torch_private import inside
from comb.backbones.whole import check_finite, is_finite

_ASK = "documents are compiled with the weights that the engine was started with: close it, and start another"


def check_no_transfer(vllm_config: Any) -> None:
    """Raises ValueError for an engine whose weights a trainer is to send."""
    if getattr(vllm_config, "weight_transfer_config", None) is not None:
        raise ValueError("documents are linked without weight_transfer_config: they are compiled with today's weights")


def no_other_weights(*_: Any, **__: Any) -> NoReturn:
    """Raises RuntimeError."""
    raise RuntimeError(f"other weights can't be loaded: {_ASK}")


class FixedWeights:
    """The part of a worker that refuses vLLM's ways to change them; comes first among the bases."""

    vllm_config: Any
    reload_weights = no_other_weights
    _weights: Sample | None = None

    def load_model(self, **options: Any) -> None:
        """As vLLM's. Raises ValueError for weights with NaN or infinity, with which vLLM would answer."""
        packed = _PackedWeights()
        handle = register_module_parameter_registration_hook(packed)
        try:
            super().load_model(**options)  # type: ignore[misc]
        finally:
            handle.remove()
        config, model = self.vllm_config.model_config, self.get_model()  # type: ignore[attr-defined]
        model.load_weights = no_other_weights  # trainers call it on the model itself
        if config.quantization is None:  # what a quantiser keeps beside its weights is its own to know
            check_finite(model, config.model, packed.broken_in(model))

    def comb_check_weights(self) -> None:
        """Asked in front of documents. Raises RuntimeError if weights have been written since this was asked first."""
        parameters = self.get_model().parameters()  # type: ignore[attr-defined]
        weights = [tensor for parameter in parameters for _, tensor in inside("", parameter)]
        self._weights = self._weights or Sample(weights, {})
        if not self._weights.holds(weights):
            raise RuntimeError(f"weights have changed: {_ASK}")

    def apply_model(self, fn: Callable[[nn.Module], Any]) -> Any:
        """As vLLM's. Raises RuntimeError if `fn` has written weights."""
        model = self.get_model()  # type: ignore[attr-defined]
        before = identity_of(model)
        found = fn(model)
        if identity_of(model) is not before:
            raise RuntimeError(f"apply_model has changed weights: {_ASK}")
        return found


class _PackedWeights:
    """Looks at what vLLM's backend for CPUs packs into memory that nobody can read, when it puts an empty weight in the
    place of one: whether it was finite, and what it was, left in a buffer for the name that documents have by weights.
    """

    def __init__(self) -> None:
        self._broken = list[tuple[nn.Module, str]]()

    def __call__(self, module: nn.Module, name: str, weight: nn.Parameter) -> None:
        """Torch's hook in front of a parameter's registration."""
        before = getattr(module, name, None)
        if weight.numel() or before is None or not before.numel():
            return
        module.register_buffer(f"comb_{name}_sums", torch.tensor(bit_sums(before)))
        if before.is_floating_point() and not is_finite(before.detach()):
            self._broken.append((module, name))

    def broken_in(self, model: nn.Module) -> list[str]:
        """Names of those that held NaN or infinity. Raises ValueError if some are gone that nobody has looked at."""
        paths = {module: path for path, module in model.named_modules()}
        for module, path in paths.items():
            for name, weight in module.named_parameters(recurse=False):
                if not weight.numel() and not hasattr(module, f"comb_{name}_sums"):
                    lost = f"{path}.{name} was packed by vLLM"
                    raise ValueError(f"{lost} before it was looked at: documents can't be named by these weights")
        return [f"{paths[module]}.{name}" for module, name in self._broken]
