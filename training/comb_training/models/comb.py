"""Method `comb`: an encoder and cross blocks train on the frozen backbone."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comb.backbones.loading import resolve_name
from comb.model.modeling import CombForCausalLM
from comb_training.config import Config
from comb_training.models.loading import device_of, dtype_of
from comb_training.models.lora import add_lora
from comb_training.models.method import TrainingMethod, training_methods


@training_methods.register("comb")
class CombTraining(TrainingMethod):
    """Source: COMB sec. 5.2."""

    published_part = "encoder"

    def load(self, config: Config) -> CombForCausalLM:
        """A fresh encoder on the configured backbone, or the adapter of `model.init_from`, on the configured device."""
        options = dict(config.model.options)
        # trained weights stay in float32 whatever the backbone's: small updates, of gates above all, are not lost
        options.setdefault("adapter_dtype", torch.float32)
        dtype = dtype_of(config.model.dtype)
        model: Any
        if config.model.init_from is not None:
            shaping = sorted({"max_document_tokens", "initialization"} & options.keys())
            if shaping:
                raise ValueError(f"model.options {', '.join(shaping)} can't change the adapter of model.init_from")
            model = CombForCausalLM.from_pretrained(resolve_name(config.model.init_from), dtype=dtype, **options)
            model.requires_grad_(True).backbone.requires_grad_(False)
        else:
            model = CombForCausalLM.from_backbone(
                config.model.backbone,
                num_encoder_layers=config.model.num_encoder_layers,
                cross_attention_layers=config.model.cross_attention_layers,
                encoder_causal=config.model.encoder_causal,
                dtype=dtype,
                **options,
            )
        train = config.train
        if train.lora_rank is not None:
            layers = model.get_submodule("encoder.layers")
            add_lora(layers, rank=train.lora_rank, alpha=train.lora_alpha, dropout=train.lora_dropout)
        loaded: CombForCausalLM = model.to(device_of(config))
        return loaded

    def plain_backbone(self, model: CombForCausalLM) -> AbstractContextManager[Any]:
        return nullcontext(model.backbone)

    def save_trained(self, model: Any, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor]) -> None:
        """An adapter folder, which can be asked like the one of a finished run."""
        model.save_pretrained(folder, tokenizer=tokenizer, state_dict=weights)
