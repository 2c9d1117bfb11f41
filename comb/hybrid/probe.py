"""The black-box probe: a linear layer's transition read off the layer itself, with no knowledge of what it computes.

A layer's state after a run of tokens is affine in the state before, row by row of a batch. So the layer module runs on
the same hidden states from an empty state, a random one, one of ones, and blocks of the identity: the differences to
the empty row are T applied to each. It is the oracle for every faster way, and the fallback for unknown layers.

Shapes: states [rows, H, K, V] (keys on axis -2 or -1), or [rows, channels, state] where T is elementwise.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from comb.backbones.forward import empty_cache_of
from comb.hybrid.caches import read_state, states_of, write_state
from comb.hybrid.transition import (
    DenseTransition,
    DiagonalTransition,
    ElementwiseTransition,
    ScalarTransition,
    Transition,
)
from comb.linking.positions import UnmovableError

# the smallest log decay that a 32-bit state still shows
_LEAST_LOG = math.log(torch.finfo(torch.float32).tiny)
# a head that keeps less of a state than this over the probe's tokens doesn't tell one family from another
_REMEMBERS = 1e-2
# share of what a head keeps that a family may leave unexplained
_FITS = 1e-2


@dataclass
class LayerRun:
    """How a linear layer was called in a forward pass over one row: enough to call it again."""

    module: nn.Module
    number: int
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)

    def again(self, cache: Any, seen: Any, first: int, last: int, rows: int = 1) -> None:
        """Runs the layer on tokens [first, last) in `rows` equal rows, with `cache` in the place of `seen`."""

        def change(value: Any) -> Any:
            if value is seen:
                return cache
            if isinstance(value, Tensor) and value.ndim == 3 and value.shape[1] == self.tokens:
                return value[:, first:last].expand(rows * len(value), -1, -1)
            if isinstance(value, tuple):
                return tuple(change(item) for item in value)
            return value

        self.module(*map(change, self.args), **{name: change(value) for name, value in self.kwargs.items()})

    @property
    def tokens(self) -> int:
        """Tokens of the call."""
        tensors = (*self.args, self.kwargs.get("hidden_states"))
        return int(next(value.shape[1] for value in tensors if isinstance(value, Tensor)))


@contextmanager
def watch_layers(model: nn.Module, cache: Any, modules: Any = None) -> Iterator[dict[int, LayerRun]]:
    """The linear layers of one forward pass over `cache`, by number of their cache layer.

    Unless they are known (`modules`, by number), nothing but the cache says which module is one: the innermost module
    with a layer number under which a state has appeared in an empty cache.
    """
    found: dict[int, LayerRun] = {}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        number = module.layer_idx
        if not isinstance(number, int) or number in found:
            return
        if modules.get(number) is module if modules else any(s is not None for s in read_state(cache, number)):
            found[number] = LayerRun(module, number, args, dict(kwargs))

    handles = [
        module.register_forward_hook(after, with_kwargs=True)
        for module in model.modules()
        if hasattr(module, "layer_idx")
    ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


class TransitionProbe:
    """Runs one linear layer over tokens [start, end) of a recorded call, from states of our choice."""

    def __init__(self, model: Any, call: LayerRun, seen: Any, start: int, *, step: int | None = None) -> None:
        _, state = read_state(seen, call.number)
        assert state is not None
        self.call, self.seen, self.start, self.step = call, seen, start, step
        self.zeros = torch.zeros_like(state, dtype=torch.float32)
        self._before = empty_cache_of(model)
        if start:
            self.call.again(self._before, seen, 0, start)

    def response(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """T applied to each of `states` [rows, ...], and S: the end from an empty state."""
        states = torch.cat([self.zeros[None], states])
        fresh = copy.deepcopy(self._before)
        columns, _ = read_state(fresh, self.call.number)
        if columns is None:
            columns, _ = read_state(self.seen, self.call.number)
            columns = None if columns is None else torch.zeros_like(columns)
        if columns is not None:
            columns = columns[None].expand(len(states), *columns.shape).contiguous()
        fresh.layers = [type(layer)() for layer in fresh.layers]
        write_state(fresh, self.call.number, columns, states.clone())
        for layer in fresh.layers:  # until transformers 5.21 OLMo-hybrid asks the last linear layer, whichever runs
            if hasattr(layer, "has_previous_state"):
                layer.has_previous_state[0] = True
        size = self.step or self.call.tokens
        for first in range(self.start, self.call.tokens, size):
            self.call.again(fresh, self.seen, first, min(first + size, self.call.tokens), len(states))
        _, after = states_of(fresh, self.call.number)
        assert after is not None
        ends = after.float()
        return ends[1:] - ends[0], ends[0]

    def agrees(self, transition: Transition, axis: int, tolerance: float) -> bool:
        """Whether `transition` is what the layer does to a random state."""
        random = torch.randn(self.zeros.shape, generator=torch.Generator().manual_seed(1)).to(self.zeros)
        (seen,), _ = self.response(random[None])
        # relative to what went in: a layer that forgets everything leaves nothing but rounding to compare
        return float((seen - transition.apply_on(random, axis)).norm() / random.norm()) <= tolerance

    def classify(self) -> tuple[str, int] | None:
        """The layer's family and the axis (-2 or -1) of its state that T acts on.

        None where every head forgets all it had over the probe's tokens: a decay that depends on the tokens may leave
        more of it over others, and nothing says in what form.

        Raises:
            UnmovableError: when the layer's states are not affine in the state before in any known form.
        """
        random = torch.randn(self.zeros.shape, generator=torch.Generator().manual_seed(0)).to(self.zeros)
        (seen,), _ = self.response(random[None])
        kept = seen.flatten(1).norm(dim=1)
        telling = kept > _REMEMBERS * random.flatten(1).norm(dim=1)
        if not bool(telling.any()):
            return None
        for family, axis in (("scalar", -2), ("diagonal", -2), ("diagonal", -1), ("elementwise", -2),
                             ("dense", -2), ("dense", -1)):  # fmt: skip
            if random.ndim != 3 and family != "elementwise":
                continue
            transition, _ = self.transition(family, axis)
            off = (seen - transition.apply_on(random, axis)).flatten(1).norm(dim=1)
            if bool((off <= _FITS * kept)[telling].all()):
                return family, axis
        raise UnmovableError(
            "the state of a linear layer doesn't follow from the state before it by a scalar, diagonal, elementwise "
            f"or dense transition ({type(self.call.module).__name__})"
        )

    def transition(self, family: str, axis: int = -2) -> tuple[Transition, Tensor]:
        """T as a transition of `family`, and S."""

        def keys_first(state: Tensor) -> Tensor:
            return state if axis == -2 else state.transpose(-1, -2)

        if family == "dense":
            # states that together hold the columns of the identity over the keys, as many each as there are values
            heads, keys, width = keys_first(self.zeros).shape
            columns = torch.eye(keys, device=self.zeros.device).split(width, dim=1)
            blocks = [F.pad(part, (0, width - part.shape[1])).expand(heads, -1, -1) for part in columns]
            responses, end = self.response(torch.stack([keys_first(block) for block in blocks]))
            return DenseTransition(torch.cat([*keys_first(responses)], dim=-1)[..., :keys].contiguous()), end
        (ones,), end = self.response(torch.ones_like(self.zeros)[None])
        logs = ones.clamp_min(0).log().clamp_min(_LEAST_LOG)
        if family == "scalar":
            return ScalarTransition(logs.mean(dim=(-2, -1))), end
        if family == "diagonal":
            return DiagonalTransition(keys_first(logs).mean(dim=-1)), end
        return ElementwiseTransition(logs), end
