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
from torch import Tensor, nn

from comb.hybrid.caches import new_cache, read_state, states_of, write_state
from comb.hybrid.families.dense import DenseTransition
from comb.hybrid.families.diagonal import DiagonalTransition
from comb.hybrid.families.elementwise import ElementwiseTransition
from comb.hybrid.families.scalar import ScalarTransition
from comb.hybrid.transition import Transition, TransitionError

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

    def in_float32(self) -> LayerRun:
        """The same call of a copy of the layer in float32."""

        def change(value: Any) -> Any:
            if isinstance(value, Tensor) and value.is_floating_point():
                return value.float()
            return tuple(map(change, value)) if isinstance(value, tuple) else value

        kwargs = {name: change(value) for name, value in self.kwargs.items()}
        return LayerRun(copy.deepcopy(self.module).float(), self.number, change(self.args), kwargs)

    @property
    def tokens(self) -> int:
        """Tokens of the call."""
        tensors = [*self.args, *(self.kwargs[name] for name in ("hidden_states",) if name in self.kwargs)]
        return int(next(value.shape[1] for value in tensors if isinstance(value, Tensor)))


@contextmanager
def watch_layers(model: nn.Module, cache: Any) -> Iterator[dict[int, LayerRun]]:
    """The linear layers of one forward pass over `cache`, by number of their cache layer.

    Nothing but the cache says which module is one: the innermost module with a layer number under which a state has
    appeared in an empty cache.
    """
    found: dict[int, LayerRun] = {}

    def after(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        number = module.layer_idx
        if isinstance(number, int) and number not in found and any(s is not None for s in read_state(cache, number)):
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
    """Runs one linear layer over tokens [start, end) of a recorded call, from states of our choice.

    Args:
        seen: the cache of the recorded call.
        step: tokens per call behind a state; None for all at once.
    """

    def __init__(self, model: Any, call: LayerRun, seen: Any, start: int, *, step: int | None = None) -> None:
        _, state = read_state(seen, call.number)
        # a state of 16 bits (MiniMax) is too coarse to tell one family from another
        self.call = call.in_float32() if state is not None and state.itemsize < 4 else call
        self.seen, self.start, self.step = seen, start, step
        self._before = new_cache(model)
        if start:
            self.call.again(self._before, seen, 0, start)

    def ends(self, states: Tensor) -> Tensor:
        """States [rows, ...] after the tokens, for states [rows, ...] before them."""
        cache = copy.deepcopy(self._before)
        columns, _ = read_state(cache, self.call.number)
        if columns is None:
            seen_columns, _ = read_state(self.seen, self.call.number)
            columns = None if seen_columns is None else torch.zeros_like(seen_columns)
        rows = len(states)
        fresh = new_cache_like(cache)
        write_state(fresh, self.call.number, _rows(columns, rows), states.clone())
        for layer in fresh.layers:  # OLMo-hybrid asks the last linear layer, whichever layer is running
            if hasattr(layer, "has_previous_state"):
                layer.has_previous_state[0] = True
        size = self.step or self.call.tokens
        for first in range(self.start, self.call.tokens, size):
            self.call.again(fresh, self.seen, first, min(first + size, self.call.tokens), rows)
        _, after = states_of(fresh, self.call.number)
        assert after is not None
        return after.float()

    def state(self) -> Tensor:
        """The recurrent state's template: zeros of its shape."""
        _, state = read_state(self.seen, self.call.number)
        assert state is not None
        return torch.zeros_like(state, dtype=torch.float32)

    def response(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """T applied to each of `states` [rows, ...], and S: the end from an empty state."""
        ends = self.ends(torch.cat([self.state()[None], states]))
        return ends[1:] - ends[0], ends[0]

    def classify(self) -> tuple[str, int] | None:
        """The layer's family and the axis (-2 or -1) of its state that T acts on.

        None where every head forgets all it had over the probe's tokens: a decay that depends on the tokens may leave
        more of it over others, and nothing says in what form.

        Raises:
            TransitionError: when the layer's states are not affine in the state before in any known form.
        """
        zeros = self.state()
        random = torch.randn(zeros.shape, generator=torch.Generator().manual_seed(0)).to(zeros)
        (seen,), _ = self.response(random[None])
        kept = seen.flatten(1).norm(dim=1)
        telling = kept > _REMEMBERS * random.flatten(1).norm(dim=1)
        if not bool(telling.any()):
            return None
        for family, axis in (("scalar", -2), ("diagonal", -2), ("diagonal", -1), ("elementwise", -2),
                             ("dense", -2), ("dense", -1)):  # fmt: skip
            if zeros.ndim != 3 and family != "elementwise":
                continue
            transition, _ = self.transition(family, axis)
            off = (seen - apply_on(transition, random, axis)).flatten(1).norm(dim=1)
            if bool((off <= _FITS * kept)[telling].all()):
                return family, axis
        raise TransitionError(
            "the state of a linear layer doesn't follow from the state before it by a scalar, diagonal, elementwise "
            f"or dense transition ({type(self.call.module).__name__})"
        )

    def transition(self, family: str, axis: int = -2) -> tuple[Transition, Tensor]:
        """T as a transition of `family`, and S."""
        zeros = self.state()
        if family == "dense":
            blocks = list(_identity_blocks(zeros, axis))
            responses, end = self.response(torch.stack([block for block, _ in blocks]))
            columns = [_columns(r, axis)[..., :width] for r, (_, width) in zip(responses, blocks, strict=True)]
            return DenseTransition(torch.cat(columns, dim=-1)), end
        (ones,), end = self.response(torch.ones_like(zeros)[None])
        logs = ones.clamp_min(0).log().clamp_min(_LEAST_LOG)
        if family == "scalar":
            return ScalarTransition(logs.mean(dim=(-2, -1))), end
        if family == "diagonal":
            return DiagonalTransition(_columns(logs, axis).mean(dim=-1)), end
        return ElementwiseTransition(logs), end


def apply_on(transition: Transition, state: Tensor, axis: int) -> Tensor:
    """T S for a state whose keys lie on `axis`."""
    if axis == -2:
        return transition.apply(state)
    return transition.apply(state.transpose(-1, -2)).transpose(-1, -2)


def new_cache_like(cache: Any) -> Any:
    """An empty cache of the same kind and layers."""
    fresh = copy.copy(cache)
    fresh.layers = [type(layer)() for layer in cache.layers]
    if hasattr(cache, "linear_cache"):
        fresh.linear_cache = []
    return fresh


def _columns(state: Tensor, axis: int) -> Tensor:
    return state if axis == -2 else state.transpose(-1, -2)


def _identity_blocks(zeros: Tensor, axis: int) -> Iterator[tuple[Tensor, int]]:
    """States that together hold the columns of the identity over the keys, and how many columns each holds."""
    keys, width = _columns(zeros, axis).shape[-2:]
    eye = torch.eye(keys, device=zeros.device)
    for first in range(0, keys, width):
        columns = eye[:, first : first + width]
        block = zeros.new_zeros(zeros.shape[0], keys, width)
        block[..., : columns.shape[1]] = columns
        yield _columns(block, axis).contiguous(), columns.shape[1]


def _rows(columns: Tensor | None, rows: int) -> Tensor | None:
    return None if columns is None else columns[None].expand(rows, *columns.shape).contiguous()
