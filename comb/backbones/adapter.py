"""What the configuration of every kind of adapter says of its backbone, and whether a model is that one."""

from __future__ import annotations

import base64
import copy
import hashlib
import logging
import sys
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, get_type_hints

import torch
from huggingface_hub.dataclasses import type_validator
from safetensors import safe_open
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.configuration_utils import PretrainedConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from comb.backbones.damage import weight_files
from comb.backbones.torch_private import is_plain
from comb.backbones.unpublished import public_name
from comb.files import read_json

logger = logging.getLogger(__name__)

_BASE_KEYS = {"model_type", "transformers_version", "torch_dtype", "auto_map", "attn_implementation", "use_cache"}


class AdapterConfig(PreTrainedConfig):
    """Everything needed to find an adapter's backbone again; a kind of adapter is a subclass.

    Args:
        backbone_name_or_path: the backbone's Hub id, registered name or folder; of an absolute path the files have the
            folder's name alone (`comb.backbones.unpublished`).
        backbone_revision: commit or branch of the backbone on the Hub.
        backbone_config: the backbone's own configuration.
        backbone_fingerprint: see `fingerprint`; checked when the adapter is loaded.
        tokenizer_fingerprint: of the tokenizer saved with the adapter; see `comb.backbones.tokenizer`.
        format_version: version of this file's layout.
    """

    sub_configs: ClassVar[dict[str, type[PretrainedConfig]]] = {"backbone_config": AutoConfig}

    method: ClassVar[str] = ""
    """Name of the method that the adapter was trained for."""
    parts: ClassVar[tuple[str, ...]] = ()
    """Submodules of the model that hold the adapter's weights."""
    otherwise: ClassVar[str] = ""
    """What a checkpoint of another kind is not, and what to do with it."""

    backbone_name_or_path: str = ""
    backbone_revision: str | None = None
    backbone_config: dict[str, Any] | PreTrainedConfig | None = None
    backbone_fingerprint: dict[str, Any] | None = None
    tokenizer_fingerprint: str | None = None
    format_version: int = 1

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self, AdapterConfig)
        newest = type(self).__dataclass_fields__["format_version"].default
        if self.format_version > newest:
            raise ValueError(
                f"it was made by a newer comb (format_version {self.format_version}, this one reads {newest}): "
                "pip install -U comb-pic"
            )
        if isinstance(self.backbone_config, dict):
            model_type = self.backbone_config.get("model_type")
            if model_type is None:
                raise ValueError("backbone_config has no model_type: it must be a whole Hugging Face config.json")
            if model_type in CONFIG_MAPPING:  # else a backbone with code of its own on the Hub: kept as it came
                self.backbone_config = AutoConfig.for_model(**self.backbone_config)
        super().__post_init__(**kwargs)

    def get_text_config(self, *args: Any, **kwargs: Any) -> Any:
        """The backbone's text configuration: vocabulary, layers and context length of the decoder."""
        if isinstance(self.backbone_config, PreTrainedConfig):
            return self.backbone_config.get_text_config(*args, **kwargs)
        return self

    @property
    def hidden_size(self) -> int:
        """The backbone's; DeepSpeed's "auto" bucket sizes come from it."""
        if self.backbone_config is None:
            raise AttributeError("hidden_size")  # what hasattr() of a configuration without a backbone expects
        return int(self.get_text_config().hidden_size)

    @property
    def backbone_name(self) -> str:
        """What the backbone is called in what is published: a local folder by its own name."""
        name = self.backbone_name_or_path
        return public_name(name) if Path(name).is_absolute() else name

    def to_dict(self) -> dict[str, Any]:
        """As in transformers, without the folder that the backbone was loaded from: nobody else has it."""
        made: dict[str, Any] = super().to_dict()
        if "backbone_name_or_path" in made:
            made["backbone_name_or_path"] = self.backbone_name
        if isinstance(made.get("backbone_config"), dict):
            made["backbone_config"].pop("_name_or_path", None)
        return made

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As in transformers; keys that this version doesn't know are named in a warning, and kept.

        Raises ValueError for the configuration of another kind of model.
        """
        if (model_type := config_dict.get("model_type", cls.model_type)) != cls.model_type:
            raise ValueError(f"this is a checkpoint of model_type {model_type!r}, {cls.otherwise}")
        known = set(cls.__dataclass_fields__) | _BASE_KEYS
        unknown = sorted(key for key in config_dict if key not in known and not key.startswith("_"))
        if unknown:
            logger.warning(
                "this checkpoint has configuration keys that this version of comb does not know: %s "
                "(format %s, this is %s); they have no effect: upgrade comb-pic if answers look wrong",
                ", ".join(unknown), config_dict.get("format_version"),
                cls.__dataclass_fields__["format_version"].default,
            )  # fmt: skip
        return super().from_dict(config_dict, **kwargs)


def check_types(config: PreTrainedConfig, *bases: type) -> None:
    """Raises ValueError for a field of a configuration whose value isn't of its type; of `bases` those inherited.

    transformers checks its own classes alone.
    """
    for cls in (type(config), *bases):
        known: Any = cls  # every configuration is a dataclass
        names = {field.name for field in fields(known)}
        # of the class's own fields alone: transformers' types can't be looked up without its imports
        own = {name: hint for name, hint in cls.__annotations__.items() if name in names}
        hints = get_type_hints(SimpleNamespace(__annotations__=own), vars(sys.modules[cls.__module__]))
        for name, hint in hints.items():
            try:
                type_validator(name, getattr(config, name), hint)
            except TypeError as error:
                raise ValueError(" ".join(str(error).partition(". Errors:")[0].split())) from error


def is_adapter(config: Mapping[str, Any]) -> bool:
    """Whether a config.json is an adapter's: by the class that is registered for its model_type."""
    model_type = config.get("model_type")
    return (
        isinstance(model_type, str)
        and model_type in CONFIG_MAPPING
        and issubclass(CONFIG_MAPPING[model_type], AdapterConfig)
    )


