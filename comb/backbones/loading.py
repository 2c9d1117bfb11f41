"""Loads models by name, whole or not at all: backbones, and adapters with theirs."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from comb.backbones import backbones
from comb.backbones.adapter import is_adapter
from comb.backbones.damage import PEFT, check_files, check_settings, damage_of, explained, headers, local_folder
from comb.backbones.gguf import SUFFIX, convert, gguf_file
from comb.backbones.torch_private import is_slow_here
from comb.backbones.tracebacks import DamagedError
from comb.backbones.unpublished import private_file, read_private
from comb.backbones.whole import check_finite, check_whole
from comb.files import read_json

logger = logging.getLogger(__name__)

HUB_ARGUMENTS = ("token", "cache_dir", "force_download", "local_files_only", "proxies")


def is_hub_id(name: str) -> bool:
    """Whether a model's name is an ``owner/name`` on the Hub, not a folder or a registered short name."""
    return re.fullmatch(r"\w[\w.-]*/[\w.-]+", name) is not None and not Path(name).exists()


def resolve_name(name: str | Path) -> str:
    """The folder of a registered backbone name or a GGUF file; anything else as it is.

    Raises:
        OSError: for a folder that isn't there, if it can't be a repository on the Hub, and as fetching and converting.
    """
    text = str(name)
    if not text:  # a shell's variable that isn't set, say; as a path it would be the folder one is in
        raise OSError("a model's name is empty: give a registered name, a folder or a Hub id")
    if Path(text).exists():
        if (file := gguf_file(Path(text))) is not None:
            return str(convert(file))
        if not Path(text).is_dir():
            raise OSError(f"{text} is a file, and no GGUF file: name the model's folder")
        return text
    if text in backbones:
        entry = backbones.get(text)
        return str(entry() if callable(entry) else entry)
    # without asking the Hub, which takes half a minute where there is no network
    named = is_hub_id(text)
    if named and not Path(text).parent.is_dir() and Path(text).suffix != SUFFIX:
        return text
    if re.fullmatch(r"[\w./-]+", text) and local_folder(text) is not None:
        return text
    if named:
        raise OSError(
            f"no model {text!r}: there is no such file or folder, and as {Path(text).parent} is a folder here it isn't "
            "looked for on the Hub (run it from another folder for that)"
        )
    raise OSError(f"no model {text!r}: there is no such folder, and a Hub id is owner/name")


def backbone_beside(backbone_name: str, adapter: str | Path) -> str:
    """Where the backbone named in an adapter's configuration is.

    ``./...`` is relative to the adapter's folder. A folder elsewhere is there by its name alone; its path is kept
    beside, for whoever made the adapter (`comb.backbones.unpublished`).

    Raises:
        OSError: for such a folder that isn't there any more.
    """
    if backbone_name.startswith("./"):
        return str((Path(adapter) / backbone_name).resolve())
    kept = read_private(adapter).get("backbone")
    if not isinstance(kept, str | None):
        raise ValueError(f"{private_file(adapter)} is damaged, its backbone is {kept!r}: remove it")
    if kept is None or Path(kept).name != backbone_name:
        return backbone_name
    if not Path(kept).exists():
        raise OSError(
            f"the backbone of the adapter {str(adapter)!r} was the folder {kept}, which isn't there any more: say "
            "where it is now (--backbone, or backbone=...)"
        )
    return str(kept)


def backbone_of_adapter(config: Any, adapter: str | Path) -> str:
    """`backbone_beside` of what an adapter's configuration names. Raises ValueError if that is none, or an adapter."""
    if not config.backbone_name_or_path:
        raise ValueError(
            f"{Path(adapter) / 'config.json'} doesn't name its backbone: say where it is (--backbone, or "
            "backbone=...), or set backbone_name_or_path to its Hub id or folder"
        )
    place = backbone_beside(config.backbone_name_or_path, adapter)
    if (own := Path(place) / "config.json").is_file() and is_adapter(read_json(own)):  # itself: loaded without an end
        raise ValueError(
            f"{Path(adapter) / 'config.json'} names {place} as its backbone, which is an adapter itself: say where its "
            "backbone is (--backbone, or backbone=...)"
        )
    return place


def trained_quantised(config: Any, backbone: str | Path) -> Any:
    """How an adapter's backbone was quantised as it was loaded for its training; None where the checkpoint of
    `backbone` is quantised itself, or nothing was."""
    trained = getattr(config.backbone_config, "quantization_config", None)
    own = None if trained is None else getattr(load_config(backbone), "quantization_config", None)
    return trained if own is None else None


def load_config(name: str | Path, kind: Any = AutoConfig, **options: Any) -> Any:
    """A model's configuration, of the class `kind`, by its name. Raises OSError or ValueError with the file and what to
    do.
    """
    place = resolve_name(name)
    with explained(place):
        config = kind.from_pretrained(place, **options)
    check_settings(place)
    return config


