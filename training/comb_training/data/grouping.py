"""Groups of examples: the train/held-out split that never cuts one, and draws of other rows (distractors, examples)."""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from typing import Literal, TypeVar

Split = Literal["train", "heldout", "all"]
SPLITS: tuple[Split, ...] = ("train", "heldout", "all")

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)


def seeded(seed: int, *keys: object) -> random.Random:
    """A generator that depends on the seed and the keys alone, so that no row's draw depends on another row."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *keys))).encode()).digest()
    return random.Random(digest)


def content_group(*texts: str) -> str:
    """The group of rows that are about the same texts."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:16]


def split_groups(groups: Iterable[str], split: Split, *, heldout_share: float, seed: int) -> set[str]:
    """The groups (articles, stories) on one side of the split.

    Groups are ordered by a hash of seed and name and the first ``ceil(share * n)`` are held out, so that the same
    file, share and seed always give the same two sides.

    Raises:
        ValueError: if the split is unknown, the share is not in 0..1, or one group can't be on two sides.
    """
    names = sorted(set(groups))
    if split not in SPLITS:
        raise ValueError(f"split is one of {', '.join(SPLITS)}, not {split!r}")
    if split == "all":
        return set(names)
    if not 0 < heldout_share < 1:
        raise ValueError(f"heldout_share must be between 0 and 1, not {heldout_share}")
    if len(names) < 2:
        raise ValueError(
            f"can't hold out part of {len(names)} group(s): rows over the same documents (an article, a story) stay on "
            "one side of the split, so that the data needs two at least"
        )
    ranked = sorted(names, key=lambda name: hashlib.sha256(f"{seed}\x1f{name}".encode()).digest())
    cut = min(math.ceil(heldout_share * len(names)), len(names) - 1)
    return set(ranked[:cut] if split == "heldout" else ranked[cut:])


def pick_distractors(
    rng: random.Random, pools: Sequence[tuple[Sequence[H], int]], *, exclude: Collection[H], total: int
) -> list[H]:
    """Up to `total` different items from pools in order of preference.

    Args:
        pools: (items, how many at most from this pool); what one pool can't give, the later ones do.
        exclude: items that must not be picked (the document that holds the answer).
        total: how many to pick; fewer come back when the pools run dry (the caller counts that).
    """
    taken: dict[H, None] = dict.fromkeys(exclude)
    picked: list[H] = []
    for items, at_most in pools:
        free = list(dict.fromkeys(item for item in items if item not in taken))
        wanted = min(at_most, total - len(picked), len(free))
        chosen = rng.sample(free, wanted)
        picked += chosen
        taken.update(dict.fromkeys(chosen))
    return picked


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
