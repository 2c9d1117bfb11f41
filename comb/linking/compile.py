"""The decoder's keys and values of a run of tokens: of a segment alone, or behind what stands in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from comb.backbones.forward import run_decoder, takes_positions
from comb.cache.picache import DecoderPICache
from comb.linking.cache import RoomyLayer, empty_cache, plain_layer
from comb.waits import all_finite


def compile_tokens(
    model: Any, fingerprint: str, token_ids: Sequence[int], before: Sequence[DecoderPICache] = ()
) -> DecoderPICache:
    """Keys and values [kv_heads, tokens, head_dim] of `token_ids`, by one pass. The caller holds the model's lock.

    Args:
        before: what stands in front, from the start of the prompt; without it `token_ids` begin at position zero.

    Raises:
        ValueError: when the backbone computes NaN or infinity.
    """
    start = sum(piece.num_tokens for piece in before)
    end = start + len(token_ids)
    # without a configuration every layer keeps all its tokens, also those behind a sliding window
    cache = DynamicCache()
    cache.layers = [RoomyLayer.of(plain_layer(*tensors), end) for tensors in _joined(model, before)]
    ids = torch.tensor([list(token_ids)])
    positions = torch.arange(start, end)[None] if takes_positions(model) else None
    mask = torch.ones(1, end, dtype=torch.long)
    run_decoder(model, ids, cache, attention_mask=mask, position_ids=positions)
    layers: list[Any] = cache.layers
    keys, values = ([getattr(layer, name)[0, :, start:] for layer in layers] for name in ("keys", "values"))
    if not all_finite((*keys, *values)):
        raise ValueError(
            f"the backbone gave NaN or infinite keys or values for a segment of {len(token_ids)} tokens: its "
            f"weights are damaged or overflow in {str(model.dtype).removeprefix('torch.')}"
        )
    return DecoderPICache(fingerprint, tuple(keys), tuple(values), torch.tensor(list(token_ids)))


def cache_of(model: Any, pieces: Sequence[DecoderPICache], length: int) -> Cache:
    """An ordinary cache over all of `pieces`, of copies, with room for `length` tokens and a little more."""
    cache = empty_cache(model)
    for number, (keys, values) in enumerate(_joined(model, pieces)):
        layer = cache.layers[number]
        if type(layer) is DynamicLayer:
            cache.layers[number] = RoomyLayer.of(plain_layer(keys, values), length)
        else:
            layer.update(keys, values)
            # the layer keeps a view of its window; all that is in front must not stay alive behind it
            layer.keys, layer.values = layer.keys.clone(), layer.values.clone()
    return cache


def _joined(model: Any, pieces: Sequence[DecoderPICache]) -> list[tuple[Tensor, Tensor]]:
    """Per layer, keys and values [1, kv_heads, tokens, head_dim] of all pieces; of a single one they are its own."""
    device = model.get_input_embeddings().weight.device

    def joined(tensors: Sequence[Tensor]) -> Tensor:
        near = [tensor.to(device) for tensor in tensors]  # a head is there already, what a store keeps may not be
        return (torch.cat(near, dim=1) if len(near) > 1 else near[0])[None]

    return [
        (joined([piece.keys[number] for piece in pieces]), joined([piece.values[number] for piece in pieces]))
        for number in range(len(pieces[0].keys) if pieces else 0)
    ]
