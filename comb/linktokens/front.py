"""What is learned of link tokens, and the keys and values that it gives.

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

from comb.backbones.fingerprint import check_fingerprint
from comb.backbones.forward import decoder_of
from comb.backbones.identity import identity_of, settings_of
from comb.backbones.loading import load_config
from comb.linktokens.config import LinkTokensConfig
from comb.model.weights import load_adapter, read_weights

FrontKeyValues = list[tuple[Tensor, Tensor]]
"""Per layer, keys [H, n, D] and values [H, n, E] as the backbone caches them at positions 0 to n - 1."""


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
        """n."""
        return int(self.keys[0].shape[1])

    @property
    def fingerprint(self) -> str:
        """Names what has been learned so far, and what is done with it."""
        found: str = identity_of(self).fact("fingerprint", self._digest)
        return found

    def _digest(self) -> str:
        digest = hashlib.sha256(settings_of(self).encode())
        for name, parameter in self.named_parameters():
            digest.update(f"{name}:{tuple(parameter.shape)}:{parameter.dtype};".encode())
            digest.update(parameter.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]

    @torch.no_grad()
    def start_from(self, backbone: Any, token_ids: Sequence[int]) -> None:
        """Makes it what n tokens are at the start of a prompt.

        Raises:
            ValueError: for another number of tokens.
        """
        if len(token_ids) != self.length:
            raise ValueError(f"expected {self.length} tokens, one for each link token, got {len(token_ids)}")
        for number, (keys, values) in enumerate(key_values(backbone, token_ids)):
            self.keys[number].copy_(keys)
            self.values[number].copy_(values)


def key_values(backbone: Any, token_ids: Sequence[int]) -> FrontKeyValues:
    """What `backbone` caches of tokens from position zero."""
    cache = DynamicCache()
    ids = torch.tensor([list(token_ids)], device=backbone.get_input_embeddings().weight.device)
    decoder_of(backbone)(input_ids=ids, past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    return [(layer.keys[0], layer.values[0]) for layer in layers]


def published_front(name_or_path: str | Path, backbone: Any = None) -> tuple[LearnedFront, LinkTokensConfig]:
    """What an adapter's folder or Hub id has learned, for who has its backbone already; and its configuration.

    Args:
        backbone: checked to be the adapter's, and where the front's tensors go.

    Raises:
        OSError, ValueError: if it can't be loaded, as `LinkTokensForCausalLM.from_pretrained` does.
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
