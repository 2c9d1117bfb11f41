"""Reads and writes the states in a transformers cache.

Two places exist: `LinearAttentionLayer` (conv_states, recurrent_states, has_previous_state), and the same combined with
keys and values in one layer (Falcon-H1, Zamba2).

Shapes: one row; a recurrent state [H, ., .] or [channels, state], raw columns in front of a convolution [C, kernel].
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from comb.backbones.forward import StateCache, empty_cache_of, run_decoder, takes_positions
from comb.backbones.identity import identity_of
from comb.linking.cache import RoomyLayer


def continued_cache(model: Any) -> Cache | None:
    """An empty cache for a model whose own can't be gone on from, for want of a length; others make one themselves."""
    cache = empty_cache_of(model) if is_hybrid(model) else None
    return cache if isinstance(cache, StateCache) else None


def new_cache(model: Any) -> Cache:
    """An empty cache; with gradients, one whose states are never written over: passes keep them to go back through."""
    cache = empty_cache_of(model)
    if torch.is_grad_enabled():
        layers: list[Any] = cache.layers
        for layer in layers:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                layer.update_conv_state = partial(_on_a_copy, layer.conv_states, layer.update_conv_state)
                layer.update_recurrent_state = partial(_on_a_copy, layer.recurrent_states, layer.update_recurrent_state)
    return cache


def _on_a_copy(held: dict[int, Tensor | None], update: Callable[..., Tensor], *args: Any, **kwargs: Any) -> Tensor:
    held[0] = None if held[0] is None else held[0].clone()
    return update(*args, **kwargs)


def is_hybrid(model: Any) -> bool:
    """Whether `model`'s cache has layers that keep a state instead of keys and values per token."""
    return bool(identity_of(model).fact("is hybrid", lambda: describes_hybrid(model.config)))


def describes_hybrid(config: Any) -> bool:
    """`is_hybrid` of a model with this configuration."""
    if getattr(config, "is_encoder_decoder", False):
        return False
    try:
        cache: Any = DynamicCache(config=config)
    except (AttributeError, KeyError, NotImplementedError, ValueError, TypeError):
        return False  # transformers has no cache for it
    return any(hasattr(layer, "recurrent_states") for layer in cache.layers)


def states_of(cache: Any, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """Raw columns [rows, C, kernel] and recurrent states [rows, ...] as the cache holds them, or None."""
    held = cache.layers[layer] if layer < len(cache.layers) else None
    if not isinstance(held, LinearAttentionCacheLayerMixin):
        return None, None
    return held.conv_states[0], held.recurrent_states[0]


def read_state(cache: Any, layer: int) -> tuple[Tensor | None, Tensor | None]:
    """Copies of the raw columns [C, kernel] and of the recurrent state of the only row; None where there is none."""
    columns, state = (None if tensor is None else tensor[0].clone() for tensor in states_of(cache, layer))
    return columns, state


def write_state(cache: Any, layer: int, columns: Tensor | None, state: Tensor | None) -> None:
    """Puts states [rows, ...] into a linear layer; tokens that follow continue from there."""
    target = cache.layers[layer]
    if columns is not None:
        target.lazy_initialization(conv_states=columns)
        target.conv_states[0].copy_(columns)
    if state is not None:
        target.lazy_initialization(recurrent_states=state)
        target.recurrent_states[0].copy_(state)
    target.has_previous_state[0] = True


def attention_layers(cache: Any) -> dict[int, Any]:
    """The layers that hold keys and values of tokens seen so far, by number."""
    return {
        number: layer
        for number, layer in enumerate(cache.layers)
        if isinstance(layer, DynamicLayer) and layer.is_initialized and layer.keys is not None
    }


def give_room(cache: Any, length: int) -> None:
    """Room for `length` tokens and a little more behind the keys and values, so that nothing copies them again."""
    if torch.is_grad_enabled():  # where tokens are written into, nothing goes back
        return
    for number, layer in attention_layers(cache).items():
        if type(layer) is DynamicLayer:
            cache.layers[number] = RoomyLayer.of(layer.keys, layer.values, length)


def run(model: Any, token_ids: list[int], cache: Cache, start: int, *, step: int | None = None) -> Tensor | None:
    """Computes tokens at positions from `start` on behind what `cache` holds; their last hidden states [tokens, D].

    Positions are always given: some models (Bamba) count them from zero in every call otherwise.

    Args:
        step: tokens per pass, for models whose scan can't start from a state (Jamba: 1); None for all at once.
    """
    if not token_ids:
        return None
    hidden, size = [], step or len(token_ids)
    for first in range(0, len(token_ids), size):
        ids = torch.tensor([token_ids[first : first + size]])
        positions = torch.arange(start + first, start + first + ids.shape[1])[None] if takes_positions(model) else None
        hidden.append(run_decoder(model, ids, cache, position_ids=positions)[0])
    return torch.cat(hidden)


# A short convolution's state is the last raw columns in front of it, and nothing else. Every column is forgotten after
# kernel - 1 tokens, so a segment's last columns replace what was there: a monoid as well, with T = 0 once the segment
# is as long as the kernel. LFM2's layers have no other state; in most others a convolution stands in front of the
# recurrence, and a segment's first kernel - 1 tokens depend on its left neighbour (HYPIC sec. 4.2).


def last_columns(columns: Tensor, tokens: int) -> Tensor:
    """The last columns of [C, kernel] that belong to the last `tokens` tokens, [C, min(kernel, tokens)]."""
    return columns[:, max(0, columns.shape[1] - tokens) :].clone()


def shift_in(columns: Tensor | None, tail: Tensor, kernel: int) -> Tensor:
    """[C, kernel] behind `tail` [C, at most kernel]: earlier columns move up, zeros in front of a prompt's first."""
    before = tail.new_zeros(tail.shape[0], kernel) if columns is None else columns.to(tail)
    return torch.cat([before, tail], dim=1)[:, -kernel:]
