"""What an adapter of link tokens is (its configuration), what it has learned, and the keys and values that it gives.

Legend: n link tokens, H cached heads, D and E channels of a key and of a value. Linear layers of hybrids have a state
behind all n, and the last columns in front of their convolution, instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from comb.backbones.adapter import AdapterConfig, check_fingerprint, check_types
from comb.backbones.damage import explained
from comb.backbones.discovery import start_token_id
from comb.backbones.forward import cache_argument, count_in, decoder_of, empty_cache_of
from comb.backbones.identity import identity_of, settings_of
from comb.backbones.loading import load_config
from comb.hybrid.caches import attention_layers, is_hybrid, new_cache, read_state, write_state
from comb.hybrid.support import HybridSupport
from comb.model.weights import load_adapter, read_weights

FrontKeyValues = list[tuple[Tensor, Tensor]]
"""Per layer, keys [H, n, D] and values [H, n, E] as the backbone caches them at positions 0 to n - 1."""


class LinkTokensConfig(AdapterConfig):
    """How many link tokens stand in front of a document while it is compiled, and the backbone they belong to.

    Args:
        num_link_tokens: n, in front of every document.
        layer_shapes: per layer with keys [kv_heads, channels of a key, channels of a value].
        state_shapes: of a hybrid's linear layers, ``state_3`` and ``columns_3`` say, by number of the cache layer.
        state_units: what these are kept in units of, so that one learning rate fits all: some states are a thousand
            times smaller than keys.

    Raises:
        ValueError: for a number below one.
    """

    model_type = "comb_linktokens"
    method = "linktokens"
    parts = ("front",)
    otherwise = "not an adapter of link tokens; to put some on it, use LinkTokensForCausalLM.from_backbone"

    num_link_tokens: int = 8
    layer_shapes: list[list[int]] | None = None
    state_shapes: dict[str, list[int]] | None = None
    state_units: dict[str, float] | None = None

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
    behind them, so that it can start as the keys and values of any n tokens; of linear layers, states behind them.
    """

    def __init__(self, config: LinkTokensConfig) -> None:
        super().__init__()
        n, shapes = config.num_link_tokens, config.layer_shapes or []
        self.keys = nn.ParameterList(torch.zeros(heads, n, channels) for heads, channels, _ in shapes)
        self.values = nn.ParameterList(torch.zeros(heads, n, channels) for heads, _, channels in shapes)
        if config.state_shapes:  # what a front has is a part of its fingerprint
            self.units, self.num_link_tokens = dict(config.state_units or {}), n
            self.states = nn.ParameterDict({name: torch.zeros(shape) for name, shape in config.state_shapes.items()})

    def forward(self, dtype: torch.dtype) -> FrontKeyValues:
        """Keys and values in a backbone's dtype, with gradients where they are enabled."""
        return [(keys.to(dtype), values.to(dtype)) for keys, values in zip(self.keys, self.values, strict=True)]

    def cache(self, backbone: Any, support: HybridSupport) -> Any:
        """What a pass of a hybrid over a document begins with: a cache that covers the link tokens."""
        cache = new_cache(backbone)
        for number, pair in zip(support.attention, self(backbone.dtype), strict=True):
            cache.update(*(tensor[None] for tensor in pair), number)
        for number, layer in support.linear.items():
            parts = zip(self.linear(number), (backbone.dtype, layer.dtype), strict=True)
            write_state(cache, number, *(None if part is None else part[None].to(dtype) for part, dtype in parts))
        count_in(cache, self.length)
        return cache

    def linear(self, number: int) -> tuple[Tensor | None, Tensor | None]:
        """Of a linear layer, by number of the cache layer: columns [C, kernel] and state behind the link tokens."""
        names = f"columns_{number}", f"state_{number}"
        columns, state = (self.states[name] * self.units[name] if name in self.states else None for name in names)
        return columns, state

    @property
    def linear_layers(self) -> list[int]:
        """Numbers of the cache layers that `linear` has something of."""
        return sorted({int(name.rpartition("_")[2]) for name in getattr(self, "states", {})})

    @property
    def length(self) -> int:
        # a plain model's has no attribute for it: the settings of a module are a part of its fingerprint
        return int(self.keys[0].shape[1]) if len(self.keys) else self.num_link_tokens

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


@dataclass(frozen=True)
class FrontTensors:
    """What a backbone caches of tokens from position zero on: what link tokens can start as."""

    key_values: FrontKeyValues
    states: dict[str, Tensor]

    @classmethod
    def of(cls, backbone: Any, token_ids: Sequence[int]) -> FrontTensors:
        """Those of `token_ids`."""
        # one of the configuration's own may have windows, and keep the last tokens alone
        cache: Any = empty_cache_of(backbone) if is_hybrid(backbone) else DynamicCache()
        ids = torch.tensor([list(token_ids)], device=backbone.get_input_embeddings().weight.device)
        with torch.no_grad():
            decoder_of(backbone)(input_ids=ids, use_cache=True, **{cache_argument(backbone): cache})
        pairs = [(layer.keys[0], layer.values[0]) for layer in attention_layers(cache).values()]
        states = {
            f"{kind}_{number}": tensor
            for number in range(len(cache.layers))
            for kind, tensor in zip(("columns", "state"), read_state(cache, number), strict=True)
            if tensor is not None
        }
        return cls(pairs, states)

    def config(self, num_link_tokens: int, **settings: Any) -> LinkTokensConfig:
        """Of link tokens with these shapes and sizes."""
        units = {
            name: 1.0 if tensor.is_meta else float(tensor.float().square().mean().sqrt()) or 1.0
            for name, tensor in self.states.items()
        }
        return LinkTokensConfig(
            num_link_tokens=num_link_tokens,
            layer_shapes=[[len(keys), keys.shape[-1], values.shape[-1]] for keys, values in self.key_values],
            state_shapes={name: list(tensor.shape) for name, tensor in self.states.items()} or None,
            state_units=units or None,
            **settings,
        )


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
    with explained(name_or_path):
        if backbone is not None and config.backbone_fingerprint is not None:
            check_fingerprint(backbone, config.backbone_fingerprint, config.backbone_name_or_path)
        front = LearnedFront(config)
        load_adapter(nn.ModuleDict({"front": front}), read_weights(name_or_path), name_or_path)
        if backbone is not None:
            front.to(device=backbone.get_input_embeddings().weight.device)
    return front.requires_grad_(False), config
