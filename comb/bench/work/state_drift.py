"""How far a hybrid's states are from those of full recompute: `comb bench drift`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from comb.backbones.discovery import decoder_layers, layer_input
from comb.backbones.identity import backbone_of, exclusive
from comb.evaluation.table import Row
from comb.hybrid.caches import new_cache, read_state, run
from comb.hybrid.support import find_hybrid_support
from comb.methods.base import DecodeState


@contextmanager
def without_full_layers(model: Any) -> Iterator[None]:
    """Inside, what stands in front of a layer of full attention alone also comes out of it (HYPIC sec. 6.3).

    Raises:
        ValueError: for a model whose every layer keeps a state.
    """
    backbone = backbone_of(model)
    layers, linear = decoder_layers(backbone), find_hybrid_support(backbone).linear
    full = [layer for number, layer in enumerate(layers) if number not in linear]
    if not full:
        raise ValueError("every layer of this model keeps a state: there is no full layer to leave out")

    def skip(layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        before = layer_input(args, kwargs)
        return (before, *output[1:]) if isinstance(output, tuple) else before

    with ExitStack() as stack:
        for layer in full:
            stack.callback(layer.register_forward_hook(skip, with_kwargs=True).remove)
        yield


@torch.no_grad()
def exact_states(model: Any, token_ids: Sequence[int]) -> dict[int, Tensor]:
    """States behind these tokens by full recompute, by layer."""
    with exclusive(model):
        past = new_cache(model)
        run(model, list(token_ids), past, 0)
        return _states(model, past)


@torch.no_grad()
def drift_of(
    model: Any, state: DecodeState, exact: Callable[[Any, tuple[int, ...]], Mapping[int, Tensor]] = exact_states
) -> list[Row]:
    """Drift of a linked prompt behind the tokens that its cache covers (hypic: all but the last).

    Returns:
        By linear layer that keeps a state (convolutions have none), from the first on: ``error``, the relative distance
        from ``exact``'s in the Frobenius norm, and the angle between both in ``degrees``.

    Raises:
        ValueError: where nothing can be compared: no state behind the prompt, or no linear layer that keeps one.
    """
    covered = 0 if state.past_key_values is None else int(state.past_key_values.get_seq_length())
    if not covered:
        raise ValueError("this method leaves the whole prompt to the model: there is no state to compare")
    with exclusive(model):
        ours = _states(model, state.past_key_values)
    theirs, found = exact(model, tuple(state.input_ids[0, :covered].tolist())), []
    for number in sorted(ours.keys() & theirs.keys()):
        left, right = ours[number].double().flatten(), theirs[number].double().flatten()
        cosine = float(left @ right / (left.norm() * right.norm()).clamp_min(1e-300))
        error = float((left - right).norm() / right.norm().clamp_min(1e-300))
        found.append({"layer": number, "error": error, "degrees": math.degrees(math.acos(max(-1, min(1, cosine))))})
    if not found:
        raise ValueError("none of this model's layers keeps a state: convolutions alone have no drift")
    return found


def _states(model: Any, past: Any) -> dict[int, Tensor]:
    states = ((number, read_state(past, number)[1]) for number in find_hybrid_support(model).linear)
    return {number: state for number, state in states if state is not None}
