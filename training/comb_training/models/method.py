"""What the methods of training (`train.method`) differ in: which adapter trains beside the backbone, on which rows; and
where and how models are loaded."""

from __future__ import annotations

import inspect
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import torch

from comb.backbones.damage import PEFT
from comb.backbones.loading import HUB_ARGUMENTS, backbone_of_adapter, load_config, resolve_name
from comb.backbones.rotary import prompt_limit
from comb.backbones.tokenizer import load_tokenizer
from comb.documents.datasets import Counts
from comb.files import read_json
from comb.model.source import ModelSource
from comb_training.config import Config
from comb_training.data.batches import Collator, TrainingExample


class TrainingMethod(ABC):
    """A method of training: its adapter's class, what makes its batches, and the answers below."""

    adapter: ClassVar[Any]
    collator: ClassVar[type[Collator]] = Collator

    @abstractmethod
    def load(self, config: Config) -> Any:
        """The model that trains, as configured. Raises ValueError for options that make no sense together."""

    def continued(self, config: Config) -> Any:
        """The adapter of `model.init_from` on its backbone, ready to be trained on. Raises ValueError for options that
        would shape another one."""
        assert config.model.init_from is not None
        if shaping := sorted(shaping_options(self.adapter, config.model.options).keys() - {"adapter_dtype"}):
            raise ValueError(f"model.options {', '.join(shaping)} can't change the adapter of model.init_from")
        settings = load_config(config.model.init_from, self.adapter.config_class, **adapter_place(config))
        model = self.adapter.from_pretrained(
            resolve_name(config.model.init_from), backbone=other_backbone(config, settings),
            dtype=dtype_of(config.model.dtype), **trained_options(config),
        )  # fmt: skip
        model.requires_grad_(True).backbone.requires_grad_(False)
        return model

    def fitted(self, model: Any, config: Config, examples: Sequence[TrainingExample], resume: str | Path | None) -> Any:
        """The model as it starts training on `examples`: what is measured on them."""
        return model

    @abstractmethod
    def bare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """A batch's inputs without its documents."""

    def row(self, example: TrainingExample) -> TrainingExample:
        """Of an example, the tokens that go through the backbone: what a batch's budget counts."""
        return example

    def longest_row(self, model: Any, config: Config) -> int | None:
        """Tokens that an example may have with its documents and its answer: the backbone's positions, or
        `data.max_prompt_tokens`; None where the backbone reads it without documents alone."""
        longest = prompt_limit(model.backbone) or sys.maxsize
        return min(longest, config.data.max_prompt_tokens or longest)

    def fitting(
        self, examples: Sequence[TrainingExample], model: Any, config: Config, counts: Counts
    ) -> Sequence[TrainingExample]:
        """The examples whose rows the backbone can take; those left out are counted."""
        longest = self.longest_row(model, config)
        if longest is None:
            return examples
        kept = [example for example in examples if len(example.prompt.flat) + len(example.target) <= longest]
        counts.drop(f"prompt and answer of more than {longest} tokens", len(examples) - len(kept))
        return kept


def adapter_place(config: Config) -> dict[str, Any]:
    """Of `model.options`, those that say where the adapter of `model.init_from` is."""
    wanted = ("revision", "subfolder", *HUB_ARGUMENTS)
    return {name: value for name, value in config.model.options.items() if name in wanted}


def other_backbone(config: Config, settings: Any) -> str | None:
    """Where the backbone of `model.init_from` is loaded from, if `model.backbone` isn't what that adapter names.

    Raises ValueError if it has other sizes; weights of another are noticed when they are loaded.
    """
    assert config.model.init_from is not None
    name, subfolder = config.model.backbone, config.model.options.get("subfolder", "")
    try:
        own = backbone_of_adapter(settings, Path(resolve_name(config.model.init_from)) / subfolder)
    except (OSError, ValueError):  # it isn't there any more, or not named
        own = settings.backbone_name_or_path
    else:
        if own in (name, str(Path(name).resolve())):
            return None
    found, its = (each.get_text_config() for each in (plain_config(name), settings))
    if settings.backbone_fingerprint is None or any(
        getattr(found, key, None) != getattr(its, key, None)
        for key in ("model_type", "hidden_size", "num_hidden_layers", "vocab_size")
    ):
        raise ValueError(
            f"model.backbone={name} can't change the adapter of model.init_from, which is on {own}: name that one, "
            "where it is now"
        )
    return resolve_name(name)


