"""Where a cached tensor holds rotary positions, and how it is re-rotated from the ones it was compiled at.

Shapes: T tokens, D channels, m rotated pairs.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from comb.linking.frequencies import Frequencies
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
    """What was found: per cache layer the rotation in its keys and in its values (None: no positions there).

    `max_segment_tokens`: segments must stay shorter than this for their frequencies to be the short-prompt ones.
    """

    layers: tuple[tuple[Rotation | None, Rotation | None], ...]
    sources: tuple[Frequencies, ...]
    length_dependent: bool = False
    max_segment_tokens: int | None = None

    def settle(self, length: int) -> None:
        """Puts frequencies that change with the prompt's length to what they are for one of `length` tokens."""
        for source in self.sources if self.length_dependent else ():
            source.at(1)
            source.at(length)

    def rerotation(self, compiled: Tensor, linked: Tensor, length: int, device: torch.device) -> Rerotation:
        """Cosines and sines on `device` that take tokens from `compiled` positions [T] to `linked` positions [T].

        Args:
            compiled, linked: best on the host: otherwise different shifts are counted by a GPU, and waited for.
            length: of the whole prompt, for embeddings that depend on it.
        """
        factors = []
        for source in self.sources:
            before = source.at(1)
            after = source.at(length) if self.length_dependent else before
            # Angles in float64: at position 100,000 a float32 product is off by 0.006 rad. A segment's tokens share
            # one angle as long as the frequencies are the same, and then only the distinct shifts are computed.
            if after is before or torch.equal(before, after):
                shifts, which = torch.unique_consecutive(linked - compiled, return_inverse=True)
                shifts, which = on_device(shifts.double(), device), on_device(which, device)
                angles = shifts[:, None] * on_device(after, device)
                factors.append((angles.cos().float()[which], angles.sin().float()[which]))
            else:
                angles = on_device(linked.double(), device)[:, None] * on_device(after, device)
                angles -= on_device(compiled.double(), device)[:, None] * on_device(before, device)
                factors.append((angles.cos().float(), angles.sin().float()))
        return Rerotation(tuple(factors))


@dataclass(frozen=True)
class Rerotation:
    """Per frequency set, cosines and sines [T, m] in float32."""

    factors: tuple[tuple[Tensor, Tensor], ...]

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
