"""Addition: the states of a hybrid's segments added up, the naive baseline of the HYPIC paper."""

from __future__ import annotations

from typing import Any

from comb.methods import register
from comb.methods.hypic import Hypic


@register("addition")
class Addition(Hypic):
    """Adds every segment's state to the one before, as if the segment forgot nothing of it; recomputes nothing.

    The same as ``hypic:mode=addition``, under the papers' name, and linked from the same PICaches.

    Source: HYPIC sec. 3.1 and 6.3.
    """

    positional = ()

    def __init__(self, model: Any, *, storage: str = "float32", **parameters: Any) -> None:
        super().__init__(model, mode="addition", storage=storage, **parameters)
