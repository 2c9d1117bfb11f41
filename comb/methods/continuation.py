"""What a turn of a conversation leaves for the next one: the cache behind its prompt and its answer.

Nothing here changes a cache that it is given: who goes on takes a fork, so that a turn that fails leaves no trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer, LinearAttentionCacheLayerMixin

from comb.backbones.exclusive import exclusive
from comb.hybrid.caches import attention_layers, run
from comb.hybrid.support import find_hybrid_support, is_hybrid
from comb.linking.cache import RoomyLayer
from comb.linking.fork import fork_cache
from comb.linking.masks import cache_kinds
from comb.linking.positions import LENGTH_DEPENDENT, UnmovableError
from comb.methods.base import DecodeState, Method


@dataclass(frozen=True, eq=False)
class Held:
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

    def cut(self, length: int) -> Held:
        """Its first `length` tokens, in the same memory; what is appended there never reaches it."""
        assert self.can_be_cut
        if length == len(self.token_ids):
            return self
        cache = DynamicCache()
        for layer in self.cache.layers:
            assert layer.keys is not None
            assert layer.values is not None
            beginning = DynamicLayer()
            beginning.lazy_initialization(layer.keys, layer.values)
            beginning.keys, beginning.values = layer.keys[:, :, :length], layer.values[:, :, :length]
            cache.layers.append(beginning)
        return Held(self.token_ids[:length], cache)


def held_behind(token_ids: Sequence[int], cache: Cache | None) -> Held | None:
    """What `cache` holds of a sequence [tokens] that it covers a strict prefix of; None if it can't be gone on from.

    That is: no cache, one of a fixed size, or one of several beams, of which nobody knows which was the best.
    """
    if not isinstance(cache, DynamicCache):
        return None
    rows = {len(layer.keys) for layer in attention_layers(cache).values()}
    length = int(cache.get_seq_length()) if rows == {1} else 0
    return Held(tuple(token_ids[:length]), cache) if 0 < length < len(token_ids) else None


def why_not_continue(model: Any) -> str:
    """Why a model's own forward pass doesn't go on from its cache as from the tokens in it; empty if it does."""
    try:
        if is_hybrid(model):
            with exclusive(model):
                find_hybrid_support(model)
        else:
            cache_kinds(model)
    except UnmovableError as reason:
        return str(reason)
    return length_dependent_rope(model)


def length_dependent_rope(model: Any) -> str:
    """Says so if a model's rotary embedding changes all keys with the length of the prompt; empty if not."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = {str(rope.get("rope_type"))} | {
        str(part.get("rope_type")) for part in rope.values() if isinstance(part, dict)
    }
    scaled = sorted(kinds.intersection(LENGTH_DEPENDENT))
    return f"its rotary embedding ({scaled[0]}) changes all keys with the length of the prompt" if scaled else ""


def pass_size(model: Any) -> int | None:
    """Tokens that the model takes at once behind its cache, for scans that can't start from a state; None is any."""
    if not is_hybrid(model):
        return None
    with exclusive(model):
        return find_hybrid_support(model).step


def continue_tokens(method: Method, held: Held, token_ids: Sequence[int]) -> DecodeState:
    """The state behind what is held and `token_ids`, all of which the backbone computes as in any prompt."""
    input_ids, attention_mask = method.tensors([[*held.token_ids, *token_ids]])
    step = pass_size(method.backbone)
    state = DecodeState(method.backbone, input_ids, attention_mask, past_key_values=held.cache, step=step)
    if step is not None:  # `generate` would take the rest of the prompt at once
        state.past_key_values = fork_cache(held.cache)
        with exclusive(method.backbone):
            run(method.backbone, list(token_ids[:-1]), state.past_key_values, len(held.token_ids), step=step)
    return state
