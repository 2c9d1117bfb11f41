"""Whether a cache still holds the keys that a pass left in it: by identity, exactly, without reading them.

A summary is right only for the keys that it was made from. transformers' caches replace their tensors when they grow,
are reordered (beams) or repeated, and cut views from them when they are cropped; the cache that linking makes is
written in place. So a layer goes on from what was seen if its tensor is the one seen last, or a beginning of it, and
nobody wrote into it since. Anything else counts as another prompt.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from comb.backbones.torch_private import base_of, writes


@dataclass(frozen=True)
class KeysIdentity:
    """A layer's keys [B, G, L, D] after a pass, without keeping them alive."""

    root: weakref.ref[Tensor]
    pointer: int
    version: int
    sizes: tuple[int, ...]

    @classmethod
    def of(cls, layer: Any) -> KeysIdentity | None:
        """What `layer` of a cache holds now; None if it holds nothing."""
        keys = _keys(layer)
        if keys is None:
            return None
        root = base_of(keys)
        return cls(weakref.ref(root), keys.data_ptr(), writes(root), _sizes(keys))

    def continues(self, layer: Any) -> bool:
        """Whether `layer` holds the same keys, or a beginning of them, or has grown behind them where they lie."""
        now = KeysIdentity.of(layer)
        if now is None or now.root() is not self.root():
            return False
        return (now.pointer, now.version, now.sizes) == (self.pointer, self.version, self.sizes)


def _keys(layer: Any) -> Tensor | None:
    keys = getattr(layer, "keys", None)
    return keys if isinstance(keys, Tensor) and keys.numel() else None


def _sizes(tensor: Tensor) -> tuple[int, ...]:
    rows, heads, _, width = tensor.shape
    return rows, heads, width, *tensor.stride()


def empty(layer: Any) -> bool:
    """Whether a layer of a cache holds no keys yet."""
    return _keys(layer) is None
