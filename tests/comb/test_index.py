"""The index by itself: what `check_integrity` notices. What it decides is tested where it is used, against models."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from comb.cache.index import CacheIndex, IndexEntry, IntegrityError, Tier


def filled() -> CacheIndex[str]:
    """Two tiers; "a" is in the upper one, "held" was dropped in use."""
    index: CacheIndex[str] = CacheIndex({"upper": Tier(10), "lower": Tier(None)}, clock=lambda: 0.0)
    index.add("upper", IndexEntry("a", 4, "A"))
    index.add("upper", IndexEntry("held", 5, "H", references=1))
    index.drop("held")
    index.check_integrity()
    return index


def entry(index: CacheIndex[str]) -> IndexEntry[str]:
    return index.tiers["upper"].entries["a"]


@pytest.mark.parametrize(
    ("spoil", "invariant"),
    [
        (lambda i: setattr(i.tiers["upper"], "used", 8), "upper: 8 counted as used equal the sum of entries 9"),
        (lambda i: setattr(i.tiers["upper"], "budget", 8), "upper: 9 used within the budget 8"),
        (lambda i: setattr(entry(i), "references", -1), "references of a >= 0"),
        (lambda i: setattr(entry(i), "key", "b"), "listed as a, is b in upper"),
        (lambda i: i.add("lower", entry(i)), "upper"),
        (lambda i: i.held.clear(), "9 counted as used equal the sum of entries 4"),
        (lambda i: setattr(next(iter(i.held)), "references", 0), "held entries are in use"),
        (lambda i: i.pins.update(a=0), "pins > 0"),
    ],
)
def test_check_integrity_names_the_broken_invariant(spoil: Callable[[CacheIndex[str]], None], invariant: str) -> None:
    index = filled()
    spoil(index)
    with pytest.raises(IntegrityError, match=invariant):
        index.check_integrity()


def test_what_is_freed_is_freed_once_and_when_nobody_uses_it() -> None:
    freed: list[str] = []
    pool: Tier[str] = Tier(3)
    index = CacheIndex({"pool": pool}, clock=lambda: 0.0, freed=lambda entry: freed.append(entry.key))
    entries = {key: IndexEntry(key, 1, key, references=int(key == "used")) for key in ("old", "used", "new")}
    for one in entries.values():
        index.add("pool", one)
    assert index.pin("old")
    assert index.make_room("pool", 2) is None
    assert [victim.key for victim in index.make_room("pool", 1) or ()] == ["new"]
    assert index.drop("used")
    assert index.drop("old")
    assert freed == ["new", "old"]
    assert not index.unpin("old")
    index.release(entries["used"])
    assert freed == ["new", "old", "used"]
    assert index.tiers["pool"].used == 0
    new = replace(entries["new"])
    index.add("pool", new)
    assert index.make_room("pool", 4) is None
    assert index.make_room("pool", 3) == [new]
