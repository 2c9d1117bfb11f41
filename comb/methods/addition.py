"""Addition: the states of a hybrid's segments added up, the naive baseline of the HYPIC paper."""

from __future__ import annotations

from typing import Any

from comb.methods import register
from comb.methods.hypic import Hypic


@register("addition")
class Addition(Hypic):
    """Adds every segment's state to the one before, as if the segment forgot nothing of it; recomputes nothing.

    The same as ``hypic:mode=addition``, under the papers' name, and linked from the same PICaches.

    Args:
        rotate: turns keys to their places (``hypic:mode=rotation,compose=false``), as the paper's baseline doesn't.
            What composition is worth shows against this.
        storage: as for `hypic`.

    Source: HYPIC sec. 3.1 and 6.3.
    """

    positional = ()

    def __init__(self, model: Any, *, rotate: bool = False, storage: str = "float32", **parameters: Any) -> None:
        if not isinstance(rotate, bool):
            raise ValueError(f"addition:rotate is true or false, got {rotate!r}")
        super().__init__(model, mode="rotation" if rotate else "addition", compose=False, storage=storage, **parameters)
