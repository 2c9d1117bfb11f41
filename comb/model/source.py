"""Where a worker loads its model from."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch
from transformers import PreTrainedConfig

from comb.backbones.adapter import is_adapter
from comb.backbones.damage import explained
from comb.backbones.loading import load_model, resolve_name


@dataclass(frozen=True)
class ModelSource:
    """A model by name, so that another process can load the same one.

    Args:
        name: folder of an adapter or a plain model, Hub id, or registered name.
        options: of ``from_pretrained``, plain values only; `backbone` loads an adapter's backbone from there.
        device: where the model goes after loading; "" leaves it where `options` put it.

    Raises:
        ValueError: options that aren't plain values.
    """

    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = ""

    def __post_init__(self) -> None:
        plain = dict(self.options)
        for key, value in plain.items():
            if isinstance(value, torch.dtype | torch.device | Path):
                plain[key] = str(value) if isinstance(value, Path) else str(value).removeprefix("torch.")
        try:
            json.dumps(plain)
        except TypeError as error:
            raise ValueError(
                f"a worker loads the model by name and plain options (texts, numbers, lists), got {plain}: {error}"
            ) from error
        object.__setattr__(self, "options", plain)

    @classmethod
    def of(cls, model: Any) -> Self:
        """The place that a loaded model names as its own.

        Raises:
            ValueError: the model was made in memory.
        """
        name = str(getattr(model, "name_or_path", "") or "")
        if not name:
            raise ValueError(
                "workers load the model by name, and this one was made in memory: save it with save_pretrained() and "
                "load it from there, or give an executor with its ModelSource (executor=...)"
            )
        # an adapter may have another dtype than its backbone: then each is loaded as it was saved
        dtypes = {parameter.dtype for parameter in model.parameters() if parameter.is_floating_point()}
        return cls(name, {"dtype": model.dtype} if len(dtypes) == 1 else {}, str(model.device))

    def load(self) -> Any:
        """The model, in eval mode. Raises OSError, ValueError or ImportError as `load_model` does."""
        folder, options = resolve_name(self.name), dict(self.options)
        backbone = options.pop("backbone", None)
        if backbone is not None:
            with explained(folder):
                config, _ = PreTrainedConfig.get_config_dict(folder)
            if not is_adapter(config):
                raise ValueError(f"{self.name!r} is not a COMB adapter, which would have a backbone of its own")
            options["backbone"] = resolve_name(backbone)
        model = load_model(folder, **options)
        return (model.to(self.device) if self.device else model).eval()


def named_device(name: str, option: str = "--device") -> str:
    """A device as users name it; "auto" is a GPU if there is one. Raises ValueError for one that isn't."""
    there = torch.cuda.is_available()
    if name.startswith("cuda") and not there:
        raise ValueError(f"{option} {name}, but there is no GPU that torch can use; {option} cpu runs anywhere")
    if name == "auto":
        return "cuda" if there else "cpu"
    try:
        return str(torch.device(name))
    except RuntimeError as error:
        raise ValueError(f"{option} is auto, cpu, cuda, cuda:1, ..., not {name!r}") from error


def named_dtype(dtype: str) -> torch.dtype | None:
    """The dtype of `--dtype`; None for auto. Raises ValueError for one that no model has."""
    found = getattr(torch, dtype, None)
    if dtype == "auto":
        return None
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"--dtype is auto, float32, bfloat16 or float16, not {dtype!r}")
    return found


def load_named(model: str, *, backbone: str | None = None, dtype: str = "auto", device: str = "auto") -> Any:
    """A model as a command line names it: an adapter with its backbone, or a plain causal language model.

    Raises:
        ValueError: for a dtype that no model has, or a GPU where there is none.
    """
    named_dtype(dtype)
    return ModelSource(model, {"backbone": backbone, "dtype": dtype}, named_device(device)).load()
