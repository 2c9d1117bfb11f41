"""Transitions: the linear part of what a run of tokens does to a linear layer's state, by family.

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
from comb.waits import on_device

Family = TypeVar("Family", bound="Transition")

Rerotate = Callable[[Tensor], Tensor]
"""Re-rotates the key channels (the last axis) of [..., K] by one rotation R."""

_POWER_STEPS = 4
# a probe reads a decay off the layer itself and may see 1 + rounding
_DECAY_SLACK = 1e-3
_NORM_SLACK = 1e-3
_NORM_SLACK_16_BIT = 1e-2


class TransitionError(ValueError):
    """A transition that can't be used: not finite, amplifying, or re-rotated where that isn't exact."""


@dataclass(frozen=True, eq=False)
class Transition(ABC):
    """T of a run of tokens. Transitions of one family and shape form a monoid under `after`."""

    tensor: Tensor  # the smallest form of T that the family has (HYPIC table 3)
    family: ClassVar[str]

    @abstractmethod
    def apply(self, state: Tensor) -> Tensor:
        """T S for a state as the family lays it out."""

    def apply_on(self, state: Tensor, axis: int) -> Tensor:
        """T S for a state whose keys lie on `axis`, -2 or -1."""
        if axis == -2:
            return self.apply(state)
        return self.apply(state.transpose(-1, -2)).transpose(-1, -2)

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
        """What `judge` looks at, [2] float64: 1 if all is finite, and the family's own measure of how T amplifies."""
        # still on the device, so that those of many layers can be waited for at once
        return torch.stack([torch.isfinite(self.tensor).all().double(), self.amplification().double()])

    @abstractmethod
    def amplification(self) -> Tensor:
        """How much T amplifies a state at most, in the family's own measure. []"""

    def judge(self, finite: float, amplification: float) -> None:
        """Raises TransitionError if what was `measured` isn't that of a layer's transition."""
        if not finite:
            raise TransitionError(f"a {self.family} transition holds NaN or infinity: compile the document again")

    def stored(self, dtype: torch.dtype) -> Self:
        """The same transition for storage in `dtype`; families that keep logarithms keep them as they are."""
        return self


TRANSITIONS: Registry[type[Transition]] = Registry("linear-attention family")


def register_family(cls: type[Family]) -> type[Family]:
    """Decorator: makes a family known under its own name, by which a PICache stores its transitions."""
    TRANSITIONS.register(cls.family)(cls)
    return cls


class LogDecay(Transition):
    """Families whose T is a decay, kept as its logarithm [H], [H, K] or of the state's shape.

    Sums of logarithms never underflow, as products would.
    """

    def apply(self, state: Tensor) -> Tensor:
        factors = self.tensor.to(state.device, state.dtype).exp()
        return state * factors.reshape(factors.shape + (1,) * (state.ndim - factors.ndim))

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


@register_family
class ScalarTransition(LogDecay):
    """T_i = a_i I, one number per head (RetNet, Lightning, Mamba-2, simple GLA); whichever axis holds the keys.

    Stored as log a_C = sum of log a_i, [H]. Source: HYPIC table 1 and 3; Mamba-2: arXiv:2405.21060.
    """

    family: ClassVar[str] = "scalar"

    def rerotated(self, rerotate: Rerotate) -> ScalarTransition:
        return self  # a multiple of the identity commutes with every rotation (HYPIC eq. 7)


@register_family
class DiagonalTransition(LogDecay):
    """T_i = diag(g_i), one number per head and key channel (GLA), stored as log g_C [H, K].

    Source: HYPIC table 1 and 3; GLA: arXiv:2312.06635.
    """

    family: ClassVar[str] = "diagonal"


@register_family
class ElementwiseTransition(LogDecay):
    """T_i multiplies every entry of the state [channels, state] by its own factor exp(dt_c A_cn) (Mamba-1).

    Stored as log decays of the state's shape. Not in the HYPIC paper; it composes the same way. Source: Mamba,
    arXiv:2312.00752.
    """

    family: ClassVar[str] = "elementwise"


@register_family
class DenseTransition(Transition):
    """T_i = g_i (I - beta_i k_i k_i^T) and its relatives (DeltaNet, gated DeltaNet, KDA), stored as [H, K, K].

    The product of such matrices has no smaller form. Keys are L2-normalised and beta <= 2, so no T_i has a norm above
    one: composing never amplifies an earlier error, and a stored T that does is damaged. Source: HYPIC table 1 and 3;
    gated DeltaNet: arXiv:2412.06464; KDA: arXiv:2510.26692.
    """

    family: ClassVar[str] = "dense"

    def apply(self, state: Tensor) -> Tensor:
        return self.tensor.to(state.device, state.dtype) @ state

    def after(self, earlier: DenseTransition) -> DenseTransition:
        return DenseTransition(self.tensor @ earlier.tensor)

    def rerotated(self, rerotate: Rerotate) -> DenseTransition:
        """R T R^T: exact where gates are scalar (DeltaNet, gated DeltaNet), not for KDA's. An extension of eq. 7."""
        columns = rerotate(self.tensor)
        return DenseTransition(rerotate(columns.transpose(-1, -2)).transpose(-1, -2))

    def amplification(self) -> Tensor:
        return self.norm_bound().amax()

    def judge(self, finite: float, amplification: float) -> None:
        super().judge(finite, amplification)
        slack = _NORM_SLACK if self.tensor.itemsize > 2 else _NORM_SLACK_16_BIT
        if amplification > 1 + slack:
            raise TransitionError(
                f"a dense transition amplifies the state by {amplification:.4g}, expected at most 1: "
                "compile the document again"
            )

    def norm_bound(self) -> Tensor:
        """A lower bound [H] on the spectral norms, close from below, by a few steps of power iteration."""
        matrix = self.tensor if self.tensor.itemsize > 4 else self.tensor.float()
        generator = torch.Generator().manual_seed(0)
        start = torch.randn(matrix.shape[-1], 1, generator=generator).to(matrix.dtype)
        vector = on_device(start, matrix.device).expand(len(matrix), -1, 1)
        growth = torch.zeros(len(matrix), device=matrix.device, dtype=matrix.dtype)
        for _ in range(_POWER_STEPS):
            # by the largest entry first: the squares of a long segment's transition underflow
            largest = vector.abs().amax(dim=-2, keepdim=True)
            seen = largest > torch.finfo(matrix.dtype).tiny
            vector = torch.where(seen, vector / largest.where(seen, torch.ones_like(largest)), torch.zeros_like(vector))
            vector = vector / vector.norm(dim=-2, keepdim=True).clamp_min(1)
            after = matrix @ vector
            growth = torch.maximum(growth, after.norm(dim=-2)[:, 0])
            vector = matrix.transpose(-1, -2) @ after
        return growth

    def stored(self, dtype: torch.dtype) -> DenseTransition:
        return DenseTransition(self.tensor.to(dtype))
