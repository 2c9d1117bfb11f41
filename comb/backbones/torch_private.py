"""Private names of torch, all of them here.

Seen in torch 2.13: `Module._modules`, `_parameters`, `_buffers`, `_non_persistent_buffers_set`,
`_forward_pre_hooks`, `Tensor._version`, `Tensor._base`.

`Module.modules()` and the like build every module's name on the way, which takes three times as long, and a cached
question walks the whole model.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn


def modules_of(model: Any) -> list[nn.Module]:
    """All modules of `model`, each once, in an order that depends on the model alone."""
    found: dict[int, nn.Module] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            ahead.extend(module._modules.values())
    return list(found.values())


def tensors_of(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """A module's own parameters, and its buffers that belong to a checkpoint (packed weights of quantised models)."""
    for name, parameter in module._parameters.items():
        if parameter is not None:
            yield name, parameter
    for name, buffer in module._buffers.items():
        if buffer is not None and name not in module._non_persistent_buffers_set:
            yield name, buffer


def writes(tensor: Tensor) -> int:
    """How often a tensor was written in place, other than through ``.data``; -1 for inference tensors, which count no
    writes and take none outside of inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def base_of(tensor: Tensor) -> Tensor:
    """The tensor of which this one is a view, or itself."""
    return tensor if tensor._base is None else tensor._base


def pre_hooks_of(module: nn.Module) -> int:
    """How many hooks run in front of a module."""
    return len(module._forward_pre_hooks)
