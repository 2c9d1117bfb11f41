"""Puts a cross block in front of one of vLLM's decoder layers, by giving the layer a subclass of its class."""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

ATTRIBUTE = "comb"


def put_in_front(layer: nn.Module, block: nn.Module) -> None:
    """The layer's forward passes its input through `block` first. Names of its own parameters stay as they are.

    Raises:
        ValueError: for a layer that takes no `hidden_states`.
    """
    layer.add_module(ATTRIBUTE, block)
    layer.__class__ = _subclass(type(layer))


def _subclass(base: Any) -> type:
    # looked up once here, not at each call: torch.compile traces forward
    names = list(inspect.signature(base.forward).parameters)[1:]
    if "hidden_states" not in names:
        raise ValueError(f"{base.__name__} can't get a cross block: its forward takes {names}, not hidden_states")
    hidden_at = names.index("hidden_states")
    residual_at = names.index("residual") if "residual" in names else None

    class CombLayer(base):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            given = list(args)
            hidden = given[hidden_at] if hidden_at < len(given) else kwargs["hidden_states"]
            residual = None
            if residual_at is not None:
                residual = given[residual_at] if residual_at < len(given) else kwargs.get("residual")
            hidden, _ = self.comb(hidden, residual)
            if hidden_at < len(given):
                given[hidden_at] = hidden
            else:
                kwargs["hidden_states"] = hidden
            return super().forward(*given, **kwargs)

    CombLayer.__name__ = CombLayer.__qualname__ = f"Comb{base.__name__}"
    return CombLayer
