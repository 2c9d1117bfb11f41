"""Method `block`: the backbone itself trains to read documents that see only themselves, in full or by LoRA.

A row is the whole prompt and its answer under a block-diagonal mask: a document's tokens attend to their own document,
everything else (head, query, answer) to all that stands before it. Positions count through the row. That is what
method `block` computes from cached documents, whose keys are rotated to where they stand.

Source: COMB sec. 5, baselines (Block-Attention, Ma et al. 2024).

Legend: B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers.utils import SAFE_WEIGHTS_NAME

from comb.backbones.discovery import decoder_layers
from comb.backbones.loading import load_model
from comb.linking.blocks import block_mask
from comb.linking.masks import Masks, for_attention
from comb.linking.positions import UnmovableError
from comb.linking.support import find_support
from comb_training.config import Config
from comb_training.models.loading import device_of, dtype_of
from comb_training.models.lora import add_lora, lora_layers
from comb_training.models.method import training_methods
from comb_training.models.rows import RowTraining


class BlockAttentionModel(nn.Module):
    """A backbone that trains, under the mask of `block_mask`.

    Raises:
        ValueError: when method `block` can't run on this backbone, or its attention takes no mask by position.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self.backbone = backbone
        try:
            masks = find_support(backbone).masks
        except UnmovableError as reason:
            raise ValueError(f"train.method=block can't be used with this backbone: {reason}") from reason
        if masks is None:
            raise ValueError("train.method=block can't be used with this backbone: it takes no mask by position")
        self._masks: Masks = masks
        backbone.config.block_attention = True  # method `block` looks for it

    def __getattr__(self, name: str) -> Any:
        """What it has not itself is the backbone's: configuration, device, embeddings."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "backbone":
                raise
            return getattr(self.backbone, name)

    @property
    def max_document_tokens(self) -> int:
        """Documents take what the backbone's positions give."""
        return int(self.config.get_text_config().max_position_embeddings) - 1

    def num_trainable_parameters(self) -> tuple[int, int]:
        """Trainable, and all."""
        counts = [(parameter.numel(), parameter.requires_grad) for parameter in self.parameters()]
        return sum(count for count, trained in counts if trained), sum(count for count, _ in counts)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, segments: Tensor) -> Any:
        """Output with logits [B, T, vocabulary]; `segments` [B, T] as `BlockCollator` gives them."""
        del attention_mask  # padding is part of `segments`
        kinds = {
            kind: for_attention(block_mask(segments, window), self.backbone) for kind, window in self._masks.windows
        }
        return self.backbone(
            input_ids=input_ids,
            attention_mask=kinds if self._masks.mapping else next(iter(kinds.values())),
            position_ids=torch.arange(input_ids.shape[1], device=input_ids.device).expand_as(input_ids),
            use_cache=False,
        )

    def save_pretrained(self, folder: str | Path, *, tokenizer: Any, state_dict: Mapping[str, Tensor]) -> None:
        """An ordinary Hugging Face checkpoint of the backbone, with ``block_attention`` in its configuration."""
        weights = {name.removeprefix("backbone."): value.to(self.backbone.dtype) for name, value in state_dict.items()}
        self.backbone.save_pretrained(folder, state_dict=weights)
        tokenizer.save_pretrained(folder)


@training_methods.register("block")
class BlockTraining(RowTraining):
    """Source: COMB sec. 5, baselines (Block-Attention, Ma et al. 2024)."""

    published_part = "backbone"

    def load(self, config: Config) -> BlockAttentionModel:
        """The configured backbone, all of it trainable, or with LoRA on its layers."""
        backbone: Any = load_model(config.model.backbone, dtype=dtype_of(config.model.dtype), **config.model.options)
        model = BlockAttentionModel(backbone.to(device_of(config)))
        train = config.train
        if train.lora_rank is not None:
            backbone.requires_grad_(False)
            layers = decoder_layers(backbone)
            add_lora(layers, rank=train.lora_rank, alpha=train.lora_alpha, dropout=train.lora_dropout)
        return model

    @contextmanager
    def plain_backbone(self, model: BlockAttentionModel) -> Iterator[Any]:
        """Only with LoRA, which is turned off meanwhile. Raises ValueError where all of the backbone trains."""
        layers = lora_layers(model).values()
        if not layers:
            raise ValueError("the backbone as it was is only there with LoRA (train.lora_rank)")
        for layer in layers:
            layer.enable_adapters(False)
        try:
            yield model.backbone
        finally:
            for layer in layers:
                layer.enable_adapters(True)

    def save_trained(self, model: Any, folder: Path, tokenizer: Any, weights: Mapping[str, Tensor]) -> None:
        """The weights alone: the tokenizer is the backbone's own and stays there."""
        folder.mkdir(parents=True, exist_ok=True)
        save_file(dict(weights), folder / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def answering(self, model: BlockAttentionModel) -> Any:
        return model.backbone
