"""How a hybrid backbone is compiled and linked, found on the model in hand with a few made-up tokens.

Nothing here knows a model class. Which cache layers hold states, keys or both, how each state's transition is read
(from its scan or by the black-box probe), whether a multi-token pass may start from a state,
and where rotary positions are, is tried out; what doesn't hold is refused with the reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, LinearAttentionAndFullAttentionLayer, LinearAttentionLayer

from comb.backbones.forward import StateCache, empty_cache_of, keeps_nothing
from comb.backbones.identity import exclusive, identity_of
from comb.backbones.rotary import RotaryEmbedding, why_length_dependent
from comb.hybrid.caches import attention_layers, new_cache, read_state, run
from comb.hybrid.probe import LayerRun, TransitionProbe, watch_layers
from comb.hybrid.scans import SCAN_READERS, listen
from comb.hybrid.transition import Transition
from comb.linking.positions import (
    PositionMap,
    Rotation,
    UnmovableError,
    check_shifts,
    explain_states,
    find_positions,
    numbered,
    states_by_position,
)
from comb.linking.support import check_decoder_alone, distance, made_up_tokens, tolerance_of

_TOKENS, _HEAD = 11, 5
# of cache layers whose states and keys can be read and written
_KINDS = (DynamicLayer, LinearAttentionLayer, LinearAttentionAndFullAttentionLayer)

Source = Literal["scan", "probe"]


@dataclass(frozen=True)
class LinearLayer:
    """One linear layer: `family` of its transition ("convolution": it has no recurrent state) and how it is read."""

    family: str
    source: Source | None
    axis: int = -2  # or -1: where the state has its key channels
    kernel: int = 0  # raw columns kept in front of its convolution, 0 without one
    rotation: Rotation | None = None  # of the state's key channels, where the layer rotates keys by their position
    dtype: torch.dtype = torch.float32  # of the state in the model's own cache


@dataclass(frozen=True)
class HybridSupport:
    """How a model is linked; by number of the cache layer."""

    positions: PositionMap  # how cached keys and values are moved
    linear: dict[int, LinearLayer]
    attention: tuple[int, ...]  # layers with keys and values; a layer may have both
    step: int | None  # tokens per pass from a state: None for any number, 1 where the scan can't start from one
    modules: dict[int, Any]  # the linear layers' own

    @property
    def kernel(self) -> int:
        """The widest convolution's columns, 0 where there is none."""
        return max((layer.kernel for layer in self.linear.values()), default=0)

    def seams(self, w: int) -> tuple[int, int]:
        """Tokens at a segment's start and end that are computed again: `w`, and what the convolutions reach back to."""
        return max(w, self.kernel - 1), w


def find_hybrid_support(model: Any) -> HybridSupport:
    """How `model` is linked, found anew when its weights have changed.

    Raises:
        UnmovableError: when it can't be, with the reason.
    """

    def find() -> HybridSupport | str:
        try:
            with exclusive(model):
                return _try(model)
        except UnmovableError as error:
            return str(error)
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
            return f"its layers of states are read in no known way ({type(error).__name__}: {error})"

    found: HybridSupport | str = identity_of(model).fact("hybrid support", find)
    if isinstance(found, str):
        raise UnmovableError(found)
    return found


@dataclass
class Recording:
    """A forward pass over one row in an empty cache, and everything that was heard of it."""

    token_ids: list[int]
    start: int  # transitions were read of the tokens from here on
    cache: Any
    hidden: Tensor
    readings: list[tuple[Transition, Tensor | None]]  # of the scans that were called, in order
    layers: dict[int, LayerRun]

    @property
    def scans(self) -> dict[int, tuple[Transition, Tensor | None]]:
        """Readings by cache layer; empty when not every recurrent layer called a scan that is known."""
        recurrent = [number for number in sorted(self.layers) if read_state(self.cache, number)[1] is not None]
        return dict(zip(recurrent, self.readings, strict=True)) if len(recurrent) == len(self.readings) else {}


def record(
    model: Any, token_ids: list[int], start: int, *, cache: Any = None, place: int = 0, modules: Any = None
) -> Recording:
    """Runs `token_ids` from position zero in an empty cache, listening; or from `place` in one that covers what is in
    front, where the linear layers are `modules` (`HybridSupport.modules`)."""
    cache = new_cache(model) if cache is None else cache
    reading = listen(model, lambda call: SCAN_READERS.get(call.name)(call, start))
    with reading as readings, watch_layers(model, cache, modules) as layers:
        hidden = run(model, token_ids, cache, place)
    assert hidden is not None
    return Recording(token_ids, start, cache, hidden, readings, layers)