def check_no_model_in(folder: str | Path) -> None:
    """Raises ValueError for a folder with a model that is no adapter: saved there, an adapter would replace it."""
    path = Path(folder) / "config.json"
    if path.is_file() and not is_adapter(config := read_json(path, "remove it, or give another folder")):
        raise ValueError(
            f"{folder} holds a model of another kind ({config.get('model_type')!r}), which an adapter saved "
            "there would replace: give another folder"
        )


def trained_method(model: Any) -> str | None:
    """The method that a model's adapter was trained for; None for a plain model."""
    config = getattr(model, "config", None)
    return config.method if isinstance(config, AdapterConfig) else None


# --- fingerprints: one backbone's weights from another's, whatever dtype they were loaded in ------------------

_SKETCH_VALUES = 128


def fingerprint(model: PreTrainedModel) -> dict[str, Any]:
    """Identifies a backbone's weights by all parameters' shapes and a sample of its embedding table:
    ``{"shapes": sha256 hex, "embedding": base64 of float32 values, "embedding_shape": [rows, hidden]}``.
    """
    table = model.get_input_embeddings().weight.detach()
    if table.is_meta:
        raise ValueError("its embedding table is offloaded, and names the weights: keep it on a device (device_map)")
    # values, not their hash: the same weights in another dtype have to match
    sample = table[_places(table.shape[0], table.shape[1], table.device)].float().cpu()
    return {
        "shapes": _shapes(model),
        "embedding_shape": list(table.shape),
        "embedding": _encoded(sample),
    }


def _shapes(model: PreTrainedModel) -> str:
    found = (f"{name}:{tuple(parameter.shape)};" for name, parameter in sorted(model.named_parameters()))
    return hashlib.sha256("".join(found).encode()).hexdigest()


def fingerprint_with_weights(model: PreTrainedModel) -> dict[str, Any]:
    """For an adapter's configuration: `fingerprint`, and as ``weights`` (base64) a float32 value of every parameter.

    A fine-tune may leave the embedding as it was. What is quantised has other values, and none here.
    """
    values = {} if getattr(model, "is_quantized", False) else {"weights": _encoded(_middles(model))}
    return fingerprint(model) | values


def fingerprint_name(expected: dict[str, Any] | None) -> str | None:
    """A fingerprint in sixteen hex digits, for people; None for none."""
    if expected is None:
        return None
    items = sorted(item for item in expected.items() if item[0] != "weights")  # which names of before didn't know
    return hashlib.sha256(repr(items).encode()).hexdigest()[:16]


