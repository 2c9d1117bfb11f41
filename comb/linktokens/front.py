"""What is learned of link tokens, and the keys and values that it gives.

Legend: n link tokens, H cached heads, D and E channels of a key and of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import DynamicCache

from comb.backbones.forward import decoder_of
from comb.linktokens.config import LinkTokensConfig

FrontKeyValues = list[tuple[Tensor, Tensor]]
"""Per layer, keys [H, n, D] and values [H, n, E] as the backbone caches them at positions 0 to n - 1."""


class Front(nn.Module):
    """The link tokens in front of a document, which see nothing but themselves.

    So their keys and values are the same in front of every document, up to the place that these are turned to. Keys are
    learned as they are cached at positions 0 to n - 1, where documents are compiled behind them: both forms then give
    the same thing, and it can start as the keys and values of any n tokens.
    """

    def __init__(self, config: LinkTokensConfig, width: int) -> None:
        super().__init__()
        n = config.num_link_tokens
        if config.form == "embeddings":
            self.embeddings = nn.Parameter(torch.zeros(n, width))
            return
        shapes = config.layer_shapes or []
        self.keys = nn.ParameterList(torch.zeros(heads, n, channels) for heads, channels, _ in shapes)
        self.values = nn.ParameterList(torch.zeros(heads, n, channels) for heads, _, channels in shapes)

    @property
    def learns_embeddings(self) -> bool:
        """Whether the first layer's inputs are learned; else every layer's keys and values."""
        return hasattr(self, "embeddings")

    def forward(self, backbone: Any) -> FrontKeyValues:
        """Keys and values in the backbone's dtype, with gradients where they are enabled."""
        if self.learns_embeddings:
            return key_values(backbone, inputs_embeds=self.embeddings.to(backbone.dtype)[None])
        return [(k.to(backbone.dtype), v.to(backbone.dtype)) for k, v in zip(self.keys, self.values, strict=True)]

    @torch.no_grad()
    def start_from(self, backbone: Any, token_ids: Sequence[int]) -> None:
        """Makes it what n tokens are at the start of a prompt.

        Raises:
            ValueError: for another number of tokens.
        """
        count = len(self.embeddings) if self.learns_embeddings else self.keys[0].shape[1]
        if len(token_ids) != count:
            raise ValueError(f"expected {count} tokens, one for each link token, got {len(token_ids)}")
        table = backbone.get_input_embeddings()
        ids = torch.tensor([list(token_ids)], device=table.weight.device)
        if self.learns_embeddings:
            self.embeddings.copy_(table(ids)[0])
            return
        for number, (keys, values) in enumerate(key_values(backbone, input_ids=ids)):
            self.keys[number].copy_(keys)
            self.values[number].copy_(values)


def key_values(backbone: Any, **inputs: Tensor) -> FrontKeyValues:
    """What `backbone` caches of the ``input_ids`` or ``inputs_embeds`` of one row, from position zero."""
    cache = DynamicCache()
    decoder_of(backbone)(**inputs, past_key_values=cache, use_cache=True)
    layers: list[Any] = cache.layers
    return [(layer.keys[0], layer.values[0]) for layer in layers]
