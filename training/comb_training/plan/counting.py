"""The model that would be trained, on torch's meta device: tensors with shapes and dtypes, and no memory."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from comb.backbones.loading import HUB_ARGUMENTS, load_config
from comb.backbones.rotary import front_limit
from comb.backbones.tokenizer import front_ids, load_tokenizer
from comb.linktokens.front import FrontTensors
from comb.linktokens.modeling import LinkTokensForCausalLM
from comb.model.config import CombConfig
from comb.model.lora import add_lora
from comb.model.modeling import CombForCausalLM
from comb_training.config import Config
from comb_training.models import training_method
from comb_training.models.comb import check_rank
from comb_training.models.method import adapter_place, dtype_of, other_backbone, plain_config, shaping_options

Trained = CombForCausalLM | LinkTokensForCausalLM

ARCHITECTURES = Path(__file__).parent / "architectures"
"""Public sizes of the backbones in configs/, for where the Hub can't be asked: ``organisation--name.json``."""

PASSAGE_TOKENS = 137
"""Of the passage that fresh link tokens start as, where there is no tokenizer to count them (SmolLM2's)."""


@dataclass(frozen=True)
class Parameters:
    """How many parameters a model has, and the bytes they are kept in."""

    frozen: int
    trained: int
    frozen_bytes: int
    trained_bytes: int

    @classmethod
    def of(cls, model: nn.Module) -> Parameters:
        """Counts those of a model on any device; what LoRA stands beside may be the backbone's own, and counts once."""
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        frozen = [parameter for parameter in model.parameters() if not parameter.requires_grad]
        numbers = (sum(parameter.numel() for parameter in part) for part in (frozen, trained))
        return cls(*numbers, *(sum(parameter.nbytes for parameter in part) for part in (frozen, trained)))

    @property
    def total(self) -> int:
        """All parameters."""
        return self.frozen + self.trained


def meta_model(config: Config) -> tuple[Trained, str | None]:
    """What the method's `load` would load, without a weight, and what `find_backbone_config` says of it.

    Raises:
        OSError: when a configuration isn't here and can't be fetched.
        UnsupportedBackboneError: if no encoder can be attached to such a backbone.
    """
    options = config.model.options
    adapter_dtype = options.get("adapter_dtype", torch.float32)
    dtype = dtype_of(config.model.dtype)
    loading = {} if dtype == "auto" else {"dtype": dtype}
    if options.get("trust_remote_code"):
        loading["trust_remote_code"] = True
    adapter: Any = training_method(config.train.method).adapter
    settings, note = None, None
    if config.model.init_from is not None:
        settings = load_config(config.model.init_from, adapter.config_class, **adapter_place(config))
        if isinstance(settings, CombConfig):
            check_rank(config.train.lora_rank, settings)
        settings.backbone_name_or_path = other_backbone(config, settings) or settings.backbone_name_or_path
        backbone_config: Any = settings.backbone_config
    else:
        backbone_config, note = find_backbone_config(config)
    with torch.device("meta"):
        backbone = AutoModelForCausalLM.from_config(backbone_config, **loading)
        model: Trained
        if settings is not None:
            model = adapter(settings, backbone)
        elif adapter is LinkTokensForCausalLM:
            count = options.get("num_link_tokens")
            count = _front_tokens(config, "prose") if count is None else count
            front = FrontTensors.of(backbone, [0]).config(count, backbone_config=backbone.config)
            model = LinkTokensForCausalLM(front, backbone)
        else:
            shaping = shaping_options(CombForCausalLM, options)
            if isinstance(shaping.get("front"), str) and shaping["front"] != "none":
                shaping["front"] = [0] * _front_tokens(config, shaping["front"])  # as many; which doesn't matter
            model = CombForCausalLM.from_backbone(
                backbone,
                num_encoder_layers=config.model.num_encoder_layers,
                cross_attention_layers=config.model.cross_attention_layers,
                encoder_causal=config.model.encoder_causal,
                **shaping,
            )
        for part in adapter.config_class.parts:
            getattr(model, part).to(adapter_dtype)
        model.requires_grad_(True).backbone.requires_grad_(False)
        if isinstance(model, CombForCausalLM) and config.train.lora_rank is not None:
            add_lora(model, rank=config.train.lora_rank)
    return model, note


def _front_tokens(config: Config, front: str) -> int:
    """Tokens of the text that a front starts as; of the passage where the backbone's tokenizer can't be had."""
    try:
        tokenizer, most = load_tokenizer(config.model.backbone), front_limit(plain_config(config.model.backbone))
    except (OSError, ValueError):
        return PASSAGE_TOKENS
    return len(front_ids(front, tokenizer, most))


def find_backbone_config(config: Config) -> tuple[Any, str | None]:
    """The backbone's configuration from its folder or the Hub, or else from `ARCHITECTURES`. Raises OSError when it
    can't be had and isn't one of `ARCHITECTURES`.

    Returns:
        It, and why it is not the Hub's (None if it is, or a folder's).
    """
    known = ("revision", "trust_remote_code", *HUB_ARGUMENTS)
    options = {name: value for name, value in config.model.options.items() if name in known}
    name = config.model.backbone
    try:
        return plain_config(name, **options), None
    except OSError as error:
        path = ARCHITECTURES / f"{name.replace('/', '--')}.json"
        if not path.is_file():
            raise
        values = json.loads(path.read_text(encoding="utf-8"))
        reason = (
            f"the sizes of {name} are those that come with this package, because the Hub did not give its "
            f"configuration ({first_line(error)})"
        )
        return AutoConfig.for_model(**values), reason


def first_line(error: BaseException) -> str:
    """What an error says, in short."""
    return str(error).strip().split("\n", 1)[0][:200].rstrip(".")
