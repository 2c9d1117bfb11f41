"""``Comb<architecture>`` for each decoder that vLLM serves: its class with cross blocks, made when first asked for."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models import ModelRegistry

from comb_serving.vllm import PREFIX
from comb_serving.vllm.mixin import CombMixin


def __getattr__(name: str) -> Any:
    backbone = ModelRegistry.models.get(name.removeprefix(PREFIX)) if name.startswith(PREFIX) else None
    if backbone is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    made = type(name, (CombMixin, backbone.load_model_cls()), {"__module__": __name__})
    globals()[name] = made
    return made
