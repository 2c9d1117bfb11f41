"""Loads backbones by name and adapter weights from a checkpoint folder or the Hub."""

from __future__ import annotations

import json
import logging
import re
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.utils.hub import cached_file

from comb.registry import Registry

logger = logging.getLogger(__name__)

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"

HUB_ARGUMENTS = ("token", "cache_dir", "force_download", "local_files_only", "proxies")

backbones: Registry[Path] = Registry("backbone")
"""Short names for backbone folders that come with the package (training registers `nano`)."""


def is_hub_id(name: str) -> bool:
    """Whether a model's name is an ``owner/name`` on the Hub, not a folder or a registered short name."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def resolve_name(name: str | Path) -> str:
    """The folder of a registered backbone name; anything else as it is.

    Raises:
        OSError: for a folder that isn't there, if it can't be the id of a repository on the Hub.
    """
    text = str(name)
    if Path(text).exists():
        return text
    if text in backbones:
        return str(backbones.get(text))
    if "/" in text and not is_hub_id(text):
        raise OSError(f"no model {text!r}: there is no such folder, and a Hub id is owner/name")
    return text


def backbone_beside(backbone_name: str, adapter: str | Path) -> str:
    """Where the backbone named in an adapter's configuration is: ``./...`` is relative to the adapter's folder."""
    return str((Path(adapter) / backbone_name).resolve()) if backbone_name.startswith("./") else backbone_name


def load_backbone(
    name_or_model: str | Path | PreTrainedModel, *, revision: str | None = None, **kwargs: Any
) -> PreTrainedModel:
    """A causal language model, loaded if it isn't yet (in its checkpoint's dtype unless `dtype` is given).

    Raises:
        OSError: when nothing is found under that name, saying where it was looked for.
    """
    if isinstance(name_or_model, nn.Module):
        unused = sorted([*kwargs, *(["revision"] if revision is not None else [])])
        if unused:
            raise ValueError(
                f"{', '.join(unused)} can't apply to a backbone that is loaded already: leave it out, or give the "
                "backbone by name"
            )
        return name_or_model
    if not str(name_or_model):
        raise ValueError("this checkpoint doesn't name its backbone: pass one with backbone=...")
    kwargs.setdefault("dtype", "auto")
    try:
        return AutoModelForCausalLM.from_pretrained(resolve_name(name_or_model), revision=revision, **kwargs)
    except OSError as error:
        raise OSError(
            f"the backbone {str(name_or_model)!r} could not be loaded ({error}); "
            "pass another place to load it from with backbone=..."
        ) from error


def load_adapter(model: nn.Module, name_or_path: str | Path, **hub: Any) -> torch.dtype:
    """Reads the trained parameters of an adapter into `model`. Returns the dtype they were saved in.

    Raises:
        OSError: if the checkpoint has no weights.
        ValueError: if weights are missing, have other shapes, or are not finite.
    """
    weights = _read_weights(str(name_or_path), **hub)
    own = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("backbone.")}
    missing = sorted(own.keys() - weights.keys())
    if missing:
        raise ValueError(f"the adapter {str(name_or_path)!r} lacks {len(missing)} weights, among them {missing[:3]}")
    unknown = sorted(weights.keys() - own.keys())
    if unknown:
        logger.warning("the adapter has %d weights this version does not know, ignored: %s", len(unknown), unknown[:5])
    for name, tensor in own.items():
        value = weights[name]
        if value.shape != tensor.shape:
            raise ValueError(
                f"adapter weight {name} has shape {tuple(value.shape)}, its configuration says {tuple(tensor.shape)}"
            )
        if not bool(torch.isfinite(value).all()):
            raise ValueError(
                f"adapter weight {name} holds NaN or infinity: the checkpoint is damaged or training diverged"
            )
    model.load_state_dict({name: weights[name] for name in own}, strict=False, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own)
    return weights[next(iter(own))].dtype


def _read_weights(name_or_path: str, **hub: Any) -> dict[str, Tensor]:
    single = cached_file(name_or_path, WEIGHTS, _raise_exceptions_for_missing_entries=False, **hub)
    if single is not None:
        return load_file(single)
    index = cached_file(name_or_path, WEIGHTS_INDEX, _raise_exceptions_for_missing_entries=False, **hub)
    if index is None:
        raise OSError(f"{name_or_path!r} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}: not an adapter checkpoint")
    shards = sorted(set(json.loads(Path(index).read_text())["weight_map"].values()))
    weights: dict[str, Tensor] = {}
    for shard in shards:
        weights.update(load_file(str(cached_file(name_or_path, shard, **hub))))
    return weights
