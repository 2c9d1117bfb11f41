"""Whether a model that was loaded has all of its weights, and its checkpoint no others; and whether it computes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessor

from comb.backbones.torch_private import inside

logger = logging.getLogger(__name__)


def check_whole(model: nn.Module, report: Mapping[str, Any], place: str | Path) -> None:
    """Raises ValueError, naming them, for weights that a model's checkpoint lacks or that belong to another model.

    Weights of parts that the model doesn't have at all (the vision tower of a model that is used for text) are left
    out with a warning.

    Args:
        report: as ``from_pretrained(..., output_loading_info=True)`` returns it.
    """
    # peft reports what it adds to a model
    settings = "adapter_config.json" if (Path(place) / "adapter_config.json").is_file() else "config.json"
    if missing := report["missing_keys"]:
        raise ValueError(f"{place} lacks {_named(missing)}: the checkpoint isn't whole, download or copy it again")
    if mismatched := report["mismatched_keys"]:
        shapes = {f"{key} {tuple(ours)} ({settings} says {tuple(theirs)})" for key, ours, theirs in mismatched}
        raise ValueError(f"{place} has other shapes than its {settings} says in {_named(shapes)}: they aren't of one "
                         "model, download or copy them again")  # fmt: skip
    unexpected = set(report["unexpected_keys"])
    # inside of what a model has, a bias that its class doesn't know, or a layer beyond the last, make another model;
    # a quantised model's scales are its quantiser's to know
    foreign = {key for key in unexpected if _is_inside(key, model)}
    if foreign and getattr(model, "hf_quantizer", None) is None:
        raise ValueError(
            f"{place} has {_named(foreign)} that {type(model).__name__} with this {settings} doesn't have: it is "
            f"another model than the configuration says; take {settings} and weights from one place"
        )
    if unexpected:
        logger.warning("%s has %s that %s doesn't use", place, _named(unexpected), type(model).__name__)


def check_finite(model: nn.Module, place: str | Path, further: Iterable[str] = ()) -> None:
    """Raises ValueError, naming them, for weights with NaN or infinity, from which no answer can be had: one pass over
    all, at the speed of memory.

    Args:
        further: names of weights that aren't numbers, and that can't be looked at any more.
    """
    broken = list(further)
    for name, weight in model.named_parameters():
        parts = [part for _, part in inside(name, weight.detach()) if part.is_floating_point()]
        if not all(is_finite(part) for part in parts if part.numel() and not part.is_meta):
            broken.append(name)
    if broken:
        raise ValueError(f"{place} has NaN or infinity in {_named(broken)}: the file is damaged or training diverged, "
                         "download it again, or take an earlier checkpoint")  # fmt: skip


def check_logits(logits: Tensor) -> None:
    """Raises ValueError for logits with NaN: whatever token is chosen by them means nothing."""
    if bool(logits.max().isnan()):
        raise ValueError(
            f"the model computes NaN here ({logits.dtype} logits): its numbers overflow, or "
            "its weights are damaged; load it in another dtype (--dtype float32 or bfloat16), or download it again"
        )


class CheckedLogits(LogitsProcessor):
    """Ends ``generate`` by `check_logits`; costs a maximum for each token."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """The scores as they are."""
        check_logits(scores)
        return scores


def is_finite(weight: Tensor) -> bool:
    """Whether a tensor that isn't empty is of numbers alone."""
    # as exact as isfinite().all(), and twenty times as fast
    least, most = (weight if weight.element_size() > 1 else weight.half()).aminmax()
    return bool(torch.isfinite(torch.stack((least, most))).all())


def _named(keys: Iterable[str]) -> str:
    found = sorted(keys)
    more = f" and {len(found) - 3} more" if len(found) > 3 else ""
    return f"{len(found)} weight{'s' * (len(found) > 1)} ({', '.join(found[:3])}{more})"


# buffers that earlier versions of transformers saved and made anew, and scales of a cache that isn't quantised here
_BUFFERS = {"masked_bias", "inv_freq", "causal_mask", "version", "position_ids", "k_scale", "v_scale"}


def _is_inside(key: str, model: Any) -> bool:
    """Whether a weight stands in a layer of a stack that the model has, in its modules or behind its last layer."""
    module: Any = model
    *path, leaf = key.split(".")
    # the causal mask of these models, and no bias
    masks = path[-1:] in (["attn"], ["attention"]) and model.config.model_type in ("gptj", "codegen", "gpt_neo")
    if leaf in _BUFFERS or (leaf == "bias" and masks):
        return False
    layers = int(getattr(model.config.get_text_config(), "num_nextn_predict_layers", None) or 0)
    inside = False
    for part in path:
        if isinstance(module, nn.ModuleList):
            inside = True
            if part.isdecimal() and len(module) <= int(part) < len(module) + layers:
                return False  # they predict further tokens
        below = getattr(module, part, None) if isinstance(module, nn.Module) else None
        if not isinstance(below, nn.Module):
            return inside
        module = below
    return module is not model and leaf not in {name for name, _ in module.named_buffers(recurse=False)}
