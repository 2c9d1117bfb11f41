"""Caches of models whose layers all keep a state (Mamba, Mamba-2, Falcon-Mamba): how long they are, and `generate`.

Such a model takes its cache under another name than the rest, nothing in the cache says how many tokens it has seen,
and transformers' `generate` hands over the whole prompt whatever a given cache covers already (seen in 5.19).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin


class StateCache(DynamicCache):
    """A cache of states alone. Who feeds a model, or puts states there, counts the tokens in `num_tokens`."""

    # transformers compiles decoding for every cache that could be, on a GPU, unless its type is DynamicCache itself
    is_compileable = False

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.num_tokens = 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.num_tokens


def empty_cache_of(model: Any) -> Cache:
    """An empty cache as the configuration describes it: with windows, states, or nothing but states."""
    cache = DynamicCache(config=model.config)
    states = [isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers]
    keys = [isinstance(layer, DynamicLayer) for layer in cache.layers]
    return StateCache(config=model.config) if states and all(states) and not any(keys) else cache


def count_in(cache: Cache | None, tokens: int) -> None:
    """Says that `cache` covers so many tokens more; caches with keys know that by themselves."""
    if isinstance(cache, StateCache):
        cache.num_tokens += tokens


@contextmanager
def generating_behind(model: Any, cache: Cache | None) -> Iterator[None]:
    """For one `generate` that goes on from `cache`: the first pass gets what isn't covered, and all are counted."""
    if not isinstance(cache, StateCache):
        yield
        return

    covered = cache.num_tokens

    def cut(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        nonlocal covered
        ids = kwargs["input_ids"][:, covered:]
        covered = 0
        mask = kwargs.get("attention_mask")
        count_in(cache, ids.shape[1])
        return args, {**kwargs, "input_ids": ids, "attention_mask": None if mask is None else mask[:, -ids.shape[1] :]}

    handle = model.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
