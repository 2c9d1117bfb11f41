"""Puts a cross block in front of one of vLLM's decoder layers, by a hook of torch's."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn


def put_in_front(layer: nn.Module, block: nn.Module) -> None:
    """The layer's input passes through `block` first. Names of the layer's own parameters stay as they are.

    Raises:
        ValueError: for a layer that takes no `hidden_states`.
    """
    # looked up once here, not at each call: torch.compile traces hooks
    names = list(inspect.signature(layer.forward).parameters)
    if "hidden_states" not in names:
        kind = type(layer).__name__
        raise ValueError(f"{kind} can't get a cross block: its forward takes {names}, not hidden_states")
    hidden_at = names.index("hidden_states")
    residual_at = names.index("residual") if "residual" in names else len(names)

    def mix(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        residual = args[residual_at] if residual_at < len(args) else kwargs.get("residual")
        if hidden_at < len(args):
            hidden, _ = layer.comb(args[hidden_at], residual)
            return (*args[:hidden_at], hidden, *args[hidden_at + 1 :]), kwargs
        hidden, _ = layer.comb(kwargs["hidden_states"], residual)
        return args, {**kwargs, "hidden_states": hidden}

    layer.add_module("comb", block)
    layer.register_forward_pre_hook(mix, with_kwargs=True)