def transition_of(
    model: Any, recording: Recording, number: int, layer: LinearLayer, step: int | None
) -> tuple[Transition, Tensor | None]:
    """T of the recorded tokens from `start` on in one linear layer, and S where reading T gives it as well."""
    if layer.source == "scan":
        return recording.scans[number]
    probe = TransitionProbe(model, recording.layers[number], recording.cache, recording.start, step=step)
    return probe.transition(layer.family, layer.axis)


def _try(model: Any) -> HybridSupport:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UnmovableError("its weights are on the meta device")
    layers: list[Any] = empty_cache_of(model).layers
    odd = sorted({type(layer).__name__ for layer in layers if type(layer) not in _KINDS and not keeps_nothing(layer)})
    if any(getattr(layer, "number_of_states", 1) != 1 for layer in layers):
        odd.append("several states in one layer")
    if odd:
        raise UnmovableError(
            f"its cache has layers of kinds that can't be moved or composed: {', '.join(odd)} (sliding windows drop "
            "early tokens; indexed layers keep keys of their own)"
        )
    check_decoder_alone(model)
    whole = record(model, made_up_tokens(model, _TOKENS).tolist(), _HEAD)
    if not whole.layers:
        raise UnmovableError("no layer of it leaves a state in its cache: it isn't a hybrid")
    attention = tuple(attention_layers(whole.cache))
    if not attention and not isinstance(whole.cache, StateCache):
        raise UnmovableError("none of its layers has keys and values: transformers can't tell how long its cache is")
    if not bool(torch.isfinite(whole.hidden).all()):
        raise UnmovableError(f"the backbone computes NaN or infinite hidden states in {model.dtype}")
    # the most tokens of a pass that goes on from a state as one pass over everything would
    for step in (None, 1):
        cache = empty_cache_of(model)
        run(model, whole.token_ids[:_HEAD], cache, 0)
        hidden = run(model, whole.token_ids[_HEAD:], cache, _HEAD, step=step)
        assert hidden is not None
        if distance(hidden, whole.hidden[_HEAD:]) <= tolerance_of(model):
            break
    else:
        raise UnmovableError(
            "its forward pass doesn't continue a cache of states and keys exactly, not even token by token"
        )
    positions = find_positions(model, partial(empty_cache_of, model))
    if reason := why_length_dependent(model):
        raise UnmovableError(reason)
    numbers = sorted(whole.layers)
    stateful = [number for number in numbers if read_state(whole.cache, number)[1] is not None]
    seen = states_by_position(model, stateful)
    sources = list(positions.sources)
    linear = {number: _linear_layer(model, whole, number, seen.get(number), step, sources) for number in numbers}
    check_shifts(sources)
    modules = {number: layer.module for number, layer in whole.layers.items()}
    return HybridSupport(replace(positions, sources=tuple(sources)), linear, attention, step, modules)


def _linear_layer(
    model: Any, whole: Recording, number: int, seen: Tensor | None, step: int | None, sources: list[RotaryEmbedding]
) -> LinearLayer:
    """`seen`: the layer's part of `states_by_position`, if it has one; what turns it is put among `sources`."""
    columns, state = read_state(whole.cache, number)
    kernel = 0 if columns is None else columns.shape[-1]
    if state is None:
        return LinearLayer("convolution", None, kernel=kernel)
    probe = TransitionProbe(model, whole.layers[number], whole.cache, _HEAD, step=step)
    known, tolerance = probe.classify(), tolerance_of(model)
    source: Source = "probe"
    if number in whole.scans:
        transition, _ = whole.scans[number]
        family = transition.family
        if known is not None and known[0] == family:
            axis = known[1]
        else:  # the first axis of a state of heads, unless its size says otherwise
            last = family in ("dense", "diagonal") and state.shape[-2] != transition.tensor.shape[-1]
            axis = -1 if last else -2
        # what the scan computes holds for all tokens; what the probe sees may be less, as where little is remembered
        if probe.agrees(transition, axis, tolerance):
            known, source = (family, axis), "scan"
    if known is None:
        raise UnmovableError(
            f"layer {number} forgets its state within {len(whole.token_ids) - _HEAD} tokens, so how it carries one on "
            "can't be told from outside, and it calls no scan that is known"
        )
    family, axis = known
    turned, rotated_axis = (None, -2) if seen is None else explain_states(model, number, seen)
    rotation = numbered(turned, sources)
    if rotation is not None and family == "scalar":
        axis = rotated_axis  # a scalar decay doesn't say where the keys are
    if rotation is not None and (family not in ("scalar", "dense") or axis != rotated_axis):
        raise UnmovableError(
            f"layer {number} rotates keys by their position inside of a {family} linear layer: the state of a segment "
            "can't be moved to another position"
        )
    return LinearLayer(family, source, axis, kernel, rotation, state.dtype)