def load_model(name: str | Path, **options: Any) -> Any:
    """A causal language model or an adapter by its name, with all of its weights.

    Raises:
        ValueError: weights are missing, have other shapes than the configuration says, or belong to another model.
        OSError, ImportError: as `comb.backbones.damage.explained` says.
    """
    place = resolve_name(name)
    if (tuned := Path(place) / PEFT).is_file():  # the report is of what it adds
        _check_base(tuned)
    check_settings(place)
    there = local_folder(place) is not None
    with explained(place):
        # what is missing or doesn't fit is left as it was initialised, and transformers says so in its log alone
        model, report = AutoModelForCausalLM.from_pretrained(
            place, output_loading_info=True, ignore_mismatched_sizes=True, **options
        )
    check_whole(model, report, place)
    check_finite(model, place)
    if not there:  # they came from the Hub just now
        check_settings(place)
    return model


def _check_base(tuned: Path) -> None:
    """Raises ValueError or OSError for damaged settings of a PEFT adapter, or a model that isn't whole or here."""
    if (found := damage_of(tuned)) is not None:
        raise DamagedError(found)
    base = read_json(tuned).get("base_model_name_or_path")
    if not base and not (tuned.parent / "config.json").is_file():
        raise DamagedError(f"{tuned} doesn't name its model: set base_model_name_or_path to its Hub id or folder")
    try:
        check_weights(base or tuned.parent)
    except OSError as error:
        raise OSError(f"{tuned}, base_model_name_or_path: {error}; set it to the model's Hub id or folder") from error


def check_weights(name: str | Path) -> None:
    """What `load_model` checks and raises, by the headers of the weights alone: for who lets others load them (vLLM).

    Of what can't be compared (a quantised model, say), and why, a warning is logged.
    """
    place = resolve_name(name)
    check_files(place, weights=True)
    compare_weights(place)


def compare_weights(place: str) -> None:
    """`check_weights` of a checkpoint whose files were looked at."""
    folder = local_folder(place)
    if folder is None:  # it isn't here yet
        return
    if (folder / PEFT).is_file() and not (folder / "config.json").is_file():
        _check_base(folder / PEFT)
        return
    given = read_json(folder / "config.json")
    found = headers(folder)
    reasons = {
        "its model_type isn't known to transformers": given.get("model_type") not in CONFIG_MAPPING,
        "it is quantised": given.get("quantization_config"),
        "it has code of its own": given.get("auto_map"),
        "they are in no file of safetensors or torch.save by a usual name": not found,
    }
    if (why := next((reason for reason, holds in reasons.items() if holds), None)) is not None:
        logger.warning("%s: its weights weren't compared with its config.json, since %s", place, why)
        return
    config = load_config(place)
    with explained(place):
        kind = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        if kind.config_class is config.sub_configs.get("text_config"):  # AutoModelForCausalLM takes a model's text part
            config = config.get_text_config()
        model, report = kind.from_pretrained(
            None, config=config, state_dict=found, device_map="meta",
            output_loading_info=True, ignore_mismatched_sizes=True,
        )  # fmt: skip
    check_whole(model, report, place)


def load_backbone(
    name_or_model: str | Path | PreTrainedModel, *, revision: str | None = None, **kwargs: Any
) -> PreTrainedModel:
    """A causal language model, loaded if it isn't yet (in its checkpoint's dtype unless `dtype` is given).
    Raises OSError when nothing is found under that name, saying where it was looked for."""
    if isinstance(name_or_model, nn.Module):
        if unused := sorted([*kwargs, *(["revision"] if revision is not None else [])]):
            raise ValueError(
                f"{', '.join(unused)} can't apply to a backbone that is loaded already: leave it out, or give the "
                "backbone by name"
            )
        return name_or_model
    kwargs.setdefault("dtype", "auto")
    try:
        model: PreTrainedModel = load_model(name_or_model, revision=revision, **kwargs)
    except OSError as error:
        raise OSError(
            f"the backbone {str(name_or_model)!r} could not be loaded ({error}); "
            "another place to load it from can be given (--backbone, or backbone=...)"
        ) from error
    warn_if_slow(model)
    return model


# --- does torch multiply 16-bit numbers on this CPU by the CPU's own instructions, or several times slower? ---------

NOTICED = 10_000_000
"""Parameters from which on a model is slow enough for it to matter."""

_warned: set[torch.dtype] = set()


def warn_if_slow(model: nn.Module) -> None:
    """Says once per dtype and process that a model on the CPU would be several times faster in float32."""
    first = next(model.parameters(), None)
    if first is None or first.device.type != "cpu" or first.dtype in _warned:
        return
    if sum(weight.numel() for weight in model.parameters()) >= NOTICED and is_slow_here(first.dtype):
        _warned.add(first.dtype)
        logger.warning("this CPU multiplies %s several times slower than float32: load the model with dtype=float32 "
                       "(--dtype float32; model.dtype=float32 when training)",
                       str(first.dtype).removeprefix("torch."))  # fmt: skip