def backbone_fingerprint(model: PreTrainedModel) -> str:
    """A short name for the backbone's weights, for cache keys: changes with shapes, embedding and dtype."""
    text = repr(sorted(fingerprint(model).items())) + str(model.dtype) + str(model.config.model_type)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_fingerprint(model: PreTrainedModel, expected: dict[str, Any], name: str) -> None:
    """Raises ValueError if `model` isn't the backbone that `expected` was taken from."""
    found = fingerprint(model)
    hint = _hint(name)
    if found["embedding_shape"] != expected["embedding_shape"]:
        raise ValueError(
            f"the backbone's embedding table is {found['embedding_shape']}, the adapter was trained on "
            f"{expected['embedding_shape']}; {hint}"
        )
    if found["shapes"] != expected["shapes"] and not getattr(model, "is_quantized", False):
        raise ValueError(f"the backbone's weights have other names or shapes than the adapter's backbone; {hint}")
    if not same_embedding(model.get_input_embeddings().weight, expected):
        raise ValueError(f"the backbone's embedding differs from the one this adapter was trained on; {hint}")
    if "weights" in expected and not getattr(model, "is_quantized", False):  # earlier adapters have none
        _check_middles(_middles(model), _decoded(expected["weights"]), hint)


def check_stored(folder: Path, config: AdapterConfig) -> None:
    """Raises ValueError if the layers in a backbone's files (safetensors) aren't those that an adapter was trained on.

    For who lets others load them (vLLM): a weight is compared where it has the name there, and the shape, that
    transformers gives it. What was, or is, another model than its configuration says (PEFT's, quantised) isn't.
    """
    known, settings = config.backbone_fingerprint or {}, folder / "config.json"
    if "weights" not in known or config.backbone_config is None or not settings.is_file():
        return
    if read_json(settings).get("quantization_config") is not None:
        return
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(copy.copy(config.backbone_config))
    if _shapes(model) != known["shapes"]:
        return
    values = zip(sorted(model.named_parameters()), _decoded(known["weights"]), strict=True)
    theirs = {(name, weight.shape): value for (name, weight), value in values}
    for path in (file for file in weight_files(folder) if file.suffix == ".safetensors"):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - it is no mapping
                part = file.get_slice(name)
                shape = torch.Size(part.get_shape())
                if (name, shape) in theirs and shape.numel():
                    middle = torch.unravel_index(torch.tensor(shape.numel() // 2), shape)
                    value = part[tuple(slice(int(at), int(at) + 1) for at in middle)].float().reshape(())
                    _check_middles(value, theirs[name, shape], _hint(config.backbone_name_or_path))


def _check_middles(ours: Tensor, theirs: Tensor, hint: str) -> None:
    # twice half a unit in bfloat16's last place, or float16's least value; a comparison with NaN is false
    if bool(((ours - theirs).abs() > theirs.abs() * 2**-7 + 1e-7).any()):
        raise ValueError(f"the backbone has the adapter's embedding, and not the layers it was trained on; {hint}")


def _hint(name: str) -> str:
    where = "--backbone, model.backbone or backbone=..."
    return f"this adapter belongs to {name or 'another backbone'}: load it onto that one ({where})"


def same_embedding(table: Tensor, expected: dict[str, Any], first: int | None = None) -> bool:
    """Whether an embedding table [rows, hidden] of any dtype, whole or from its row `first` on, is the one that a
    fingerprint was taken from."""
    rows, width = expected["embedding_shape"]
    begin = first or 0
    if table.shape[1] != width or (len(table) != rows if first is None else begin + len(table) > rows):
        return False
    at, columns = _places(rows, width, table.device)
    here = (at >= begin) & (at < begin + len(table))
    ours = table.detach()[at[here] - begin, columns[here]].float().cpu()
    theirs = _decoded(expected["embedding"])
    # half a unit in the last place of bfloat16, twice (each side may have been rounded once)
    tolerance = theirs.abs() * 2**-7 + theirs.abs().max() * 1e-5
    here = here.cpu()
    return bool(((ours - theirs[here]).abs() <= tolerance[here]).all())


def _places(rows: int, width: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows and columns [_SKETCH_VALUES] spread evenly over a table, the same ones for every dtype."""
    count = min(_SKETCH_VALUES, rows * width)
    positions = torch.arange(count, device=device) * (rows * width // count)
    return positions // width, (positions * 31) % width


def _middles(model: PreTrainedModel) -> Tensor:
    """The value in the middle of every parameter; NaN where there is none, or it is offloaded or a quantiser's."""
    weights = [each.detach() for _, each in sorted(model.named_parameters())]
    there = [each.numel() > 0 and not each.is_meta and is_plain(each) for each in weights]
    values = [
        float(each.reshape(-1)[each.numel() // 2]) if has else torch.nan
        for each, has in zip(weights, there, strict=True)
    ]
    return torch.tensor(values, dtype=torch.float32)


def _encoded(values: Tensor) -> str:
    return base64.b64encode(values.numpy().tobytes()).decode()


def _decoded(values: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(values)), dtype=torch.float32)
