"""What `comb serve` looks at before it starts anything: an error of a server takes longer and is longer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from comb.backbones.adapter import is_adapter
from comb.backbones.damage import DamagedError, check_files, damage_in, explained, local_folder
from comb.backbones.loading import backbone_beside, check_weights, load_config, resolve_name
from comb.linktokens.config import LinkTokensConfig
from comb.model.config import CombConfig
from comb.model.weights import check_headers
from comb_serving.linking.methods import FULL, TRAINED


@dataclass(frozen=True)
class Start:
    """What a server is started with.

    Args:
        method: that a plain model links documents with; None: the checkpoint is an adapter with an encoder.
        backbone: where the adapter's backbone is, if that isn't for the checkpoint to say.
        link_tokens: the adapter whose link tokens stand in front of documents, on `backbone`.
    """

    method: str | None
    backbone: str | None = None
    link_tokens: str | None = None


def check_start(checkpoint: str, method: str | None = None, backbone: str | None = None) -> Start:
    """Whether vLLM is installed and `checkpoint` is what its method needs; its weights are not looked at.

    Args:
        checkpoint: of an adapter: folder or Hub id; of a plain model also a registered name or a GGUF file.
        method: None for an adapter; for a plain model how documents are linked.
        backbone: where the adapter's backbone is, if not where the adapter says.

    Raises:
        ValueError: if not, saying what to do.
        OSError: if the checkpoint's configuration can't be read.
    """
    if find_spec("vllm") is None:
        raise ValueError("comb serve needs vLLM, which is not installed: pip install 'comb-pic[serve]'")
    name = resolve_name(checkpoint)
    here = Path(name).exists()
    if not here and "/" not in name:  # no need to ask the Hub
        raise OSError(f"no checkpoint {checkpoint!r}: there is no such folder, and a Hub id is owner/name")
    try:
        config, _ = CombConfig.get_config_dict(name)
    except OSError as error:
        if here and (found := damage_in(Path(name))) is not None:
            raise DamagedError(found) from error
        reason = " ".join(str(error).split())  # transformers' own has several lines
        looked = "its configuration could not be read" if here else "there is no such folder, and as a Hub id"
        raise OSError(f"no checkpoint {checkpoint!r}: {looked}: {reason}") from error
    config.pop("_commit_hash", None)  # transformers before 5.18 adds it to an empty one too
    if not config:
        raise OSError(f"no checkpoint {checkpoint!r}: it holds no config.json, or an empty one")
    if config.get("model_type") == LinkTokensConfig.model_type:
        return _of_link_tokens(checkpoint, config, method, backbone)
    if method == TRAINED:
        raise ValueError(
            f"{checkpoint!r} is no adapter of link tokens, its model_type is {config.get('model_type')!r}: train some "
            "with `comb train configs/linktokens-smollm2-135m.yaml`, or link documents with --method primed"
        )
    adapter = config.get("model_type") == CombConfig.model_type
    if not adapter and method is None:
        raise ValueError(
            f"{checkpoint!r} is no COMB adapter, its model_type is {config.get('model_type')!r}: link documents in a "
            f"plain model with `comb serve {checkpoint} --method legolink:16`, or put an encoder on it with `comb "
            "train` or CombForCausalLM.from_backbone"
        )
    if adapter and method is not None:
        raise ValueError(
            f"{checkpoint!r} is a COMB adapter, whose encoder is its method: leave --method away, or serve the plain "
            f"model that it belongs to, {config.get('backbone_name_or_path')!r}"
        )
    if backbone is not None and not adapter:
        raise ValueError("--backbone is for adapters, and this is a plain model: leave it away")
    return Start(method, backbone)


def check_checkpoint(checkpoint: str, start: Start) -> None:
    """Whether the checkpoint, and an adapter's backbone, have all their weights, and no damaged file.

    vLLM serves a layer that lacks one of its weights. Only headers are read.

    Raises:
        ValueError, OSError: if not, naming the file or the weights.
    """
    name = resolve_name(checkpoint)
    check_files(name, weights=True)
    with explained(name):
        config, _ = CombConfig.get_config_dict(name)
    if not is_adapter(config):
        check_weights(name)
        return
    folder, adapter = local_folder(name), load_config(name)
    if folder is not None:
        check_headers(folder, adapter)
    check_weights(start.backbone or backbone_beside(adapter.backbone_name_or_path, name))


def _of_link_tokens(checkpoint: str, config: Mapping[str, Any], method: str | None, backbone: str | None) -> Start:
    if method not in (None, TRAINED, FULL):
        raise ValueError(
            f"{checkpoint!r} is an adapter of link tokens, which are its method: leave --method away, or serve the "
            f"plain model that it belongs to, {config.get('backbone_name_or_path')!r}"
        )
    if backbone is None:
        if config.get("backbone_revision") is not None:
            raise ValueError(
                f"{checkpoint!r} belongs to revision {config['backbone_revision']} of "
                f"{config['backbone_name_or_path']!r}: name a folder that holds it with --backbone"
            )
        backbone = backbone_beside(config["backbone_name_or_path"], resolve_name(checkpoint))
    return Start(method or TRAINED, backbone, checkpoint)


def check_plain_options(given: Mapping[str, bool]) -> None:
    """Raises ValueError for options that mean nothing without an encoder, by name; `given`: whether each was."""
    for name in (name for name, was_given in given.items() if was_given):
        advice = "say --method full" if name == "--encoder" else "leave it away"
        raise ValueError(f"{name} is for adapters, and --method for plain models, which have no encoder: {advice}")
