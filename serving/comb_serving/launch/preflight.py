"""What `comb serve` looks at before it starts anything: an error of a server takes longer and is longer."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

from comb.backbones.adapter import is_adapter
from comb.backbones.loading import resolve_name
from comb.model.config import CombConfig


def check_start(checkpoint: str, method: str | None = None) -> None:
    """Whether vLLM is installed and `checkpoint` is what its method needs; its weights are not looked at.

    Args:
        checkpoint: of an adapter: folder or Hub id; of a plain model also a registered name or a GGUF file.
        method: None for an adapter; for a plain model how documents are linked.

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
        reason = " ".join(str(error).split())  # transformers' own has several lines
        looked = "its configuration could not be read" if here else "there is no such folder, and as a Hub id"
        raise OSError(f"no checkpoint {checkpoint!r}: {looked}: {reason}") from error
    config.pop("_commit_hash", None)  # transformers before 5.18 adds it to an empty one too
    if not config:
        raise OSError(f"no checkpoint {checkpoint!r}: it holds no config.json, or an empty one")
    adapter = config.get("model_type") == CombConfig.model_type
    if is_adapter(config) and not adapter:
        raise ValueError(
            f"{checkpoint!r} is an adapter of model_type {config['model_type']!r}, which isn't served yet: ask it with "
            "`comb ask` or PICEngine, or serve the plain model that it belongs to, "
            f"{config.get('backbone_name_or_path')!r}, with --method legolink:16"
        )
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


def check_plain_options(given: Mapping[str, bool]) -> None:
    """Raises ValueError for options that mean nothing without an encoder, by name; `given`: whether each was."""
    for name in (name for name, was_given in given.items() if was_given):
        advice = "say --method full" if name == "--encoder" else "leave it away"
        raise ValueError(f"{name} is for adapters, and --method for plain models, which have no encoder: {advice}")
