"""Transitions of every family against the plain recurrences, in float64, each with a control that must fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from comb.hybrid.caches import last_columns, shift_in
from comb.hybrid.picache import SegmentState
from comb.hybrid.transition import (
    DiagonalTransition,
    ElementwiseTransition,
    ScalarTransition,
    Transition,
)
from tests.helpers.recurrences import dense_of, elementwise_recurrence, recurrence

HEADS, KEYS, VALUES = 3, 12, 20
LENGTHS = (70, 1, 65, 30)


@dataclass
class Run:
    """A random run of tokens: what it does to a state, token by token, and its transition."""

    recurrence: Callable[[Tensor], Tensor]
    transition: Transition

    def part(self, state: Tensor | None = None) -> SegmentState:
        end = self.recurrence(torch.zeros(SHAPES[self.transition.family], dtype=torch.float64))
        return SegmentState(state=end, transition=self.transition)


SHAPES = dict.fromkeys(("scalar", "diagonal", "dense"), (HEADS, KEYS, VALUES)) | {"elementwise": (VALUES, KEYS)}


def make(family: str, tokens: int, generator: torch.Generator) -> Run:
    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    def slow(*shape: int) -> Tensor:
        return -0.02 * torch.rand(*shape, generator=generator, dtype=torch.float64)

    keys, values = random(tokens, HEADS, KEYS), random(tokens, HEADS, VALUES)
    if family == "scalar":
        gates = slow(tokens, HEADS)
        return Run(partial(recurrence, gates, keys, values), ScalarTransition(gates.sum(dim=0)))
    if family == "diagonal":
        gates = slow(tokens, HEADS, KEYS)
        return Run(partial(recurrence, gates, keys, values), DiagonalTransition(gates.sum(dim=0)))
    if family == "elementwise":
        steps, rates = -slow(tokens, VALUES), -1 + slow(VALUES, KEYS)
        run = partial(elementwise_recurrence, steps, rates, keys[:, 0], values[:, 0])
        return Run(run, ElementwiseTransition(steps.sum(dim=0)[:, None] * rates))
    keys = torch.nn.functional.normalize(keys, dim=-1)
    betas = torch.rand(tokens, HEADS, generator=generator, dtype=torch.float64) * (2 if family == "negative" else 0.3)
    gates = slow(tokens, HEADS, KEYS) if family == "kda" else slow(tokens, HEADS)
    if family == "deltanet":
        gates = torch.zeros_like(gates)
    return Run(partial(recurrence, gates, keys, values, betas=betas), dense_of(gates, betas, keys))


FAMILIES = ("scalar", "diagonal", "elementwise", "deltanet", "gdn", "negative", "kda")


def relative(left: Tensor, right: Tensor) -> float:
    return float((left - right).norm() / right.norm())


@pytest.mark.parametrize("family", FAMILIES)
def test_composed_states_are_the_sequential_ones(family: str) -> None:
    generator = torch.Generator().manual_seed(0)
    runs = [make(family, tokens, generator) for tokens in LENGTHS]
    sequential = torch.zeros(SHAPES[runs[0].transition.family], dtype=torch.float64)
    composed, added = sequential, sequential
    for run in runs:
        sequential = run.recurrence(sequential)
        part = run.part()
        assert part.state is not None
        composed = run.transition.apply(composed) + part.state
        added = added + part.state
    assert relative(composed, sequential) < 1e-13
    # the control: states that are only added up
    assert relative(added, sequential) > 0.1


def compose(later: Any, earlier: Any) -> Any:
    """Both segments as one: (T2 T1, T2 S1 + S2)."""
    state = later.transition.apply(earlier.state) + later.state
    return SegmentState(state=state, transition=later.transition.after(earlier.transition))


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_are_a_monoid(family: str) -> None:
    generator = torch.Generator().manual_seed(1)
    one, two, three = (make(family, tokens, generator).part() for tokens in (9, 17, 5))
    left, right = compose(compose(three, two), one), compose(three, compose(two, one))
    wrong = compose(compose(two, three), one)
    assert relative(left.state, right.state) < 1e-13
    assert relative(left.state, wrong.state) >= 1e-13
    assert relative(left.transition.tensor, right.transition.tensor) < 1e-13


def test_logarithms_do_not_underflow() -> None:
    """A hundred segments that each decay by e^-40 and their inverse shares: the sum is exact, a product would be 0."""
    short = ScalarTransition(torch.full((2,), -40.0))
    long = short
    for _ in range(99):
        long = short.after(long)
    assert long.tensor.tolist() == [-4000.0, -4000.0]
    assert float(torch.exp(torch.tensor(-40.0)) ** 100) == 0.0
    assert long.stored(torch.float16).tensor.dtype == torch.float32


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
def test_columns_of_short_segments_move_up(tokens: int) -> None:
    kernel = 4
    earlier, later = torch.randn(5, 7), torch.randn(5, tokens)
    whole = torch.cat([earlier, later], dim=1)[:, -kernel:]
    alone = torch.cat([torch.zeros(5, kernel), later], dim=1)[:, -kernel:]
    tail = last_columns(alone, tokens)
    assert tail.shape[1] == min(tokens, kernel)
    assert torch.equal(shift_in(earlier[:, -kernel:], tail, kernel), whole)
    assert torch.equal(shift_in(None, tail, kernel), alone)
    if tokens < kernel:  # the control: the tail's own zeros in the place of the left neighbour's columns
        assert not torch.equal(alone, whole)
