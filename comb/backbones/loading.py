"""Loads backbones by name and adapter weights from a checkpoint folder or the Hub."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from comb.backbones.gguf import convert, gguf_file
from comb.backbones.half_precision import warn_if_slow
from comb.registry import Registry

logger = logging.getLogger(__name__)

HUB_ARGUMENTS = ("token", "cache_dir", "force_download", "local_files_only", "proxies")

backbones: Registry[Path | Callable[[], Path]] = Registry("backbone", "comb.backbones.smollm2")
"""Short names for backbones: a folder that comes with the package (training registers `nano`), or what fetches one."""


def is_hub_id(name: str) -> bool:
    """Whether a model's name is an ``owner/name`` on the Hub, not a folder or a registered short name."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def resolve_name(name: str | Path) -> str:
    """The folder of a registered backbone name or a GGUF file; anything else as it is.

    Raises:
        OSError: for a folder that isn't there, if it can't be the id of a repository on the Hub, and as fetching and
            converting do.
    """
    text = str(name)
    if Path(text).exists():
        file = gguf_file(Path(text))
        return text if file is None else str(convert(file))
    if text in backbones:
        entry = backbones.get(text)
        return str(entry() if callable(entry) else entry)
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
        model = AutoModelForCausalLM.from_pretrained(resolve_name(name_or_model), revision=revision, **kwargs)
    except OSError as error:
        raise OSError(
            f"the backbone {str(name_or_model)!r} could not be loaded ({error}); "
            "pass another place to load it from with backbone=..."
        ) from error
    warn_if_slow(model)
    return model