def trained_options(config: Config) -> dict[str, Any]:
    """Of `model.options`, those of an adapter that trains, and where its backbone is loaded to."""
    # trained weights stay in float32 whatever the backbone's: small updates, of gates above all, are not lost
    options = {"adapter_dtype": torch.float32, **config.model.options}
    device = device_of(config)
    if device.type == "cuda" and config.train.deepspeed is None:  # ZeRO-3 loads each rank's part, and takes no map
        # whether documents can be linked is tried out, in a dozen passes: of an 8B model minutes of a CPU
        options.setdefault("device_map", {"": device})
    return options


LOADING = (
    "revision", "code_revision", "trust_remote_code", "attn_implementation", "experts_implementation", "dtype",
    "device_map", "max_memory", "offload_folder", "quantization_config",
    "low_cpu_mem_usage", "use_kernels", "use_safetensors", "weights_only", "variant", "subfolder", "key_mapping",
    "tp_plan", *HUB_ARGUMENTS,
)  # fmt: skip
"""What `AutoModelForCausalLM.from_pretrained` takes besides values of the configuration, as far as runs use it."""


def plain_config(backbone: str, **options: Any) -> Any:
    """A backbone's configuration: of a PEFT adapter's folder without one, that of the model it is on."""
    tuned = Path(resolve_name(backbone)) / PEFT
    if tuned.is_file() and not (tuned.parent / "config.json").is_file():
        backbone = read_json(tuned).get("base_model_name_or_path") or backbone
    return load_config(backbone, **options)


def load_checkpoint(name_or_path: str, config: Config, *, backbone: str | None = None) -> Any:
    """An adapter with its backbone (loaded from `backbone`), or a plain backbone, on the configured device."""
    set_threads(config)
    options = {"dtype": dtype_of(config.model.dtype), "backbone": backbone}
    return ModelSource(name_or_path, options, str(device_of(config))).load()


def model_tokenizer(config: Config, model: Any) -> Any:
    """The tokenizer of what a run starts from; its chat template has `data.chat_template_kwargs` from then on."""
    name, arguments = config.model.init_from or config.model.backbone, config.data.chat_template_kwargs
    return load_tokenizer(name, model, chat_template_kwargs=arguments)


def padding_id(tokenizer: Any, backbone: Any) -> int:
    """The token that fills rows: the tokenizer's, or the end token where `backbone` has no row for that one."""
    pad, rows = tokenizer.pad_token_id, len(backbone.get_input_embeddings().weight)
    return int(tokenizer.eos_token_id if pad is None or pad >= rows else pad)


def set_threads(config: Config) -> None:
    """Applies `model.cpu_threads` to this process."""
    if config.model.cpu_threads is not None:
        torch.set_num_threads(config.model.cpu_threads)


def device_of(config: Config) -> torch.device:
    """Where to run. Raises ValueError if a GPU is asked for where there is none."""
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device=cuda, but there is no GPU that torch can use; model.device=cpu runs anywhere")
    kind = config.model.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    # under torchrun each process drives the GPU of its number
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)


def shaping_options(adapter: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Of the options of an adapter class's `from_backbone`, those that a backbone which is loaded already can be given.

    They shape a fresh adapter; the others say how a model is loaded.
    """
    own = inspect.signature(adapter.from_backbone).parameters.keys() - {"revision", "loading"}
    return {name: value for name, value in options.items() if name in own}


@contextmanager
def options_named(adapter: Any, options: Mapping[str, Any]) -> Iterator[None]:
    """Makes a ValueError that names `model.options` of the TypeError for one that isn't known, or of a wrong type."""
    try:
        yield
    except TypeError as error:
        if not options:
            raise
        raise ValueError(f"model.options={dict(options)} can't be used ({error}): {_taken(adapter)}") from error


def check_options(adapter: Any, options: Mapping[str, Any], config: Any) -> None:
    """Raises ValueError for options that neither the adapter nor loading a model of this configuration takes."""
    own = shaping_options(adapter, options)
    unknown = [name for name in options if name not in own and name not in LOADING and not hasattr(config, name)]
    if unknown:
        raise ValueError(f"model.options has {unknown[0]!r}, which nothing takes: {_taken(adapter)}")


def _taken(adapter: Any) -> str:
    own = sorted(inspect.signature(adapter.from_backbone).parameters.keys() - {"loading", "name_or_model"})
    return f"{adapter.__name__}.from_backbone takes {', '.join(own)}; from_pretrained {', '.join(LOADING)}"


def dtype_of(name: str) -> Any:
    """`model.dtype` for transformers. Raises ValueError if it is none."""
    if name == "auto":
        return "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"model.dtype is float32, bfloat16, float16 or auto, not {name!r}")
    return dtype
