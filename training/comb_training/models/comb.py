"""Method `comb`: an encoder and cross blocks train on the frozen backbone; LoRA beside layers that stay as they are."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from comb.backbones.loading import load_config
from comb.backbones.rotary import prompt_limit
from comb.evaluation.placement import fit_blocks, measure_placement, short_prompts
from comb.model.adapter import floating
from comb.model.config import CombConfig
from comb.model.modeling import CombForCausalLM
from comb_training.config import Config
from comb_training.data.batches import TrainingExample
from comb_training.models.method import (
    TrainingMethod,
    device_of,
    dtype_of,
    shaping_options,
    trained_options,
    training_methods,
)

logger = logging.getLogger(__name__)

FITTED_ON = 24
"""Prompts that fresh blocks are fitted on: a coefficient for each head is soon known."""


@training_methods.register("comb")
class CombTraining(TrainingMethod):
    """Source: COMB sec. 5.2."""

    adapter = CombForCausalLM

    def load(self, config: Config) -> CombForCausalLM:
        """A fresh encoder on the configured backbone, or the adapter of `model.init_from`, on the configured device."""
        if config.model.init_from is None:
            return self._fresh(config, config.model.backbone, config.model.first_cross_layers)
        model = self.continued(config)
        own = model.config
        for name, has in (
            ("num_encoder_layers", own.encoder_config.num_hidden_layers),
            ("cross_attention_layers", own.cross_attention_layers),
        ):
            wanted = getattr(config.model, name)
            wanted = list(wanted) if isinstance(wanted, tuple) else wanted
            if wanted not in (None, has):
                raise ValueError(f"model.{name}={wanted} can't change the adapter of model.init_from, which has {has}")
        return _placed(model, config)

    def _fresh(self, config: Config, backbone: Any, layers: Sequence[int] | None) -> CombForCausalLM:
        options = trained_options(config)
        if isinstance(backbone, str):
            options["dtype"] = dtype_of(config.model.dtype)
        else:  # loaded already, with the options of loading
            options = shaping_options(CombForCausalLM, options)
        model = CombForCausalLM.from_backbone(
            backbone,
            num_encoder_layers=config.model.num_encoder_layers,
            cross_attention_layers=layers,
            encoder_causal=config.model.encoder_causal,
            **options,
        )
        return _placed(model, config)

    def fitted(
        self, model: Any, config: Config, examples: Sequence[TrainingExample], resume: str | Path | None
    ) -> CombForCausalLM:
        """Cross blocks where documents are read (`measured_cross_layers`), and fitted there if they start as the
        backbone's own attention; every rank measures on the same examples."""
        fresh = resume is None and config.model.init_from is None
        fits = fresh and config.model.options.get("initialization") == "first"
        number, limit = min(512, len(examples)), prompt_limit(model.backbone) or sys.maxsize
        some = [examples[index * len(examples) // number] for index in range(number)]  # evenly spaced
        # an encoder's documents may be longer than what the backbone can read itself
        prompts = [(each.prompt, each.target) for each in some if len(each.prompt.flat) + len(each.target) <= limit]
        if not prompts and (fits or (fresh and config.model.measured_cross_layers is not None)):
            raise ValueError(
                "where documents are read, and what they add there, is measured on prompts with them, and none of "
                f"{number} fits into the backbone's {limit} positions: lower data.num_documents or "
                "data.max_document_tokens, or name model.cross_attention_layers and leave initialization: first out"
            )
        if config.model.measured_cross_layers is not None:
            if resume is not None:
                layers = load_config(resume, CombConfig).cross_attention_layers
            else:
                placement = measure_placement(model.backbone, short_prompts(prompts))
                layers = placement.best(config.model.measured_cross_layers)
                lost = ", ".join(f"{layer}: {placement.losses[layer]:.3f}" for layer in layers)
                logger.info("cross blocks before layers %s (nats lost without: %s; without all: %.3f)", layers, lost,
                            placement.without)  # fmt: skip
            named, revision = model.config.backbone_name_or_path, model.config.backbone_revision
            model = self._fresh(config, model.backbone, layers)
            model.config.backbone_name_or_path, model.config.backbone_revision = named, revision
        own, depth = model.config, model.config.encoder_config.num_hidden_layers
        if fresh and (read := max(own.cross_encoder_layers) + 1) < depth:  # the others would have no gradient
            raise ValueError(
                f"model.num_encoder_layers={depth}, of which cross blocks before layers {own.cross_attention_layers} "
                f"read the first {read}: give model.num_encoder_layers={read}"
            )
        if fits:
            shares = fit_blocks(model, prompts[:: max(1, len(prompts) // FITTED_ON)])
            found = ", ".join(f"{layer}: {share:.2f}" for layer, share in shares.items())
            logger.info("what cross blocks begin with, of what documents add in the layers behind them (R2): %s", found)
        return model  # type: ignore[no-any-return]  # a `CombForCausalLM`

    def longest_row(self, model: CombForCausalLM, config: Config) -> int | None:
        """Where the divergence is learned, the positions of the backbone that reads whole prompts, or
        `data.max_prompt_tokens`."""
        if not config.train.kl_weight:
            return None
        longest = prompt_limit(model.backbone) or sys.maxsize
        return min(longest, config.data.max_prompt_tokens or longest)

    def bare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**inputs, "documents": None}


def _placed(model: CombForCausalLM, config: Config) -> CombForCausalLM:
    """With LoRA, if configured, and on the configured device."""
    if config.train.lora_rank is not None:
        add_lora(model, rank=config.train.lora_rank)
    placed: CombForCausalLM = model.to(device_of(config))
    return placed


def add_lora(model: CombForCausalLM, *, rank: int) -> None:
    """Puts LoRA beside every linear map of the encoder's layers, scaled by 16 / rank, and freezes all else in them.

    In COMB these are copies of the backbone's layers, and so they are kept in its dtype, as it is: of an 8B model in
    bfloat16 they are half of what is frozen. What it has no counterpart of trains in full. What is published holds the
    merged weights, so that loading and serving know nothing of it.
    Source: Hu et al. 2021 (LoRA); the layers are peft's. Raises ValueError if peft is not installed.
    """
    try:
        from peft import LoraConfig, inject_adapter_in_model
    except ImportError as error:
        raise ValueError("train.lora_rank: peft is not installed (pip install 'comb-pic[train]')") from error
    layers = model.encoder.layers
    names = sorted({path for path, module in layers.named_modules() if isinstance(module, nn.Linear)})
    inject_adapter_in_model(LoraConfig(r=rank, lora_alpha=16, target_modules=names, bias="none"), layers)
    for layer in lora_layers(layers).values():
        layer.base_layer = FrozenLinear(layer.base_layer, floating(model.backbone.dtype))


class FrozenLinear(nn.Linear):
    """A linear map that is kept in fewer bits than its input has, and is widened where no autocast narrows that."""

    def __init__(self, trained: nn.Linear, dtype: torch.dtype) -> None:
        super().__init__(trained.in_features, trained.out_features, trained.bias is not None, device="meta")
        self.weight, self.bias = trained.weight, trained.bias
        self.to(dtype).requires_grad_(False)

    def forward(self, input: Tensor) -> Tensor:
        if torch.is_autocast_enabled(input.device.type):
            return super().forward(input)
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return linear(input, self.weight.to(input.dtype), bias)


def lora_layers(model: Any) -> dict[str, Any]:
    """The layers with LoRA beside them, by path; empty where there is none."""
    return {path: module for path, module in model.named_modules() if hasattr(module, "lora_A")}


@torch.no_grad()
def unload(model: Any) -> None:
    """Merges LoRA into the layers of `model` itself and takes it away."""
    for path, layer in lora_layers(model).items():
        layer.merge()
        parent, _, name = path.rpartition(".")
        setattr(model.get_submodule(parent), name, layer.get_base_layer())
