"""An adapter's trained parameters, read from a checkpoint folder or the Hub."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.utils.hub import cached_file

from comb.backbones.adapter import AdapterConfig, check_stored, is_adapter
from comb.backbones.damage import check_files, explained, headers, local_folder
from comb.backbones.loading import backbone_of_adapter, check_weights, compare_weights, load_config, resolve_name
from comb.files import read_json

WEIGHTS, WEIGHTS_INDEX = "model.safetensors", "model.safetensors.index.json"


def read_weights(name_or_path: str | Path, **hub: Any) -> dict[str, Tensor]:
    """All tensors of an adapter's checkpoint, in one file or in shards. Raises OSError if one is missing or damaged."""
    place = str(name_or_path)
    with explained(place):
        single = cached_file(place, WEIGHTS, _raise_exceptions_for_missing_entries=False, **hub)
        if single is not None:
            return load_file(single)
        index = cached_file(place, WEIGHTS_INDEX, _raise_exceptions_for_missing_entries=False, **hub)
        if index is None:
            raise OSError(f"{place!r} holds neither {WEIGHTS} nor {WEIGHTS_INDEX}: not an adapter checkpoint")
        weights: dict[str, Tensor] = {}
        for shard in sorted(set(read_json(index)["weight_map"].values())):
            found = load_file(str(cached_file(place, shard, **hub)))
            if twice := sorted(weights.keys() & found.keys()):
                raise OSError(f"{place!r} has {twice[0]} in {shard} and before: of two checkpoints; download it again")
            weights.update(found)
        return weights


def load_adapter(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> torch.dtype:
    """Makes `weights` the trained parameters of `model`. Returns the dtype they were saved in.

    Raises:
        ValueError: if weights are missing, have other shapes, are no floats or not finite, or aren't in `model`.
    """
    own = check_fits(model, weights, source)
    for name in own:
        if not (dtype := weights[name].dtype).is_floating_point or dtype.itemsize == 1:
            raise ValueError(f"adapter weight {name} is {dtype}: save it in 16 bits or more, no adapter is quantised")
        if not bool(torch.isfinite(weights[name]).all()):
            raise ValueError(
                f"adapter weight {name} holds NaN or infinity: the checkpoint is damaged or training diverged"
            )
    model.load_state_dict({name: weights[name] for name in own}, strict=False, assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in own)
    return weights[next(iter(own))].dtype


def own_state(model: nn.Module) -> dict[str, Tensor]:
    """What an adapter's checkpoint holds: its own weights, by name.

    The backbone isn't asked for its: a quantiser's hook may write into them on the way (bitsandbytes, 4 bits).
    """
    parts = [(name, part.state_dict()) for name, part in model.named_children() if name != "backbone"]
    return {f"{part}.{name}": tensor for part, state in parts for name, tensor in state.items()}


def check_fits(model: nn.Module, weights: Mapping[str, Tensor], source: str | Path) -> dict[str, Tensor]:
    """The trained parameters of `model`, which `weights` are; their values don't matter.

    Raises:
        ValueError: if weights are missing, have other shapes, or aren't in `model`.
    """
    own = own_state(model)
    missing = sorted(own.keys() - weights.keys())
    if missing:
        raise ValueError(
            f"the adapter {str(source)!r} lacks {len(missing)} weights, among them {missing[:3]}: download it again"
        )
    if unknown := sorted(weights.keys() - own.keys()):
        raise ValueError(
            f"the adapter {str(source)!r} has {len(unknown)} weights that its config.json doesn't speak of, among them "
            f"{unknown[:3]}: take both from one place, or, if they are, upgrade comb-pic"
        )
    for name, tensor in own.items():
        value = weights[name]
        if value.shape != tensor.shape:
            raise ValueError(
                f"adapter weight {name} has shape {tuple(value.shape)}, its configuration says {tuple(tensor.shape)}"
            )
    return own


def check_headers(folder: Path, config: AdapterConfig) -> None:
    """What `load_adapter` checks, but for values, by the headers of a folder's weights alone. Raises ValueError."""
    if config.backbone_config is not None and (found := headers(folder)):
        with explained(folder), torch.device("meta"):
            model: Any = AutoModelForCausalLM.from_config(copy.copy(config))
        check_fits(model, model._whole(found, torch.float32), folder)


def check_checkpoint(name: str | Path, backbone: str | None = None) -> None:
    """Whether a checkpoint, and an adapter's backbone, have all their weights, and no damaged file: by headers alone.

    Args:
        backbone: where an adapter's is, if not where the adapter says.

    Raises:
        ValueError, OSError: if not, naming the file or the weights.
    """
    place = resolve_name(name)
    check_files(place, weights=True)
    folder = local_folder(place)
    if folder is None or not is_adapter(read_json(folder / "config.json")):
        compare_weights(place)
        return
    config = load_config(place)
    check_headers(folder, config)
    where = resolve_name(backbone or backbone_of_adapter(config, place))
    check_weights(where)
    if (stored := local_folder(where, None if backbone else config.backbone_revision)) is not None:
        check_stored(stored, config)
