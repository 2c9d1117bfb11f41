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
from comb.backbones.primer import Primer, own_tokenizer, primer_ids
from comb.backbones.rotary import primer_limit
from comb.model.adapter import AdapterModel, device_of, floating, frozen_backbone, of_backbone
from comb.model.config import CombConfig, deepest_encoder_layers, spread_cross_layers
from comb.model.encoder import CombEncoder
from comb.model.form import PAPER, default_form
from comb.model.initialization import encoder_config_for, initialize_from_backbone, initialize_random
from comb.model.joint_attention import check_turning, layers_with_attention

INITIALIZATIONS = ("backbone", "first_layers", "random")

DEFAULT_LAYERS = 8
"""Of an encoder with layers of its own (paper, sec. 6), and cross blocks of one without."""


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
        shared_layers: bool | None = None,
        sink: str = "token",
        joint_attention: bool | None = None,
        primer: Primer | None = None,
        key_distance: int | None = None,
        cross_mlp: bool | None = None,
        gate: float | None = None,
        adapter_dtype: torch.dtype | None = None,
        revision: str | None = None,
        **loading: Any,
    ) -> Self:
        """A fresh adapter on a backbone.

        Its form is the one that learned most (`comb.model.form`): documents run through the backbone's own layers, and
        each of these reads them beside what else stands in the prompt, or cross blocks do where they can't. With
        `num_encoder_layers` it is the paper's: an encoder with layers of its own, and cross blocks with closed gates,
        with which it answers as the plain backbone does until it is trained.

        Args:
            name_or_model: Hub id, folder or registered name of a causal language model, or a loaded one.
            num_encoder_layers: depth of an encoder with layers of its own.
            cross_attention_layers: backbone layers that read documents. By default all of them by joint attention;
                cross blocks stand in front of as many as the encoder has layers (of shared layers: 8), evenly spaced.
            encoder_causal: a causal mask inside an encoder with layers of its own instead of a bidirectional one.
            max_document_tokens: longest document; the backbone's context length by default.
            initialization: ``backbone`` starts encoder and blocks from the backbone's layers, ``random`` does not.
                ``first_layers`` makes the encoder of the backbone's first layers, causal as they are, and leaves its
                key and value heads to `comb.model.ridge.fit_to_backbone`.
            shared_layers: no encoder layers at all: documents run through the backbone's own, up to the last one that
                reads, and heads and blocks start from the layers they stand for. Given, what follows is the paper's
                unless it is given, too.
            sink: what a document's first token leaves in its PICache; see `CombEncoderConfig`.
            joint_attention: the decoder's own layers read documents, instead of cross blocks, at their places in the
                prompt; such an adapter has no gates, and documents are heard from the start. With `shared_layers`.
            primer: a passage that documents are compiled behind, with `shared_layers`: `comb.backbones.primer`.
            key_distance, cross_mlp: of cross blocks: whether keys say where in the document they stand, and whether
                blocks have an MLP; see `CombEncoderConfig`.
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
        named = {"joint_attention": joint_attention, "primer": primer, "key_distance": key_distance,
                 "cross_mlp": cross_mlp, "gate": gate}  # fmt: skip
        given = {name: value for name, value in named.items() if value is not None}
        if num_encoder_layers is None and shared_layers is None and initialization == "backbone":
            form = default_form(backbone, info, given)
        else:
            form = PAPER.with_options({**given, "shared_layers": bool(shared_layers)})
        num_encoder_layers = num_encoder_layers or DEFAULT_LAYERS
        if cross_attention_layers is None and form.joint_attention:
            cross_attention_layers = layers_with_attention(backbone.get_submodule(info.layers_path))
        if cross_attention_layers is None:
            cross_attention_layers = spread_cross_layers(info.num_layers, min(num_encoder_layers, info.num_layers))
        layers = sorted(int(layer) for layer in cross_attention_layers)
        first_layers = form.shared_layers or initialization == "first_layers"
        if form.shared_layers:
            num_encoder_layers = max([1, *layers])
        encoder_config = encoder_config_for(
            backbone, info, num_layers=num_encoder_layers, causal=encoder_causal or first_layers,
            max_document_tokens=max_document_tokens, plain=initialization == "random", first_layers=first_layers,
        )  # fmt: skip
        encoder_config.sink, encoder_config.shared_layers = sink, form.shared_layers
        encoder_config.key_distance, encoder_config.cross_mlp = form.key_distance, form.cross_mlp
        encoder_config.joint_attention = form.joint_attention
        if form.primer is not False:
            tokenizer = own_tokenizer(backbone) if isinstance(form.primer, (bool, str)) else None
            encoder_config.primer = primer_ids(form.primer, tokenizer, primer_limit(backbone.config))
            room = info.max_position_embeddings - len(encoder_config.primer)
            if max_document_tokens is None:
                encoder_config.max_position_embeddings = room
            if room < (max_document_tokens or 1):
                raise ValueError(
                    f"a primer of {len(encoder_config.primer)} tokens leaves documents {max(room, 0)} of the "
                    f"backbone's {info.max_position_embeddings} positions: give a shorter one, primer=False"
                    + (f", or a max_document_tokens below {max_document_tokens}" if max_document_tokens else "")
                )
        encoder_config.check()
        if first_layers and not form.shared_layers:
            encoder_config.cross_attention_bias = True  # the fitted heads have one
        config = CombConfig(
            **of_backbone(name_or_model, backbone, revision),
            encoder_config=encoder_config,
            cross_attention_layers=layers,
            cross_encoder_layers=deepest_encoder_layers(num_encoder_layers, layers) if first_layers else None,
            embedding_scale=info.embedding_scale,
        )
        model = cls(config, backbone)
        std = float(getattr(backbone.config.get_text_config(), "initializer_range", None) or 0.02)
        initialize_random((model.encoder, model.cross_blocks), std=std, depth=num_encoder_layers)
        if initialization != "random":
            initialize_from_backbone(
                model.encoder, model.cross_blocks, layers, backbone, info, first_layers=first_layers
            )
        for block in model.cross_blocks:
            nn.init.constant_(block.attention_gate, math.atanh(form.gate))  # type: ignore[arg-type]  # a parameter
        model._place(adapter_dtype or floating(backbone.dtype)).eval()
        if form.joint_attention:
            check_turning(backbone, layers, model.encoder.rotary)
        return model

    def _place(self, dtype: torch.dtype) -> Self:
        """Moves each part of the adapter to where the backbone needs it, in `dtype`."""
        self.encoder.to(device=device_of(self.backbone.get_input_embeddings()), dtype=dtype)
        layers = self.backbone.get_submodule(self.info.layers_path)
        # joint attention has no blocks
        for index, block in zip(self.config.cross_attention_layers, self.cross_blocks, strict=False):
            block.to(device=device_of(layers[index]), dtype=dtype)
        return self
