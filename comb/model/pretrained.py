"""Making, loading, saving and publishing COMB adapters, in the way of Hugging Face models."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from comb.backbones.discovery import BackboneInfo, UnsupportedBackboneError, inspect_backbone
from comb.backbones.fingerprint import check_fingerprint, fingerprint
from comb.backbones.loading import HUB_ARGUMENTS, backbone_beside, load_backbone
from comb.backbones.tokenizer import tokenizer_fingerprint
from comb.model.config import CombConfig, deepest_encoder_layers, spread_cross_layers
from comb.model.encoder import CombEncoder
from comb.model.initialization import encoder_config_for, initialize_from_backbone, initialize_random
from comb.model.weights import load_adapter, read_weights

if TYPE_CHECKING:
    from huggingface_hub import HfApi

INITIALIZATIONS = ("backbone", "first_layers", "random")


class CombPreTrainedModel(PreTrainedModel):
    """What `CombForCausalLM` has of an adapter's life outside the forward pass."""

    config_class = CombConfig
    base_model_prefix = "backbone"

    backbone: PreTrainedModel
    encoder: CombEncoder
    cross_blocks: nn.ModuleList
    info: BackboneInfo

    @classmethod
    def from_backbone(
        cls,
        name_or_model: str | Path | PreTrainedModel,
        *,
        num_encoder_layers: int = 8,
        cross_attention_layers: Sequence[int] | None = None,
        encoder_causal: bool = False,
        max_document_tokens: int | None = None,
        initialization: str = "backbone",
        shared_layers: bool = False,
        sink: str = "token",
        gate: float = 0.0,
        adapter_dtype: torch.dtype | None = None,
        revision: str | None = None,
        **loading: Any,
    ) -> Self:
        """A fresh adapter on a backbone; with its gates at zero it answers as the plain backbone does.

        Args:
            name_or_model: Hub id, folder or registered name of a causal language model, or a loaded one.
            num_encoder_layers: depth of the encoder.
            cross_attention_layers: backbone layers that get a cross block in front of them; by default as many
                as the encoder has layers (at most one per backbone layer), evenly spaced.
            encoder_causal: a causal mask inside the encoder instead of a bidirectional one.
            max_document_tokens: longest document; the backbone's context length by default.
            initialization: ``backbone`` starts encoder and blocks from the backbone's layers, ``random`` does not.
                ``first_layers`` makes the encoder of the backbone's first layers, causal as they are, and leaves its
                key and value heads to `comb.model.ridge.fit_to_backbone`.
            shared_layers: no encoder layers at all: documents run through the backbone's own, up to the last cross
                block, and heads and blocks start from the layers they stand for. `num_encoder_layers` is then only how
                many cross blocks there are if they are not named.
            sink: what a document's first token leaves in its PICache, see `CombEncoderConfig`.
            gate: how far the gates of the attention are open at the start, 0 <= gate < 1.
            adapter_dtype: dtype of encoder and blocks; the backbone's by default.
            revision, loading: passed to `AutoModelForCausalLM.from_pretrained`.

        Raises:
            UnsupportedBackboneError: if no encoder can be attached to this model.
            ValueError: for options that make no sense, or loading options beside a loaded model.
        """
        if initialization not in INITIALIZATIONS:
            raise ValueError(f"initialization is {' or '.join(map(repr, INITIALIZATIONS))}, not {initialization!r}")
        if not 0 <= gate < 1:
            raise ValueError(f"gate is a share, 0 <= gate < 1, not {gate}")
        for name, value in (("num_encoder_layers", num_encoder_layers), ("max_document_tokens", max_document_tokens)):
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        backbone = load_backbone(name_or_model, revision=revision, **loading)
        if isinstance(backbone, CombPreTrainedModel):
            raise UnsupportedBackboneError(
                "this model is a COMB adapter on a backbone already: load it with from_pretrained, or give its "
                "backbone (model.backbone)"
            )
        info = inspect_backbone(backbone)
        if cross_attention_layers is None:
            cross_attention_layers = spread_cross_layers(info.num_layers, min(num_encoder_layers, info.num_layers))
        layers = sorted(int(layer) for layer in cross_attention_layers)
        first_layers = shared_layers or initialization == "first_layers"
        if shared_layers:
            num_encoder_layers = max(1, *layers)
        encoder_config = encoder_config_for(
            backbone, info, num_layers=num_encoder_layers, causal=encoder_causal or first_layers,
            max_document_tokens=max_document_tokens, plain=initialization == "random", first_layers=first_layers,
        )  # fmt: skip
        encoder_config.sink, encoder_config.shared_layers = sink, shared_layers
        if first_layers and not shared_layers:
            encoder_config.cross_attention_bias = True  # the fitted heads have one
        config = CombConfig(
            backbone_name_or_path=_name_of(name_or_model, backbone),
            backbone_revision=revision,
            # a copy: setting an attention implementation on a configuration reaches into its sub-configurations
            backbone_config=copy.deepcopy(backbone.config),
            # without weights (on the meta device) there is nothing to know them by
            backbone_fingerprint=None if backbone.device.type == "meta" else fingerprint(backbone),
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
            nn.init.constant_(block.attention_gate, math.atanh(gate))  # type: ignore[arg-type]  # a parameter
        model._place(adapter_dtype or _floating(backbone.dtype)).eval()
        return model

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *model_args: Any,
        backbone: str | Path | PreTrainedModel | None = None,
        config: CombConfig | str | Path | None = None,
        adapter_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Self:
        """Loads an adapter folder (or Hub id) and the backbone it belongs to.

        Args:
            backbone: a loaded backbone, or where to load it from, instead of the one named in the checkpoint.
            adapter_dtype: dtype of encoder and blocks; by default `dtype` if given, else as they were saved.
            kwargs: `revision` and `subfolder` say where the adapter is; other hub arguments (`token`, `cache_dir`,
                ...) hold for both; everything else (`dtype`, `device_map`, `attn_implementation`, ...) is for
                loading the backbone.

        Raises:
            ValueError: if the backbone isn't the adapter's, the adapter's weights are missing or not finite, or an
                argument has no meaning here.
        """
        kwargs.pop("adapter_kwargs", None)  # transformers' own, for peft adapters
        if model_args or kwargs.pop("output_loading_info", False):
            raise ValueError("positional model arguments and output_loading_info are not supported for COMB adapters")
        place = {key: kwargs.pop(key) for key in ("revision", "subfolder") if key in kwargs}
        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs} | place
        settings: CombConfig = (
            config
            if isinstance(config, CombConfig)
            else CombConfig.from_pretrained(name_or_path if config is None else config, **hub)
        )
        for name in ("attn_implementation", "experts_implementation"):
            # AutoModel has moved it into the configuration; the backbone needs it as an argument
            chosen = getattr(settings, f"_{name}", None)
            if chosen is not None and not isinstance(backbone, PreTrainedModel):
                kwargs.setdefault(name, chosen)
        if kwargs.get("attn_implementation") is not None:
            settings._attn_implementation = kwargs["attn_implementation"]
        dtype = kwargs.get("dtype", kwargs.get("torch_dtype"))
        if backbone is None:
            # absolute from here on, so that the model can be saved elsewhere
            settings.backbone_name_or_path = backbone_beside(settings.backbone_name_or_path, name_or_path)
            loaded = load_backbone(settings.backbone_name_or_path, revision=settings.backbone_revision, **kwargs)
        elif isinstance(backbone, PreTrainedModel):
            loading = {key: value for key, value in kwargs.items() if key not in HUB_ARGUMENTS and value is not None}
            loaded = load_backbone(backbone, **loading)
        else:
            loaded = load_backbone(backbone, **kwargs)
        if settings.backbone_fingerprint is not None:
            check_fingerprint(loaded, settings.backbone_fingerprint, settings.backbone_name_or_path)
        model = cls(settings, loaded)
        saved = load_adapter(model, read_weights(name_or_path, **hub), name_or_path)
        if adapter_dtype is None:
            adapter_dtype = saved if dtype in (None, "auto") else _floating(loaded.dtype)
        model._place(adapter_dtype).eval()
        return model

    def save_pretrained(
        self,
        save_directory: str | Path,
        *,
        tokenizer: Any = None,
        state_dict: dict[str, Tensor] | None = None,
        push_to_hub: bool = False,
        repo_id: str | None = None,
        private: bool = False,
        token: str | None = None,
        **kwargs: Any,
    ) -> None:
        """Writes the adapter alone: config, trained parameters, generation config and a model card.

        Args:
            tokenizer: written beside it; its fingerprint goes into the configuration, so that another tokenizer
                is noticed when the adapter is used.
            push_to_hub, repo_id, private, token: publish the folder afterwards, as `comb push` does.
            state_dict, kwargs: as in transformers.
        """
        from comb.hub.push import push, write_card  # only saving renders a card

        folder = Path(save_directory)
        folder.mkdir(parents=True, exist_ok=True)
        if tokenizer is not None:
            self.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
            tokenizer.save_pretrained(folder)
        # our names are the format: conversions that transformers knows for the backbone's weights don't apply
        kwargs.setdefault("save_original_format", False)
        weights = self.state_dict() if state_dict is None else state_dict
        adapter = {name: tensor for name, tensor in weights.items() if not name.startswith("backbone.")}
        super().save_pretrained(folder, state_dict=adapter, **kwargs)
        write_card(self.config, folder)
        if push_to_hub:
            push(folder, repo_id or folder.name, private=private, api=_api(token))

    def push_to_hub(
        self, repo_id: str, *, tokenizer: Any = None, private: bool = False, token: str | None = None, **kwargs: Any
    ) -> str:
        """Publishes the adapter with its card, and the tokenizer if given. Returns the commit's address.

        Args:
            kwargs: as for `save_pretrained`.
        """
        from comb.hub.push import push

        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, tokenizer=tokenizer, **kwargs)
            return push(folder, repo_id, private=private, api=_api(token))

    def _place(self, dtype: torch.dtype) -> Self:
        """Moves each part of the adapter to where the backbone needs it, in `dtype`."""
        self.encoder.to(device=_device_of(self.backbone.get_input_embeddings()), dtype=dtype)
        layers = self.backbone.get_submodule(self.info.layers_path)
        for index, block in zip(self.config.cross_attention_layers, self.cross_blocks, strict=True):
            block.to(device=_device_of(layers[index]), dtype=dtype)
        return self

    def _init_weights(self, module: nn.Module) -> None:
        pass  # encoder and blocks are initialised by from_backbone, or loaded


def _name_of(name_or_model: str | Path | PreTrainedModel, backbone: PreTrainedModel) -> str:
    name = str(backbone.config._name_or_path if isinstance(name_or_model, nn.Module) else name_or_model)
    # a folder is found again from anywhere; "./x" would mean "beside the adapter"
    return str(Path(name).resolve()) if name and Path(name).exists() else name


def _floating(dtype: torch.dtype) -> torch.dtype:
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32  # quantised backbones


def _device_of(module: nn.Module) -> torch.device:
    """Where a module computes: its parameters' device, or, with accelerate's offloading, where they are brought."""
    execution = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if execution is not None:
        return torch.device(execution)
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))


def _api(token: str | None) -> HfApi | None:
    from huggingface_hub import HfApi

    return None if token is None else HfApi(token=token)
