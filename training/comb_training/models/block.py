"""Method `block`: the backbone itself trains to read documents that see only themselves, in full or by LoRA."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import SAFE_WEIGHTS_NAME

from comb.backbones.discovery import decoder_layers
from comb.backbones.loading import resolve_name
from comb.documents.datasets import Counts
from comb.documents.document import Prompt
from comb_training.config import Config
from comb_training.data.batches import TrainingExample
from comb_training.models.block_attention import BlockAttentionModel, BlockCollator
from comb_training.models.loading import device_of, dtype_of
from comb_training.models.lora import add_lora
from comb_training.models.method import TrainingMethod, training_methods


@training_methods.register("block")
class BlockTraining(TrainingMethod):
    """Source: COMB sec. 5, baselines (Block-Attention, Ma et al. 2024)."""

    collator = BlockCollator
    published_part = "backbone"

    def load(self, config: Config) -> BlockAttentionModel:
        """The configured backbone, all of it trainable, or with LoRA on its layers."""
        backbone: Any = AutoModelForCausalLM.from_pretrained(
            resolve_name(config.model.backbone), dtype=dtype_of(config.model.dtype), **config.model.options
        )
        model = BlockAttentionModel(backbone.to(device_of(config)))
        train = config.train
        if train.lora_rank is not None:
            backbone.requires_grad_(False)
            layers = decoder_layers(backbone)
            add_lora(layers, rank=train.lora_rank, alpha=train.lora_alpha, dropout=train.lora_dropout)
        return model

    def plain_backbone(self, model: BlockAttentionModel) -> AbstractContextManager[Any]:
        return model.plain()

    def save_trained(self, model: Any, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor]) -> None:
        """The weights alone: the tokenizer is the backbone's own and stays there."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(weights), folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def answering(self, model: BlockAttentionModel) -> Any:
        return model.backbone

    def row(self, example: TrainingExample) -> TrainingExample:
        """The same question as a row that holds its documents."""
        return TrainingExample(Prompt(example.prompt.flat, (), ()), example.target, example.id, example.references)

    def fitting(
        self, examples: Sequence[TrainingExample], model: Any, config: Config, counts: Counts
    ) -> Sequence[TrainingExample]:
        """Without those longer than `data.max_prompt_tokens` or the backbone's positions."""
        longest: int = model.config.get_text_config().max_position_embeddings
        longest = min(longest, config.data.max_prompt_tokens or longest)
        kept = [example for example in examples if len(example.prompt.flat) + len(example.target) <= longest]
        counts.drop(f"prompt and answer of more than {longest} tokens", len(examples) - len(kept))
        return kept
