"""Documents from other rows of a file: distractors and worked examples."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import TypeVar

T = TypeVar("T")


def draw(rng: random.Random, items: Sequence[T], total: int, fits: Callable[[T], bool]) -> list[T]:
    """Up to `total` items that fit, from different places and in random order.

    Looks at no more items than it needs, so that drawing for every row of a long file stays linear; fewer come back
    when the items run out (the caller counts that).
    """
    drawn: list[T] = []
    moved: dict[int, int] = {}  # the part of a Fisher-Yates shuffle that was made so far
    for place in range(len(items)):
        if len(drawn) >= total:
            break
        other = rng.randrange(place, len(items))
        item = items[moved.get(other, other)]
        moved[other] = moved.get(place, place)
        if fits(item):
            drawn.append(item)
    return drawn
