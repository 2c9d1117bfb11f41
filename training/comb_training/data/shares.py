"""How many examples each set of a mixture gives, and which: decided by weights, sizes and the seed alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from fractions import Fraction

from comb_training.data.batches import TOGETHER
from comb_training.data.grouping import seeded


def apportion(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` in whole numbers by weight, none off by one or more (largest remainders; ties go to the first name)."""
    exact = {name: Fraction(weight) for name, weight in weights.items()}
    everything = sum(exact.values())
    shares = {name: total * weight / everything for name, weight in exact.items()}
    numbers = {name: math.floor(share) for name, share in shares.items()}
    # sorting is stable
    rest = sorted(shares, key=lambda name: numbers[name] - shares[name])
    for name in rest[: total - sum(numbers.values())]:
        numbers[name] += 1
    return numbers


def epoch_numbers(
    sizes: Mapping[str, int],
    weights: Mapping[str, float],
    *,
    max_repeats: float = 1.0,
    epoch_examples: int | None = None,
    limit: int | None = None,
) -> dict[str, int]:
    """How many examples of each set make an epoch; see `comb_training.data.mixture`.

    Args:
        limit: examples of the epoch at most.

    Raises:
        ValueError: for a set without examples, or an `epoch_examples` for which a set would come too often.
    """
    empty = [name for name, size in sizes.items() if not size]
    if empty:
        raise ValueError(f"data.mixture, set {empty[0]!r}: no example is left")
    everything = sum(Fraction(weight) for weight in weights.values())
    longest = {
        name: math.floor(math.floor(Fraction(max_repeats) * size) * everything / Fraction(weights[name]))
        for name, size in sizes.items()
    }
    first = min(longest, key=lambda name: longest[name])
    total = longest[first]
    if epoch_examples is not None:
        if epoch_examples > total:
            wanted = apportion(weights, epoch_examples)[first]
            raise ValueError(
                f"data.epoch_examples={epoch_examples} takes {wanted} of set {first!r}, which has {sizes[first]} "
                f"examples; data.max_repeats={max_repeats:g} allows epochs of {total}: lower data.epoch_examples or "
                f"the set's weight, or set data.max_repeats={math.ceil(wanted / sizes[first])}"
            )
        total = epoch_examples
    return apportion(weights, total if limit is None else min(total, limit))


def heldout_numbers(sizes: Mapping[str, int], weights: Mapping[str, float], limit: int | None) -> dict[str, int]:
    """How many held-out examples each set gives: its share of `limit`, or all it has and the others more."""
    if limit is None or limit >= sum(sizes.values()):
        return dict(sizes)
    numbers: dict[str, int] = {}
    while True:
        free = {name: weights[name] for name in sizes if name not in numbers}
        shares = apportion(free, limit - sum(numbers.values()))
        short = {name: sizes[name] for name, share in shares.items() if share > sizes[name]}
        if not short:
            return {name: (numbers | shares)[name] for name in sizes}
        numbers |= short


def draw(blocks: Sequence[Sequence[int]], number: int, *, seed: int, name: str) -> list[tuple[int, int]]:
    """`number` of a set's examples as (place, round), in the set's order: all of them as often as possible, and some.

    Those over the same documents (a block) are drawn together, `TOGETHER` at a time, so that few documents are encoded
    for one question, and a block of a thousand is not the whole draw.
    """
    size = sum(map(len, blocks))
    rounds, rest = divmod(number, size)
    shuffled = [block[start : start + TOGETHER] for block in blocks for start in range(0, len(block), TOGETHER)]
    seeded(seed, "mixture", name).shuffle(shuffled)
    some = list(itertools.chain.from_iterable(shuffled))[:rest]
    return [(place, turn) for turn in range(rounds) for place in range(size)] + [
        (place, rounds) for place in sorted(some)
    ]
