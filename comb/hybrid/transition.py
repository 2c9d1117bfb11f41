"""What a transition is: the linear part of what a run of tokens does to a linear layer's state.

Shapes: H heads, K key channels, V value channels. A state is [H, K, V] unless a family says otherwise; which axis of a
model's own state holds the keys only matters to the families that treat key channels differently.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Self, TypeVar

import torch
from torch import Tensor

from comb.registry import Registry

Family = TypeVar("Family", bound="Transition")

Rerotate = Callable[[Tensor], Tensor]
"""Re-rotates the key channels (the last axis) of [..., K] by one rotation R."""


class TransitionError(ValueError):
    """A transition that can't be used: not finite, amplifying, or re-rotated where that isn't exact."""


@dataclass(frozen=True, eq=False)
class Transition(ABC):
    """T of a run of tokens. Transitions of one family and shape form a monoid under `after`.

    Args:
        tensor: the smallest form of T that the family has (HYPIC table 3).
    """

    tensor: Tensor
    family: ClassVar[str]

    @abstractmethod
    def apply(self, state: Tensor) -> Tensor:
        """T S for a state as the family lays it out."""

    @abstractmethod
    def after(self, earlier: Self) -> Self:
        """T of `earlier`'s tokens followed by these: self.T times earlier.T, later tokens on the left."""

    def rerotated(self, rerotate: Rerotate) -> Self:
        """T of the same tokens at other positions, where keys are rotated inside of the layer.

        Raises:
            TransitionError: when T doesn't commute with a rotation in this family, as in most.
        """
        raise TransitionError(
            f"rotary positions inside a linear layer with a {self.family} decay: the state of a segment can't be moved "
            "to another position"
        )

    def check(self) -> None:
        """Raises TransitionError when this can't be the transition of a layer: not finite, or it amplifies."""
        self.judge(*self.measured().tolist())

    def measured(self) -> Tensor:
        """What `judge` looks at, [2] float64: 1 if all is finite, and the family's own measure of how T amplifies.

        Still on the device, so that those of many layers can be waited for at once.
        """
        finite = torch.isfinite(self.tensor).all()
        return torch.stack([finite.double(), self.amplification().double()])

    def amplification(self) -> Tensor:
        """How much T amplifies a state at most, in the family's own measure. []"""
        return torch.zeros((), device=self.tensor.device)

    def judge(self, finite: float, amplification: float) -> None:
        """Raises TransitionError if what was `measured` isn't that of a layer's transition."""
        if not finite:
            raise TransitionError(f"a {self.family} transition holds NaN or infinity: compile the document again")

    def stored(self, dtype: torch.dtype) -> Self:
        """The same transition for storage in `dtype`; families that keep logarithms keep them as they are."""
        return self


class LogDecay(Transition):
    """Families whose T is an elementwise decay, kept as its logarithm: sums instead of products never underflow."""

    def after(self, earlier: Self) -> Self:
        return type(self)(self.tensor + earlier.tensor)

    def amplification(self) -> Tensor:
        return self.tensor.amax()

    def judge(self, finite: float, amplification: float) -> None:
        super().judge(finite, amplification)
        if amplification > _DECAY_SLACK:
            raise TransitionError(
                f"a {self.family} transition multiplies the state by {amplification:.3g} in log space, "
                "expected at most 0: compile the document again"
            )

    def decay(self, state: Tensor) -> Tensor:
        """The factors, in the dtype and on the device of `state`."""
        return self.tensor.to(state.device, state.dtype).exp()


# a probe reads a decay off the layer itself and may see 1 + rounding
_DECAY_SLACK = 1e-3

TRANSITIONS: Registry[type[Transition]] = Registry("linear-attention family", "comb.hybrid.families")


def register_family(cls: type[Family]) -> type[Family]:
    """Decorator: makes a family known under its own name, by which a PICache stores its transitions."""
    TRANSITIONS.register(cls.family)(cls)
    return cls
