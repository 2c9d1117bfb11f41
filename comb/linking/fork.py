"""Caches that go on without changing the one they came from."""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers.cache_utils import (
    Cache,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionCacheLayerMixin,
)

from comb.linking.cache import RoomyLayer


def fork_cache(cache: Cache) -> Cache:
    """A cache that can grow without changing `cache`.

    Dynamic layers replace their tensors when they grow, so they share them; linear layers write in place into states
    of a fixed size, which are copied; other kinds are copied whole.
    """
    if type(cache) is not DynamicCache:
        return copy.deepcopy(cache)
    fork = copy.copy(cache)
    fork.layers = [_fork_layer(layer) for layer in cache.layers]
    return fork


def _fork_layer(layer: Any) -> Any:
    if isinstance(layer, RoomyLayer):
        return layer.fork()
    if type(layer) in (DynamicLayer, DynamicSlidingWindowLayer):
        return copy.copy(layer)
    if isinstance(layer, LinearAttentionCacheLayerMixin) and not isinstance(layer, DynamicSlidingWindowLayer):
        fork = copy.copy(layer)
        for name, value in vars(layer).items():
            if isinstance(value, dict):  # per state: tensors, and what is known of them
                copies = {key: item.clone() if isinstance(item, torch.Tensor) else item for key, item in value.items()}
                setattr(fork, name, copies)
        return fork
    return copy.deepcopy(layer)


def repeat_rows(cache: Cache, copies: int) -> None:
    """Repeats every row of `cache`; transformers leaves the states of linear layers as they are."""
    linear = [layer for layer in cache.layers if isinstance(layer, LinearAttentionCacheLayerMixin)]
    for layer in linear:
        for states in (layer.conv_states, layer.recurrent_states):
            states.update({key: None if t is None else t.repeat_interleave(copies, 0) for key, t in states.items()})
    if not linear:
        cache.batch_repeat_interleave(copies)
        return
    for layer in cache.layers:
        if isinstance(layer, DynamicLayer):
            layer.batch_repeat_interleave(copies)
