"""Going on from the cache of a conversation's earlier turn, for methods whose tokens the backbone computes as ever."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comb.backbones.forward import counted_passes
from comb.backbones.identity import exclusive
from comb.backbones.rotary import why_length_dependent
from comb.hybrid.caches import is_hybrid, run
from comb.hybrid.support import find_hybrid_support
from comb.linking.cache import fork_cache
from comb.linking.positions import UnmovableError
from comb.linking.support import check_keys_cached
from comb.methods.base import DecodeState, Method
from comb.methods.past_state import PastState


def why_not_continue(model: Any) -> str:
    """Why a model's own forward pass doesn't go on from its cache as from the tokens in it; empty if it does."""
    try:
        if is_hybrid(model):
            find_hybrid_support(model)
        else:
            check_keys_cached(model)
    except UnmovableError as reason:
        return str(reason)
    return why_length_dependent(model)


def pass_size(model: Any) -> int | None:
    """Tokens that the model takes at once behind its cache, for scans that can't start from a state; None is any."""
    return find_hybrid_support(model).step if is_hybrid(model) else None


def continue_tokens(method: Method, past: PastState, token_ids: Sequence[int]) -> DecodeState:
    """The state behind `past` and `token_ids`, all of which the backbone computes as in any prompt."""
    input_ids, attention_mask = method.tensors([[*past.token_ids, *token_ids]])
    step = pass_size(method.backbone)
    state = DecodeState(method.backbone, input_ids, attention_mask, past_key_values=past.cache, step=step)
    if step is not None:  # `generate` would take the rest of the prompt at once
        state.past_key_values = fork_cache(past.cache)
        with exclusive(method.backbone), counted_passes() as passed:
            run(method.backbone, list(token_ids[:-1]), state.past_key_values, len(past.token_ids), step=step)
        state.passed = passed.tokens
    return state
