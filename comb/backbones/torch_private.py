"""Private names of torch, all of them here, seen in torch 2.13: `Module._modules`, `_parameters`, `_buffers`,
`_non_persistent_buffers_set`, `_forward_hooks`, `_forward_pre_hooks`, `Tensor._version`, `Tensor._base`,
`torch.utils._python_dispatch`, `torch.ops.mkldnn._is_mkldnn_bf16_supported` and `_fp16_`.

`Module.modules()` and the like build every module's name on the way, which takes three times as long, and a cached
question walks the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from operator import attrgetter, methodcaller
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

_PLAIN = frozenset((Tensor, nn.Parameter))
_VERSION = attrgetter("_version")
_LAYOUT = (methodcaller("data_ptr"), methodcaller("stride"), attrgetter("dtype", "shape"))


def modules_of(model: Any) -> list[nn.Module]:
    """All modules of `model`, each once, in an order that depends on the model alone."""
    found: dict[nn.Module, None] = {}
    ahead: list[nn.Module | None] = [model]
    while ahead:
        module = ahead.pop()
        if module is not None and module not in found:
            found[module] = None
            if inner := module._modules:
                ahead.extend(inner.values())
    return list(found)


def tensors_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    """A module's own parameters, and buffers that a checkpoint holds; of wrappers (torchao, DTensor) those inside."""
    volatile = module._non_persistent_buffers_set
    named = [*module._parameters.items(), *(each for each in module._buffers.items() if each[0] not in volatile)]
    return [inner for name, tensor in named if tensor is not None for inner in inside(name, tensor)]


def all_tensors_of(modules: list[nn.Module]) -> list[Tensor]:
    """`tensors_of` all of them, without names, in a tenth of the time."""
    found: list[Tensor | None] = []
    for module in modules:
        if parameters := module._parameters:
            found.extend(parameters.values())
        if buffers := module._buffers:
            volatile = module._non_persistent_buffers_set
            found.extend(buffer for name, buffer in buffers.items() if name not in volatile)
    tensors = [tensor for tensor in found if tensor is not None]
    if _PLAIN.issuperset(map(type, tensors)):
        return tensors
    return [inner for tensor in tensors for _, inner in inside("", tensor)]


def volatile_buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """Buffers that a checkpoint doesn't hold: frequencies, masks."""
    return {
        name: found for name in module._non_persistent_buffers_set if (found := module._buffers.get(name)) is not None
    }


def inside(name: str, tensor: Any) -> list[tuple[str, Tensor]]:
    """The tensors that a wrapper (torchao, DTensor) holds, with names; any other tensor itself."""
    if not is_traceable_wrapper_subclass(tensor):
        return [(name, tensor)]
    parts = tensor.__tensor_flatten__()[0]
    return [inner for part in parts for inner in inside(f"{name}.{part}", getattr(tensor, part))]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor holds weights as they are, not a quantiser's numbers (float8 has scales beside it)."""
    # a wrapper (torchao) says that it is bfloat16
    return tensor.is_floating_point() and tensor.itemsize > 1 and inside("", tensor)[0][1] is tensor


def writes(tensor: Tensor) -> int:
    """How often a tensor was written in place, other than through ``.data``; -1 for inference tensors, which count no
    writes and take none outside of inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def layouts_of(tensors: list[Tensor]) -> tuple[tuple[Any, ...], ...]:
    """Where tensors lie and how, and the `writes` of each."""
    try:
        counts = tuple(map(_VERSION, tensors))
    except RuntimeError:  # there are inference tensors
        counts = tuple(map(writes, tensors))
    return counts, *(tuple(map(read, tensors)) for read in _LAYOUT)


def base_of(tensor: Tensor) -> Tensor:
    """The tensor of which this one is a view, or itself."""
    return tensor if tensor._base is None else tensor._base


def hook_dicts_of(modules: list[nn.Module]) -> list[Mapping[int, Any]]:
    """The hooks around the forward of each of them, in dictionaries that stay the same ones."""
    return [hooks for module in modules for hooks in (module._forward_pre_hooks, module._forward_hooks)]


def pre_hooks_of(module: nn.Module) -> int:
    """How many hooks run in front of a module."""
    return len(module._forward_pre_hooks)


def is_slow_here(dtype: torch.dtype) -> bool:
    """Whether oneDNN, which multiplies on a CPU, doesn't do it in this dtype: torch then takes 5 to 70 times as long as
    in float32. No, where torch is built without it or doesn't say."""
    name = {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype)
    told = getattr(torch.ops.mkldnn, f"_is_mkldnn_{name}_supported", None)
    return told is not None and torch.backends.mkldnn.is_available() and not told()
