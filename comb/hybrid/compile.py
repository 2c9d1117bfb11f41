"""Compiles one segment of a hybrid backbone: a pure function of model, token ids and seam widths.

The segment runs alone from position zero, in an empty cache. Values computed in the context of a request are never
kept: they would depend on who asked first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from comb.hybrid import convolution
from comb.hybrid.caches import attention_layers, new_cache, read_state, run
from comb.hybrid.picache import HybridPICache, SegmentState
from comb.hybrid.support import HybridSupport, LinearLayer, Recording, record, transition_of
from comb.hybrid.transition import TransitionError


@torch.no_grad()
def compile_segment(
    model: Any,
    support: HybridSupport,
    fingerprint: str,
    token_ids: Sequence[int],
    *,
    head: int,
    tail: int,
    leading: bool = False,
    dtype: torch.dtype = torch.float32,
) -> HybridPICache:
    """The PICache of one segment. The caller holds the model's lock (`exclusive`).

    Args:
        head, tail: tokens at either end that are recomputed whenever the segment is linked, and so are not kept. A
            segment that they cover is kept as token ids only.
        leading: made for the very start of a prompt, where nothing is recomputed: all of it is kept.
        dtype: of the states and dense transitions; logarithms of decays stay in float32.

    Raises:
        ValueError: no tokens, or the backbone computes NaN or infinity.
    """
    ids = list(token_ids)
    if not ids:
        raise ValueError("an empty segment can't be compiled: leave empty documents out")
    held = torch.tensor(ids, device=model.get_input_embeddings().weight.device)
    start, end = (0, len(ids)) if leading else (head, len(ids) - tail)
    if start >= end:
        return HybridPICache(fingerprint, held, len(ids), len(ids))
    recording = record(model, ids[:end], start)  # causal: what stands behind the interior can't change it
    head_states = functools.cache(functools.partial(_head_states, model, recording))
    linear = {
        number: _interior(model, support, recording, head_states, number, layer, dtype)
        for number, layer in support.linear.items()
    }
    attention = {
        number: (layer.keys[0, :, start:end].clone(), layer.values[0, :, start:end].clone())
        for number, layer in attention_layers(recording.cache).items()
    }
    picache = HybridPICache(fingerprint, held, start, end, linear, attention, leading)
    broken = [
        name
        for name, tensor in picache.tensors().items()
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all())
    ]
    if broken:
        raise ValueError(
            f"the backbone gave NaN or infinite {', '.join(broken[:4])} for a segment of {len(ids)} tokens: its "
            f"weights are damaged, or its values overflow in {model.dtype} or {dtype}"
        )
    return picache


def _head_states(model: Any, recording: Recording) -> Any:
    """A cache behind the tokens in front of the interior."""
    cache = new_cache(model)
    run(model, recording.token_ids[: recording.start], cache, 0)
    return cache


def _interior(
    model: Any,
    support: HybridSupport,
    recording: Recording,
    head_states: Callable[[], Any],
    number: int,
    layer: LinearLayer,
    dtype: torch.dtype,
) -> SegmentState:
    columns, last = read_state(recording.cache, number)
    kept = None if columns is None else convolution.tail(columns, len(recording.token_ids) - recording.start)
    if last is None:
        return SegmentState(columns=kept)
    transition, state = transition_of(model, recording, number, layer, support.step)
    if state is None:
        state = last.float()
        if recording.start:
            _, earlier = read_state(head_states(), number)
            assert earlier is not None
            state = state - transition.apply(earlier.float())
    try:
        transition.check()
    except TransitionError as error:
        raise ValueError(f"layer {number}: {error}") from error
    return SegmentState(kept, state.to(dtype), transition.stored(dtype))
