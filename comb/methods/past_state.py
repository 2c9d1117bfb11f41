"""What a turn of a conversation leaves for the next one: the cache behind its prompt and its answer.

Nothing here changes a cache that it is given: who goes on takes a fork, so that a turn that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from comb.backbones.forward import StateCache
from comb.hybrid.caches import attention_layers, states_of
from comb.linking.cache import RoomyLayer, plain_layer


@dataclass(frozen=True, eq=False)
class PastState:
    """A cache of one row, and the tokens of the decoder's prompt that it covers."""

    token_ids: tuple[int, ...]
    cache: Cache

    @property
    def can_be_cut(self) -> bool:
        """Whether the cache of an earlier token is a part of it: not with states, nor with sliding windows."""
        return type(self.cache) is DynamicCache and all(
            type(layer) in (DynamicLayer, RoomyLayer) for layer in self.cache.layers
        )

    @property
    def nbytes(self) -> int:
        """Bytes of keys, values and states, with the room behind them."""
        tensors: list[Any] = list(getattr(self.cache, "linear_cache", ()))
        for layer in self.cache.layers:
            tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                tensors += [*layer.conv_states.values(), *layer.recurrent_states.values()]
        return sum(tensor.untyped_storage().nbytes() for tensor in tensors if isinstance(tensor, Tensor))

    def cut(self, length: int) -> PastState:
        """Its first `length` tokens, in the same memory; what is appended there never reaches it."""
        assert self.can_be_cut
        if length == len(self.token_ids):
            return self
        cache = DynamicCache()
        for layer in self.cache.layers:
            assert layer.keys is not None
            assert layer.values is not None
            cache.layers.append(plain_layer(layer.keys[:, :, :length], layer.values[:, :, :length]))
        return PastState(self.token_ids[:length], cache)


def common_length(left: Sequence[int], right: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    left, right = tuple(left), tuple(right)
    low, high = 0, min(len(left), len(right))
    while low < high:  # by halves, which are compared without a step for each token
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def past_state_behind(token_ids: Sequence[int], cache: Cache | None) -> PastState | None:
    """What `cache` holds of a sequence [tokens] that it covers a strict prefix of; None if it can't be gone on from.

    That is: no cache, one of a fixed size, or one of several beams, of which nobody knows which was the best.
    """
    if not isinstance(cache, DynamicCache):
        return None
    rows = {len(layer.keys) for layer in attention_layers(cache).values()}
    if isinstance(cache, StateCache):
        held = chain.from_iterable(states_of(cache, number) for number in range(len(cache)))
        rows = {len(tensor) for tensor in held if tensor is not None}
    length = int(cache.get_seq_length()) if rows == {1} else 0
    return PastState(tuple(token_ids[:length]), cache) if 0 < length < len(token_ids) else None
