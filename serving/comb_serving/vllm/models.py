"""``Comb<architecture>`` for each decoder that vLLM serves: its class with cross blocks, made when first asked for."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models import ModelRegistry

from comb_serving.vllm import PREFIX
from comb_serving.vllm.mixin import CombMixin


def __getattr__(name: str) -> Any:
    if not name.startswith(PREFIX) or name.removeprefix(PREFIX) not in ModelRegistry.models:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backbone = ModelRegistry._try_load_model_cls(name.removeprefix(PREFIX))
    if backbone is None:
        raise AttributeError(f"vLLM could not load its model class {name.removeprefix(PREFIX)}")
    made = type(name, (CombMixin, backbone), {"__module__": __name__})
    globals()[name] = made
    return made
