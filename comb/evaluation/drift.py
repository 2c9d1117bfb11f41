"""How far the states of a linked prompt are from those of full recompute, layer by layer (HYPIC table 4's measure)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from comb.backbones.exclusive import exclusive
from comb.hybrid.caches import new_cache, read_state, run
from comb.hybrid.support import find_hybrid_support
from comb.methods.base import DecodeState


@dataclass(frozen=True)
class Drift:
    """One linear layer's state behind the prompt: relative error in the Frobenius norm, and the angle in degrees."""

    layer: int
    error: float
    degrees: float


@torch.no_grad()
def state_drift(method: Any, documents: Sequence[Sequence[int]], query: Sequence[int]) -> list[Drift]:
    """Drift of `method` (hypic, addition) on one prompt, by layer from the first on; convolutions have no state."""
    return drift_of(method.backbone, method.link(method.compile(documents), query))


@torch.no_grad()
def exact_states(model: Any, token_ids: Sequence[int]) -> dict[int, Tensor]:
    """States behind these tokens by full recompute, by layer."""
    with exclusive(model):
        cache = new_cache(model)
        run(model, list(token_ids), cache, 0)
        return _states(model, cache)


@torch.no_grad()
def drift_of(
    model: Any, linked: DecodeState, exact: Callable[[Any, tuple[int, ...]], Mapping[int, Tensor]] = exact_states
) -> list[Drift]:
    """Drift of one prompt that is linked already, behind the tokens that its cache covers (hypic: all but the last).

    Args:
        exact: gives what it is compared with; who compares several methods on one prompt keeps it.

    Raises:
        ValueError: where nothing can be compared: no state behind the prompt, or no linear layer that keeps one.
    """
    covered = 0 if linked.past_key_values is None else int(linked.past_key_values.get_seq_length())
    if not covered:
        raise ValueError("this method leaves the whole prompt to the model: there is no state to compare")
    with exclusive(model):
        ours = _states(model, linked.past_key_values)
    theirs = exact(model, tuple(linked.input_ids[0, :covered].tolist()))
    found = []
    for number in sorted(ours.keys() & theirs.keys()):
        left, right = ours[number].double().flatten(), theirs[number].double().flatten()
        cosine = float(left @ right / (left.norm() * right.norm()).clamp_min(1e-300))
        angle = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
        found.append(Drift(number, float((left - right).norm() / right.norm().clamp_min(1e-300)), angle))
    if not found:
        raise ValueError("none of this model's layers keeps a state: convolutions alone have no drift")
    return found


def _states(model: Any, cache: Any) -> dict[int, Tensor]:
    states = ((number, read_state(cache, number)[1]) for number in find_hybrid_support(model).linear)
    return {number: state for number, state in states if state is not None}
