"""Method `comb`: an encoder and cross blocks train on the frozen backbone."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from comb.evaluation.placement import measure_placement, short_prompts
from comb.model.config import CombConfig
from comb.model.modeling import CombForCausalLM
from comb_training.config import Config, TrainConfig
from comb_training.data.batches import TrainingExample
from comb_training.models.loading import device_of, dtype_of, shaping_options
from comb_training.models.lora import add_lora
from comb_training.models.method import TrainingMethod, trained_options, training_methods

logger = logging.getLogger(__name__)

T = TypeVar("T")


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
        return _with_lora(model, config)

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
        return _with_lora(model, config)

    def fitted(
        self, model: Any, config: Config, examples: Sequence[TrainingExample], resume: str | Path | None
    ) -> CombForCausalLM:
        """Cross blocks where documents are read (`measured_cross_layers`); every rank measures on the same examples."""
        count = config.model.measured_cross_layers
        if count is not None:
            if resume is None:
                layers = _measured(model, examples, count)
            else:
                layers = CombConfig.from_pretrained(resume).cross_attention_layers
            named, revision = model.config.backbone_name_or_path, model.config.backbone_revision
            model = self._fresh(config, model.backbone, layers)
            model.config.backbone_name_or_path, model.config.backbone_revision = named, revision
        return model  # type: ignore[no-any-return]  # the one that came or a fresh one

    def bare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**inputs, "documents": None}


def add_encoder_lora(model: CombForCausalLM, train: TrainConfig) -> None:
    """LoRA on the encoder's layers, if configured. Raises ValueError as `add_lora` does."""
    if train.lora_rank is not None:
        add_lora(model.encoder.layers, rank=train.lora_rank)


def _with_lora(model: CombForCausalLM, config: Config) -> CombForCausalLM:
    add_encoder_lora(model, config.train)
    loaded: CombForCausalLM = model.to(device_of(config))
    return loaded


def _measured(model: CombForCausalLM, examples: Sequence[TrainingExample], count: int) -> list[int]:
    prompts = [(example.prompt, example.target) for example in evenly(examples, 512)]
    placement = measure_placement(model.backbone, short_prompts(prompts))
    layers = placement.best(count)
    lost = ", ".join(f"{layer}: {placement.losses[layer]:.3f}" for layer in layers)
    logger.info("cross blocks before layers %s (nats lost without: %s; without all: %.3f)", layers, lost,
                placement.without)  # fmt: skip
    return layers


def evenly(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, evenly spaced; all if there are fewer."""
    count = min(count, len(items))
    return [items[index * len(items) // count] for index in range(count)]
