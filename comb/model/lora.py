"""LoRA beside the layers that COMB has copied from its backbone, of which the adapter then holds nothing else.

The encoder's layers and the MLPs of the cross blocks begin as the backbone's own. Each matrix W of them may stay that,
while a product of low rank trains beside it: W + 16/r B A. The adapter's files hold A and B alone, a few hundredths of
the layers; loading merges them into the backbone's, as it is loaded (`merged`), and so nothing else knows of them.
Source: Hu et al. 2021 (LoRA), with PEFT's names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from comb.model.initialization import layer_parts

ALPHA = 16
PLACES = re.compile(r"encoder\.layers\.\d+\.|cross_blocks\.\d+\.mlp\.")
"""Beginnings of the names of what is copied."""


class LoraLinear(nn.Module):
    """``x (W + 16/r B A)^T + b``: W and b stay as they are and in their dtype, A and B train.

    Args:
        weight, bias: W [outputs, inputs] and b; they may be the backbone's own parameters.
        like: where A and B are made, in which dtype.
    """

    def __init__(self, weight: nn.Parameter, bias: nn.Parameter | None, rank: int, like: Tensor) -> None:
        super().__init__()
        self.weight, self.bias, self.scale = weight, bias, ALPHA / rank
        kind: dict[str, Any] = {"device": like.device, "dtype": like.dtype}
        self.lora_A = nn.Linear(weight.shape[1], rank, bias=False, **kind)
        self.lora_B = nn.Linear(rank, weight.shape[0], bias=False, **kind)
        nn.init.kaiming_uniform_(self.lora_A.weight, a=math.sqrt(5))
        nn.init.zeros_(self.lora_B.weight)  # it begins as the layer that it stands beside

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] -> [..., outputs], in the input's dtype where no autocast narrows it."""
        if torch.is_autocast_enabled(x.device.type) or x.dtype == self.weight.dtype:
            frozen = linear(x, self.weight, self.bias)
        else:
            frozen = _Widened.apply(x, self.weight, self.bias)  # type: ignore[no-untyped-call]
        out: Tensor = frozen + self.scale * self.lora_B(self.lora_A(x))
        return out


class _Widened(torch.autograd.Function):
    """A frozen linear map in its input's dtype, that keeps its own narrower weights for the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        [weight] = ctx.saved_tensors
        return gradient @ weight.to(gradient.dtype), None, None


@torch.no_grad()
def copied(model: Any) -> dict[str, Tensor]:
    """What the encoder's layers and the blocks' MLPs are copies of, by the names of their own parameters: the
    backbone's tensors themselves where nothing has to be folded in (`layer_parts`). Empty where the encoder began at
    random."""
    config = model.config
    places = [(f"encoder.layers.{index}.", layer, "") for index, layer in enumerate(config.copied_layers or ())]
    if places:
        blocks = enumerate(config.cross_attention_layers)
        places += [(f"cross_blocks.{index}.", layer, "mlp.") for index, layer in blocks]
    own = {name: parameter.shape for name, parameter in model.named_parameters(remove_duplicate=False)}
    return {
        prefix + name: tensor
        for prefix, layer, start in places
        for name, tensor in layer_parts(model.backbone, model.info, layer).weights.items()
        if name.startswith(start) and own.get(prefix + name) == tensor.shape
    }


def add_lora(model: Any, *, rank: int) -> None:
    """Puts LoRA beside every matrix that was copied from the backbone, and freezes what was. What has no counterpart
    there trains in full.

    What is frozen are the backbone's own tensors where they can be, and else kept in its dtype: a backbone of 8B
    parameters isn't there twice.

    Raises:
        ValueError: where there is nothing that LoRA could stand beside.
    """
    bases = copied(model)
    owners = {_place(parameter): parameter for parameter in model.backbone.parameters()}

    def frozen(name: str, own: Tensor) -> nn.Parameter:
        base = bases[name]
        shared: nn.Parameter | None = owners.get(_place(base))
        if shared is not None and shared.device == own.device:
            return shared
        # as the backbone has it, and as loading will find it there
        return nn.Parameter(base.to(own.device, model.backbone.dtype, copy=True), requires_grad=False)

    for path, module in list(model.named_modules()):
        if not PLACES.match(f"{path}."):
            continue
        if not isinstance(module, nn.Linear):
            for name, parameter in module.named_parameters(path, recurse=False):
                parameter.requires_grad_(name not in bases)
            continue
        if f"{path}.weight" not in bases or (module.bias is not None and f"{path}.bias" not in bases):
            raise ValueError(
                f"train.lora_rank: {path} is no copy of a matrix of the backbone's, beside which LoRA would stand "
                "(initialization: random, a mixture of experts, quantised weights): leave it out"
            )
        bias = None if module.bias is None else frozen(f"{path}.bias", module.bias)
        parent, _, name = path.rpartition(".")
        beside = LoraLinear(frozen(f"{path}.weight", module.weight), bias, rank, like=module.weight)
        setattr(model.get_submodule(parent), name, beside)
    model.config.lora_rank = rank


@torch.no_grad()
def merged(model: Any, weights: Mapping[str, Tensor], dtype: torch.dtype) -> dict[str, Tensor]:
    """An adapter's weights with LoRA merged into what it stands beside in the backbone, that in `dtype`; the weights
    as they are where there is none.

    Raises:
        ValueError: if the backbone hasn't got what it stands beside, or A and B don't fit it.
    """
    rank = model.config.lora_rank
    if rank is None:
        return dict(weights)
    bases, whole = copied(model), {name: tensor for name, tensor in weights.items() if ".lora_" not in name}
    for name in sorted(weights.keys() - whole.keys()):
        path, _, which = name.partition(".lora_")
        if f"{path}.weight" not in bases:
            raise ValueError(
                f"the adapter holds LoRA beside {path} of the backbone's own layers, which this backbone hasn't got as "
                "a plain matrix: load it as it was trained on, not quantised"
            )
        if which == "A.weight" and (up := weights.get(f"{path}.lora_B.weight")) is not None:
            base = bases[f"{path}.weight"].to(model.backbone.dtype)
            whole[f"{path}.weight"] = merge(path, base, weights[name], up, rank).to(dtype)
    for name, base in bases.items():
        path, _, kind = name.rpartition(".")
        if name not in whole and (kind == "bias" or not isinstance(model.get_submodule(path), nn.Linear)):
            whole[name] = base.to(dtype, copy=True)
    return whole


def merge(path: str, base: Tensor, down: Tensor, up: Tensor, rank: int) -> Tensor:
    """W + 16/r B A in float64, in which A and B of 16 bits give the same sum in any order: documents compiled on one
    machine are found again on another. Raises ValueError if A [r, inputs] and B [outputs, r] don't fit W."""
    if down.shape != (rank, base.shape[1]) or up.shape != (base.shape[0], rank):
        raise ValueError(
            f"LoRA of {path} has the shapes {tuple(down.shape)} and {tuple(up.shape)}, beside {tuple(base.shape)} and "
            f"of rank {rank} they are {(rank, base.shape[1])} and {(base.shape[0], rank)}"
        )
    if base.is_meta:
        return base
    return base.double() + ALPHA / rank * (up.to(base.device).double() @ down.to(base.device).double())


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """What two tensors have in common that are one."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride()
