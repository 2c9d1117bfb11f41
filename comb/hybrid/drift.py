"""How far the states of a linked prompt are from those of full recompute, layer by layer (HYPIC table 4's measure)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from comb.hybrid.caches import new_cache, read_state, run
from comb.hybrid.support import find_hybrid_support
from comb.methods.base import exclusive


@dataclass(frozen=True)
class Drift:
    """One linear layer's state behind the prompt: relative error in the Frobenius norm, and the angle in degrees."""

    layer: int
    error: float
    degrees: float


@torch.no_grad()
def state_drift(method: Any, documents: Sequence[Sequence[int]], query: Sequence[int]) -> list[Drift]:
    """Drift of `method` (hypic, addition) on one prompt, by layer from the first on; convolutions have no state.

    Raises:
        ValueError: for a query of fewer than two tokens, whose states are left to ``generate``.
    """
    if len(query) < 2:
        raise ValueError(f"state_drift expects a query of at least two tokens, got {len(query)}")
    linked = method.link(method.compile(documents), query)
    model = method.backbone
    with exclusive(model):
        support = find_hybrid_support(model)
        exact = new_cache(model)
        run(model, linked.input_ids[0, :-1].tolist(), exact, 0)
    found = []
    for number in sorted(support.linear):
        ours, theirs = (read_state(cache, number)[1] for cache in (linked.past_key_values, exact))
        if ours is None or theirs is None:
            continue
        left, right = ours.double().flatten(), theirs.double().flatten()
        cosine = float(left @ right / (left.norm() * right.norm()).clamp_min(1e-300))
        angle = math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
        found.append(Drift(number, float((left - right).norm() / right.norm().clamp_min(1e-300)), angle))
    return found
