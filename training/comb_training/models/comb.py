"""Method `comb`: an encoder and cross blocks train on the frozen backbone; LoRA beside layers that stay as they are."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from comb.backbones.loading import load_config, resolve_name
from comb.backbones.rotary import prompt_limit
from comb.evaluation.placement import fit_blocks
from comb.model.config import CombConfig
from comb.model.lora import add_lora
from comb.model.modeling import CombForCausalLM
from comb.model.weights import read_weights
from comb_training.config import Config
from comb_training.data.batches import TrainingExample
from comb_training.models.method import TrainingMethod, adapter_place, device_of, dtype_of, trained_options

logger = logging.getLogger(__name__)

FITTED_ON = 24
"""Prompts that fresh blocks are fitted on: a coefficient for each head is soon known."""


class CombTraining(TrainingMethod):
    """Source: COMB sec. 5.2."""

    adapter = CombForCausalLM

    def load(self, config: Config) -> CombForCausalLM:
        """A fresh encoder on the configured backbone, or the adapter of `model.init_from`, on the configured device."""
        if config.model.init_from is None:
            model = CombForCausalLM.from_backbone(
                config.model.backbone,
                num_encoder_layers=config.model.num_encoder_layers,
                cross_attention_layers=config.model.cross_attention_layers,
                encoder_causal=config.model.encoder_causal,
                dtype=dtype_of(config.model.dtype),
                **trained_options(config),
            )
            return _placed(model, config)
        rank, place = config.train.lora_rank, adapter_place(config)
        check_rank(rank, load_config(config.model.init_from, CombConfig, **place))
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
        model = _placed(model, config)
        if rank is not None:  # loaded, it is merged
            weights = read_weights(resolve_name(config.model.init_from), **place)
            model.load_state_dict({name: each for name, each in weights.items() if ".lora_" in name}, strict=False)
        return model

    def fitted(
        self, model: Any, config: Config, examples: Sequence[TrainingExample], resume: str | Path | None
    ) -> CombForCausalLM:
        """Cross blocks that start as the backbone's own attention, fitted; every rank does so on the same examples."""
        fresh = resume is None and config.model.init_from is None
        own, depth = model.config, model.config.encoder_config.num_hidden_layers
        if fresh and (read := max(own.cross_encoder_layers) + 1) < depth:  # the others would have no gradient
            raise ValueError(
                f"model.num_encoder_layers={depth}, of which cross blocks before layers {own.cross_attention_layers} "
                f"read the first {read}: give model.num_encoder_layers={read}"
            )
        if fresh and config.model.options.get("initialization") == "first":
            number, limit = min(512, len(examples)), prompt_limit(model.backbone) or sys.maxsize
            some = [examples[index * len(examples) // number] for index in range(number)]  # evenly spaced
            # an encoder's documents may be longer than what the backbone can read itself
            prompts = [(each.prompt, each.target) for each in some if len(each.prompt.flat) + len(each.target) <= limit]
            if not prompts:
                raise ValueError(
                    f"what documents add is measured on prompts with them, and none of {number} fits into the "
                    f"backbone's {limit} positions: lower data.num_documents or data.max_document_tokens, or leave "
                    "initialization: first out"
                )
            shares = fit_blocks(model, prompts[:: max(1, len(prompts) // FITTED_ON)])
            found = ", ".join(f"{layer}: {share:.2f}" for layer, share in shares.items())
            logger.info("what cross blocks begin with, of what documents add in the layers behind them (R2): %s", found)
        return model  # type: ignore[no-any-return]  # a `CombForCausalLM`

    def longest_row(self, model: CombForCausalLM, config: Config) -> int | None:
        """Only where the divergence is learned reads the backbone whole prompts."""
        return super().longest_row(model, config) if config.train.kl_weight else None

    def bare(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        return {**inputs, "documents": None}


def check_rank(rank: int | None, adapter: CombConfig) -> None:
    """Raises ValueError if `train.lora_rank` isn't that of the adapter of `model.init_from`, which would go on."""
    its = adapter.lora_rank
    if rank in (None, its):
        return
    what = "was trained in full" if its is None else f"has LoRA of rank {its}"
    raise ValueError(
        f"train.lora_rank={rank} can't change the adapter of model.init_from, which {what}: "
        f"{'leave it out' if its is None else f'give {its}'}, or train all of it (train.lora_rank=null)"
    )


def _placed(model: CombForCausalLM, config: Config) -> CombForCausalLM:
    """With LoRA, if configured, and on the configured device."""
    if config.train.lora_rank is not None:
        add_lora(model, rank=config.train.lora_rank)
    placed: CombForCausalLM = model.to(device_of(config))
    return placed
