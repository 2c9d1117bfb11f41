"""Making COMB adapters: what an encoder and its cross blocks on a backbone start from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import torch
from torch import nn
from transformers import PreTrainedModel

from comb.backbones.discovery import BackboneInfo, inspect_backbone
from comb.model.adapter import AdapterModel, device_of, floating, frozen_backbone, of_backbone
from comb.model.config import CombConfig, spread_cross_layers
from comb.model.encoder import CombEncoder
from comb.model.initialization import encoder_config_for, initialize_from_backbone, initialize_random

INITIALIZATIONS = ("backbone", "first", "random")

DEFAULT_LAYERS = 8
"""Of an encoder, and cross blocks (paper, sec. 6)."""


class CombPreTrainedModel(AdapterModel):
    """What `CombForCausalLM` has of an adapter's life outside the forward pass."""

    config_class = CombConfig

    encoder: CombEncoder
    cross_blocks: nn.ModuleList
    info: BackboneInfo

    @classmethod
    def from_backbone(
        cls,
        name_or_model: str | Path | PreTrainedModel,
        *,
        num_encoder_layers: int | None = None,
        cross_attention_layers: Sequence[int] | None = None,
        encoder_causal: bool = False,
        max_document_tokens: int | None = None,
        initialization: str = "backbone",
        gate: float = 0.0,
        adapter_dtype: torch.dtype | None = None,
        revision: str | None = None,
        **loading: Any,
    ) -> Self:
        """A fresh adapter on a backbone.

        Encoder and cross blocks start from the backbone's own layers, the gates closed: until it is trained, it answers
        as the plain backbone does.

        Args:
            name_or_model: Hub id, folder or registered name of a causal language model, or a loaded one.
            num_encoder_layers: depth of the encoder, 8 by default.
            cross_attention_layers: backbone layers with a cross block in front of them; by default as many as the
                encoder has layers, evenly spaced.
            encoder_causal: a causal mask inside the encoder instead of a bidirectional one.
            max_document_tokens: longest document; the backbone's context length by default.
            initialization: ``backbone`` starts encoder and blocks from the backbone's layers, evenly spaced ones;
                ``first`` from its first ones, and each block reads the encoder layer as deep as its own, or the last: a
                causal encoder then gives the blocks up to its depth what the backbone itself has of a document alone;
                ``random`` from none.
            gate: how far the gates of cross attention are open at the start, 0 <= gate < 1.
            adapter_dtype: dtype of encoder and blocks; the backbone's by default.
            revision, loading: passed to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            UnsupportedBackboneError: if no encoder can be attached to this model.
            ValueError: for options that make no sense, or loading options beside a loaded model.
        """
        if initialization not in INITIALIZATIONS:
            raise ValueError(f"initialization is {' or '.join(map(repr, INITIALIZATIONS))}, not {initialization!r}")
        for name, value in (("num_encoder_layers", num_encoder_layers), ("max_document_tokens", max_document_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        backbone = frozen_backbone(name_or_model, revision=revision, **loading)
        info = inspect_backbone(backbone)
        if not 0 <= gate < 1:
            raise ValueError(f"gate is a share, 0 <= gate < 1, not {gate}")
        num_encoder_layers = num_encoder_layers or DEFAULT_LAYERS
        if cross_attention_layers is None:
            cross_attention_layers = spread_cross_layers(info.num_layers, min(num_encoder_layers, info.num_layers))
        layers = sorted(int(layer) for layer in cross_attention_layers)
        config = CombConfig(
            **of_backbone(name_or_model, backbone, revision),
            encoder_config=encoder_config_for(
                backbone,
                info,
                num_layers=num_encoder_layers,
                causal=encoder_causal,
                max_document_tokens=max_document_tokens,
                plain=initialization == "random",
            ),
            cross_attention_layers=layers,
            cross_encoder_layers=(
                [max(0, min(layer, num_encoder_layers) - 1) for layer in layers] if initialization == "first" else None
            ),
            embedding_scale=info.embedding_scale,
        )
        # where it will be: a CPU draws the 3.5 B parameters of an 8B model's adapter for minutes
        with device_of(backbone.get_input_embeddings()):
            model = cls(config, backbone)
        std = float(getattr(backbone.config.get_text_config(), "initializer_range", None) or 0.02)
        initialize_random((model.encoder, model.cross_blocks), std=std, depth=num_encoder_layers)
        if initialization != "random":
            initialize_from_backbone(
                model.encoder, model.cross_blocks, layers, backbone, info, first=initialization == "first"
            )
        for block in model.cross_blocks:
            nn.init.constant_(block.attention_gate, math.atanh(gate))  # type: ignore[arg-type]  # a parameter
        model._place(adapter_dtype or floating(backbone.dtype)).eval()
        return model

    def _place(self, dtype: torch.dtype) -> Self:
        """Moves each part of the adapter to where the backbone needs it, in `dtype`."""
        self.encoder.to(device=device_of(self.backbone.get_input_embeddings()), dtype=dtype)
        layers = self.backbone.get_submodule(self.info.layers_path)
        for index, block in zip(self.config.cross_attention_layers, self.cross_blocks, strict=True):
            block.to(device=device_of(layers[index]), dtype=dtype)
        return self
