"""Whether a hybrid can be linked in one pass: tried out on the model in hand, against linking run by run."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer

from comb.backbones.attention_calls import STAND_INS
from comb.backbones.forward import counted_passes, takes_positions
from comb.backbones.transformers_private import attention_name
from comb.hybrid.caches import attention_layers, new_cache, read_state
from comb.hybrid.compile import compile_segment
from comb.hybrid.link import SequentialLinker, link_segments
from comb.hybrid.packed import PackedLinker
from comb.hybrid.support import HybridSupport
from comb.linking.support import distance, made_up_tokens, tolerance_of

_SEGMENTS, _SEAM, _FRESH = (23, 19), 2, ((0, 5), (5, 8), (8, 12))


# one mask per kind of layer, as transformers' hybrids take them, or a single one
_FORMS = (partial(PackedLinker, mapping=True), partial(PackedLinker, mapping=False))


@torch.no_grad()
def linker_for(model: Any, support: HybridSupport) -> Callable[..., SequentialLinker]:
    """`PackedLinker` where that gives what `SequentialLinker` gives, else that. The caller holds the model's lock."""
    if attention_name(model) in STAND_INS:
        return SequentialLinker  # MAC keeps the rows of a prompt in order, and doesn't know the packed pass's mask
    known: tuple[HybridSupport, Callable[..., SequentialLinker]] | None = vars(model).get("_comb_linker")
    if known is None or known[0] is not support:
        with counted_passes():  # tokens that it is tried on are no prompt's
            known = vars(model)["_comb_linker"] = support, _tried(model, support)
    return known[1]


def _tried(model: Any, support: HybridSupport) -> Callable[..., SequentialLinker]:
    layers: list[Any] = new_cache(model).layers
    kinds = {type(layers[number]) for number in support.attention if number < len(layers)}
    # a layer with states and keys has no place for scattered ones, nor has a cache of the model's own
    if support.step is not None or kinds != {DynamicLayer} or set(support.attention) & set(support.linear):
        return SequentialLinker
    if hasattr(new_cache(model), "linear_cache") or not takes_positions(model):
        return SequentialLinker
    ids = made_up_tokens(model, _FRESH[-1][1] + sum(_SEGMENTS))
    fresh = [ids[first:last].tolist() for first, last in _FRESH]
    head = max(_SEAM, support.kernel - 1)
    segments = [segment.tolist() for segment in ids[_FRESH[-1][1] :].split(_SEGMENTS)]
    picaches = [compile_segment(model, support, "", segment, head=head, tail=_SEAM) for segment in segments]
    plain = _tensors(link_segments(model, support, picaches, fresh).cache, support)
    for linker in _FORMS:
        try:
            packed = _tensors(link_segments(model, support, picaches, fresh, linker_type=linker).cache, support)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError):
            continue  # it doesn't take this mask, or its layers aren't called in this way
        pairs = zip(packed, plain, strict=False)
        if len(packed) == len(plain) and all(distance(left, right) <= tolerance_of(model) for left, right in pairs):
            return linker
    return SequentialLinker


def _tensors(cache: Any, support: HybridSupport) -> list[Tensor]:
    layers = attention_layers(cache).values()
    states = [state for number in support.linear for state in read_state(cache, number) if state is not None]
    return [*states, *(tensor for layer in layers for tensor in (layer.keys, layer.values))]
