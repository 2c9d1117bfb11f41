"""What all kinds of adapters on a frozen backbone share: loading, saving and publishing, in the way of Hugging Face."""

from __future__ import annotations

import copy
import tempfile
from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from huggingface_hub import HfApi
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedModel

from comb.backbones import backbones
from comb.backbones.adapter import AdapterConfig, check_fingerprint, check_no_model_in, fingerprint_with_weights
from comb.backbones.damage import TOKENIZER_FILES, explained
from comb.backbones.discovery import UnsupportedBackboneError
from comb.backbones.loading import HUB_ARGUMENTS, backbone_of_adapter, is_hub_id, load_backbone, trained_quantised
from comb.backbones.tokenizer import tokenizer_fingerprint
from comb.backbones.unpublished import write_private
from comb.files import rewritten, share_weights
from comb.model.weights import WEIGHTS, WEIGHTS_INDEX, load_adapter, own_state, read_weights

_WEIGHT_FILES = (WEIGHTS, WEIGHTS_INDEX, "model-*.safetensors")


class AdapterModel(PreTrainedModel):
    """A frozen backbone with something trained beside it; a kind of adapter is a subclass with a `config_class`.

    Its weights are those of the submodules that its configuration names (`AdapterConfig.parts`).
    """

    base_model_prefix = "backbone"
    main_input_name = "input_ids"
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _supports_attention_backend = True

    def __init__(self, config: AdapterConfig, backbone: PreTrainedModel | None = None) -> None:
        if backbone is None:
            backbone = AutoModelForCausalLM.from_config(config.backbone_config)
        if config._attn_implementation is None:
            config._attn_implementation = backbone.config._attn_implementation
        super().__init__(config)
        self.backbone: PreTrainedModel = backbone.requires_grad_(False)

    def _of_the_backbone(self, *_: Any, **__: Any) -> Any:
        """What transformers' models have for PEFT's adapters, which would look for layers of theirs here."""
        raise ValueError(
            f"PEFT's adapters are the backbone's: call this on model.backbone. Without documents {type(self).__name__} "
            "is the plain backbone; the engine's encoder=False makes it that with them, too"
        )

    add_adapter = load_adapter = set_adapter = delete_adapter = enable_peft_hotswap = _of_the_backbone
    enable_adapters = disable_adapters = disable_adapter = active_adapters = get_adapter_state_dict = _of_the_backbone

    @classmethod
    def from_pretrained(
        cls,
        name_or_path: str | Path,
        *model_args: Any,
        backbone: str | Path | PreTrainedModel | None = None,
        config: AdapterConfig | str | Path | None = None,
        adapter_dtype: torch.dtype | None = None,
        **kwargs: Any,
    ) -> Self:
        """Loads an adapter folder (or Hub id) and the backbone it belongs to.

        Args:
            backbone: a loaded backbone, or where to load it from, instead of the one named in the checkpoint.
            adapter_dtype: dtype of the adapter's weights; by default `dtype` if given, else as they were saved.
            kwargs: `revision` and `subfolder` say where the adapter is; other hub arguments (`token`, `cache_dir`,
                ...) hold for both; everything else (`dtype`, `device_map`, `attn_implementation`, ...) is for
                loading the backbone, which is quantised as it was in training unless `quantization_config` is given.

        Raises:
            ValueError: if the backbone isn't the adapter's, the adapter's weights are missing, more than its
                configuration says, or not finite, or an argument has no meaning here.
        """
        kwargs.pop("adapter_kwargs", None)  # transformers' own, for peft adapters
        kwargs.pop("ignore_mismatched_sizes", None)  # weights of other shapes are an error
        report = kwargs.pop("output_loading_info", False)
        if model_args:
            raise ValueError("positional model arguments are not supported for COMB adapters")
        place = {key: kwargs.pop(key) for key in ("revision", "subfolder") if key in kwargs}
        hub = {key: kwargs[key] for key in HUB_ARGUMENTS if key in kwargs} | place
        settings: Any = copy.copy(config)
        if not isinstance(config, AdapterConfig):
            beside = name_or_path if config is None else config
            with explained(beside):
                settings = cls.config_class.from_pretrained(beside, **hub)
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
            settings.backbone_name_or_path = backbone_of_adapter(
                settings, Path(name_or_path) / place.get("subfolder", "")
            )
        if not isinstance(backbone, PreTrainedModel) and "quantization_config" not in kwargs:
            trained = trained_quantised(settings, backbone or settings.backbone_name_or_path)
            kwargs |= {} if trained is None else {"quantization_config": trained}
        if backbone is None:
            kwargs["revision"] = settings.backbone_revision
        if isinstance(backbone, PreTrainedModel):
            kwargs = {key: value for key, value in kwargs.items() if key not in HUB_ARGUMENTS and value is not None}
        loaded = load_backbone(settings.backbone_name_or_path if backbone is None else backbone, **kwargs)
        if settings.backbone_fingerprint is not None:
            check_fingerprint(loaded, settings.backbone_fingerprint, settings.backbone_name_or_path)
        known = is_hub_id(settings.backbone_name_or_path) or settings.backbone_name_or_path in backbones  # by others
        if isinstance(backbone, str | Path) and not known and Path(backbone).exists():
            settings.backbone_name_or_path = str(Path(backbone).resolve())  # it isn't where it was: saved as it is now
        model = cls(settings, loaded)
        weights = read_weights(name_or_path, **hub)
        if adapter_dtype is None:
            saved = next((tensor.dtype for tensor in weights.values()), torch.float32)
            adapter_dtype = saved if dtype in (None, "auto") else floating(loaded.dtype)
        load_adapter(model, model._whole(weights, adapter_dtype), name_or_path)
        model._place(adapter_dtype).eval()
        # what transformers' report would hold is an error above
        empty: Any = dict.fromkeys(("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"), ())
        return (model, empty) if report else model  # type: ignore[return-value]  # as in transformers

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

        Weights (and with `tokenizer` its files) of another that was in that folder go, behind a save that succeeded.

        Args:
            tokenizer: written beside it; its fingerprint goes into the configuration, so that another tokenizer
                is noticed when the adapter is used.
            push_to_hub, repo_id, private, token: publish the folder afterwards, as `comb push` does.
            state_dict, kwargs: as in transformers.

        Raises:
            ValueError: for a folder with a model that is no adapter.
            OSError: if it can't be written, as on a full disk; what was in the folder before is intact.
        """
        from comb.hub.push import push, write_card  # only saving renders a card

        folder = Path(save_directory)
        check_no_model_in(folder)
        if tokenizer is not None:
            self.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
        # our names are the format: conversions that transformers knows for the backbone's weights don't apply
        kwargs.setdefault("save_original_format", False)
        weights = own_state(self) if state_dict is None else state_dict
        adapter = {name: tensor for name, tensor in weights.items() if not name.startswith("backbone.")}
        if not kwargs.get("is_main_process", True):  # then nothing is written
            super().save_pretrained(folder, state_dict=adapter, **kwargs)
            return
        with rewritten(folder, _WEIGHT_FILES if tokenizer is None else _WEIGHT_FILES + TOKENIZER_FILES) as fresh:
            if tokenizer is not None:
                tokenizer.save_pretrained(fresh)
            super().save_pretrained(fresh, state_dict=adapter, **kwargs)
            share_weights(fresh)
        name = self.config.backbone_name_or_path
        write_private(folder, backbone=name if Path(name).is_absolute() else None)
        write_card(self.config, folder)
        if push_to_hub:
            push(folder, repo_id or folder.name, private=private, api=HfApi(token=token))

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
            return push(folder, repo_id, private=private, api=HfApi(token=token))

    def _whole(self, weights: Mapping[str, Tensor], dtype: torch.dtype) -> Mapping[str, Tensor]:
        """A checkpoint's weights as the model has them, in `dtype` what isn't in it."""
        return weights

    @abstractmethod
    def _place(self, dtype: torch.dtype) -> Self:
        """Moves each part of the adapter to where the backbone needs it, in `dtype`."""

    def _init_weights(self, module: nn.Module) -> None:
        pass  # an adapter is initialised by its from_backbone, or loaded

    def train(self, mode: bool = True) -> Self:
        """As in torch, but for the backbone: what is frozen drops nothing out and adds no noise to its router."""
        super().train(mode)
        self.backbone.eval()
        return self

    def num_trainable_parameters(self) -> tuple[int, int]:
        """(trainable, all) parameter counts."""
        trainable = sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)
        return trainable, sum(parameter.numel() for parameter in self.parameters())

    def print_trainable_parameters(self) -> None:
        """Prints how many parameters train, as peft does."""
        trainable, total = self.num_trainable_parameters()
        share = 100 * trainable / total
        print(f"trainable params: {trainable:,d} || all params: {total:,d} || trainable%: {share:.4f}")  # noqa: T201

    @property
    def generation_config(self) -> GenerationConfig | None:
        """The backbone's, which is what generation uses."""
        return self.backbone.generation_config if "backbone" in self._modules else None

    @generation_config.setter
    def generation_config(self, value: GenerationConfig) -> None:
        if "backbone" in self._modules:  # transformers sets a default before there is one
            self.backbone.generation_config = value

    def get_input_embeddings(self) -> Any:
        return self.backbone.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        return self.backbone.get_output_embeddings()

    def resize_token_embeddings(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: the adapter belongs to the backbone's vocabulary as it is."""
        raise ValueError(f"resize the backbone's embeddings before {type(self).__name__}.from_backbone, not afterwards")


def frozen_backbone(
    name_or_model: str | Path | PreTrainedModel, *, revision: str | None, **loading: Any
) -> PreTrainedModel:
    """A causal language model to put an adapter on, loaded if it isn't yet.

    Raises:
        UnsupportedBackboneError: for a model that is an adapter on a backbone already.
    """
    backbone = load_backbone(name_or_model, revision=revision, **loading)
    if isinstance(backbone, AdapterModel):
        raise UnsupportedBackboneError(
            "this model is a COMB adapter on a backbone already: load it with from_pretrained, or give its "
            "backbone (model.backbone)"
        )
    return backbone


def of_backbone(
    name_or_model: str | Path | PreTrainedModel, backbone: PreTrainedModel, revision: str | None
) -> dict[str, Any]:
    """What an adapter's configuration says of its backbone: the fields of `AdapterConfig`."""
    name = str(backbone.config._name_or_path if isinstance(name_or_model, nn.Module) else name_or_model)
    return {
        # a folder is found again from anywhere; "./x" would mean "beside the adapter"
        "backbone_name_or_path": str(Path(name).resolve()) if name and Path(name).exists() else name,
        "backbone_revision": revision,
        # a copy: setting an attention implementation on a configuration reaches into its sub-configurations
        "backbone_config": copy.deepcopy(backbone.config),
        # without weights (on the meta device) there is nothing to know them by
        "backbone_fingerprint": None if backbone.device.type == "meta" else fingerprint_with_weights(backbone),
    }


def floating(dtype: torch.dtype) -> torch.dtype:
    """An adapter's dtype on a backbone of this one."""
    return dtype if dtype.is_floating_point and dtype.itemsize > 1 else torch.float32  # quantised backbones


def device_of(module: nn.Module) -> torch.device:
    """Where a module computes: its parameters' device, or, with accelerate's offloading, where they are brought."""
    execution = getattr(getattr(module, "_hf_hook", None), "execution_device", None)
    if execution is not None:
        return torch.device(execution)
    return next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
