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

from comb.linking.positions import UnmovableError
from comb.registry import Registry

Family = TypeVar("Family", bound="Transition")

Rerotate = Callable[[Tensor], Tensor]
"""Re-rotates the key channels (the last axis) of [..., K] by one rotation R."""


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
            UnmovableError: when T doesn't commute with a rotation in this family, as in most.
        """
        raise UnmovableError(
            f"rotary positions inside a linear layer with a {self.family} decay: the state of a segment can't be moved "
            "to another position"
        )

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
    one: composing never amplifies an earlier error. Source: HYPIC table 1 and 3; gated DeltaNet: arXiv:2412.06464; KDA:
    arXiv:2510.26692.
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

    def stored(self, dtype: torch.dtype) -> DenseTransition:
        return DenseTransition(self.tensor.to(dtype))
