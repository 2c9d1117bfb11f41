"""Where a cached tensor holds rotary positions, and how it is re-rotated from the ones it was compiled at.

Shapes: T tokens, D channels, m rotated pairs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from comb.backbones.rotary import RotaryEmbedding, Turns
from comb.waits import on_device


@dataclass(frozen=True)
class Rotation:
    """The rotary part of one cached tensor: 2m channels from `start` on.

    `interleaved`: channels 2j and 2j+1 are a pair (GPT-J); otherwise j and j+m are (NeoX, Llama).
    """

    source: int
    start: int
    interleaved: bool

    def pairs(self, tensor: Tensor, m: int) -> tuple[Tensor, Tensor]:
        """Views of the first and second channels of all pairs, each [..., m]."""
        if self.interleaved:
            end = self.start + 2 * m
            return tensor[..., self.start : end : 2], tensor[..., self.start + 1 : end : 2]
        middle = self.start + m
        return tensor[..., self.start : middle], tensor[..., middle : middle + m]


@dataclass(frozen=True)
class PositionMap:
    """What was found: per cache layer the rotation in its keys and in its values (None: no positions there)."""

    layers: tuple[tuple[Rotation | None, Rotation | None], ...]
    sources: tuple[RotaryEmbedding, ...]

    @property
    def limit(self) -> int | None:
        """Positions of a pass up to which their number changes no key; None where it never does.

        Segments are compiled in passes that stay below.
        """
        return min((source.limit for source in self.sources if source.limit is not None), default=None)

    def rerotation(self, compiled: Tensor, linked: Tensor, length: int, device: torch.device) -> Rerotation:
        """Cosines and sines on `device` that take tokens from `compiled` positions [T] to `linked` positions [T].

        Args:
            compiled: below `limit`.
            length: of the whole prompt, for embeddings that depend on it.
        """
        count, both = len(compiled), on_device(torch.cat([compiled, linked]), device)
        turns = []
        for source in self.sources:
            if source.limit is None:
                cos, sin = source.ask(both)
                turns.append(((cos[:count], sin[:count]), (cos[count:], sin[count:])))
            else:
                turns.append((source.turns(both[:count], 1), source.turns(both[count:], length)))
        return Rerotation.between(turns)


@dataclass(frozen=True)
class Rerotation:
    """Per rotary embedding, cosines and sines [T, m] in float32 or more."""

    factors: tuple[tuple[Tensor, Tensor], ...]

    @classmethod
    def between(cls, turns: Iterable[tuple[Turns, Turns]]) -> Rerotation:
        """Per embedding, from the turns that tokens have to those that they are to have; a common magnitude falls out.

        As the model computed both, so that what was turned is what the model itself would have turned.
        """
        factors = []
        for (cos, sin), (new_cos, new_sin) in turns:
            # not fused: what stays in its place is turned by nothing, to the last bit
            size = cos * cos + sin * sin
            factors.append(((cos * new_cos + sin * new_sin) / size, (cos * new_sin - sin * new_cos) / size))
        return cls(tuple(factors))

    def apply(self, tensor: Tensor, rotation: Rotation | None) -> Tensor:
        """Re-rotates `tensor` [..., T, D] in place, computing in float32 (in float64 for a float64 tensor)."""
        if rotation is None:
            return tensor
        dtype = torch.float64 if tensor.dtype == torch.float64 else torch.float32
        cos, sin = (factor.to(tensor.device, dtype) for factor in self.factors[rotation.source])
        first, second = rotation.pairs(tensor, cos.shape[-1])
        a, b = first.to(dtype), second.to(dtype)
        turned = (a * cos).addcmul_(b, sin, value=-1)
        second.copy_((b * cos).addcmul_(a, sin))
        first.copy_(turned)
        return tensor
