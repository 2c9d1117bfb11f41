"""What an adapter of link tokens is (its configuration), what it has learned, and the keys and values that it gives.

Legend: n link tokens, H cached heads, D and E channels of a key and of a value.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from comb.backbones.adapter import AdapterConfig, check_fingerprint, check_types
from comb.backbones.discovery import start_token_id
from comb.backbones.forward import cache_argument, decoder_of
from comb.backbones.identity import identity_of, settings_of
from comb.backbones.loading import load_config
from comb.model.weights import load_adapter, read_weights

FrontKeyValues = list[tuple[Tensor, Tensor]]
"""Per layer, keys [H, n, D] and values [H, n, E] as the backbone caches them at positions 0 to n - 1."""


class LinkTokensConfig(AdapterConfig):
    """How many link tokens stand in front of a document while it is compiled, and the backbone they belong to.

    Args:
        num_link_tokens: n, in front of every document.
        layer_shapes: per layer [kv_heads, channels of a key, channels of a value].

    Raises:
        ValueError: for a number below one.
    """

    model_type = "comb_linktokens"
    method = "linktokens"
    parts = ("front",)
    otherwise = "not an adapter of link tokens; to put some on it, use LinkTokensForCausalLM.from_backbone"

    num_link_tokens: int = 8
    layer_shapes: list[list[int]] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        check_types(self)
        if self.num_link_tokens < 1:
            raise ValueError(f"num_link_tokens must be at least 1, got {self.num_link_tokens}")
        if any(len(shape) != 3 for shape in self.layer_shapes or ()):
            raise ValueError(
                f"layer_shapes is a list of [kv_heads, channels of a key, of a value], got {self.layer_shapes}"
            )
        super().__post_init__(**kwargs)

    @property
    def placeholder_id(self) -> int:
        """The token id that stands for a link token where a prompt is written as ids; it is never looked up."""
        return start_token_id(self.get_text_config()) or 0


class LearnedFront(nn.Module):
    """The link tokens in front of a document, which see nothing but themselves.

    So their keys and values are the same in front of every document, up to the place that these are turned to. They are
    what is learned (prefix tuning): keys as they are cached at positions 0 to n - 1, where documents are compiled
    behind them, so that it can start as the keys and values of any n tokens.
    """

    def __init__(self, config: LinkTokensConfig) -> None:
        super().__init__()
        n, shapes = config.num_link_tokens, config.layer_shapes or []
        self.keys = nn.ParameterList(torch.zeros(heads, n, channels) for heads, channels, _ in shapes)
        self.values = nn.ParameterList(torch.zeros(heads, n, channels) for heads, _, channels in shapes)

    def forward(self, dtype: torch.dtype) -> FrontKeyValues:
        """Keys and values in a backbone's dtype, with gradients where they are enabled."""
        return [(keys.to(dtype), values.to(dtype)) for keys, values in zip(self.keys, self.values, strict=True)]

    @property
    def length(self) -> int:
        # no attribute: the settings of a module are a part of its fingerprint
        return int(self.keys[0].shape[1])

    @property
    def fingerprint(self) -> str:
        """Names what has been learned so far, and what is done with it."""

        def digest() -> str:
            found = hashlib.sha256(settings_of(self).encode())
            for name, parameter in self.named_parameters():
                found.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype};".encode())
                found.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
            return found.hexdigest()[:16]

        return str(identity_of(self).fact("fingerprint", digest))


def key_values(backbone: Any, token_ids: Sequence[int]) -> FrontKeyValues:
    """What `backbone` caches of tokens from position zero."""
    cache = DynamicCache()
    ids = torch.tensor([list(token_ids)], device=backbone.get_input_embeddings().weight.device)
    decoder_of(backbone)(input_ids=ids, use_cache=True, **{cache_argument(backbone): cache})
    layers: list[Any] = cache.layers
    return [(layer.keys[0], layer.values[0]) for layer in layers]


def published_front(name_or_path: str | Path, backbone: Any = None) -> tuple[LearnedFront, LinkTokensConfig]:
    """What an adapter's folder or Hub id has learned, for who has its backbone already; and its configuration.

    Args:
        backbone: checked to be the adapter's, and where the front's tensors go.

    Raises:
        OSError, ValueError: as `LinkTokensForCausalLM.from_pretrained` does.
    """
    config: Any = load_config(name_or_path)
    if not isinstance(config, LinkTokensConfig):
        raise ValueError(f"{name_or_path} is no adapter of link tokens, its model_type is {config.model_type!r}")
    if backbone is not None and config.backbone_fingerprint is not None:
        check_fingerprint(backbone, config.backbone_fingerprint, config.backbone_name_or_path)
    front = LearnedFront(config)
    load_adapter(nn.ModuleDict({"front": front}), read_weights(name_or_path), name_or_path)
    if backbone is not None:
        front.to(device=backbone.get_input_embeddings().weight.device)
    return front.requires_grad_(False), config
