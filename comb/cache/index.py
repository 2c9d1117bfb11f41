"""Which key is where: entries within budgets, least recently used first, with references, pins, expiry and claims.

Bookkeeping only: no I/O, no locks, and time by the clock it is given. `comb.cache.store` keeps its tiers in one
(in bytes), the server's PIC manager its pool (in blocks).

    referenced   in use: never evicted; once dropped, it is gone from lookup and keeps its room to the last release
    pinned       worth keeping: never evicted, but expiry, `drop` and `clear` end it and its pins
    claimed      a key that one worker compiles or moves: what is under it is not evicted meanwhile
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

V = TypeVar("V")


@dataclass(eq=False)
class IndexEntry(Generic[V]):
    """What one tier keeps under a key."""

    key: str
    size: int  # of the tier's budget
    value: V  # whatever the owner of the index keeps there
    expires_at: float = math.inf  # by the index's clock
    references: int = 0  # of users that hold it
    tier: str = ""  # that it is in, or was in last


@dataclass(eq=False)
class Claim:
    """A key that `owner` compiles or moves."""

    owner: Any
    dropped: bool = False  # meanwhile, so the result is not to be kept


@dataclass
class Tier(Generic[V]):
    """Entries by key, least recently used first."""

    budget: int | None  # None: unbounded
    entries: OrderedDict[str, IndexEntry[V]] = field(default_factory=OrderedDict)
    used: int = 0  # of the budget, by entries and held ones
    counts: Counter[str] = field(default_factory=Counter)

    def takes(self, entry: IndexEntry[V]) -> bool:
        """Whether an entry could ever be here."""
        return self.budget is None or entry.size <= self.budget

    def touch(self, key: str) -> None:
        """Makes `key` the most recently used."""
        self.entries.move_to_end(key)


class CacheIndex(Generic[V]):
    """Entries in one or more tiers.

    Args:
        tiers: by name, uppermost first.
        clock: seconds, for expiry.
        freed: called with each entry that was dropped or evicted, once nobody uses it any more.
        dropped: called with each key that is removed, or whose time is over.
    """

    def __init__(
        self,
        tiers: Mapping[str, Tier[V]],
        *,
        clock: Callable[[], float],
        freed: Callable[[IndexEntry[V]], None] = lambda entry: None,
        dropped: Callable[[str], None] = lambda key: None,
    ) -> None:
        self.tiers, self.clock, self.freed, self.dropped = dict(tiers), clock, freed, dropped
        self.pins: Counter[str] = Counter()
        self.claims: dict[str, Claim] = {}
        self.held: set[IndexEntry[V]] = set()  # dropped in use: nobody finds them, but they take room
        self.expired = 0  # keys that were dropped because their time was over

    def get(self, key: str) -> IndexEntry[V] | None:
        """The uppermost entry of `key`; None if there is none, or its time is over."""
        self.drop_expired([key])
        return next((tier.entries[key] for tier in self.tiers.values() if key in tier.entries), None)

    def add(self, tier: str, entry: IndexEntry[V]) -> None:
        """Adds (or replaces) as the most recently used; the caller has made room."""
        self.pop(tier, entry.key)
        entry.tier = tier
        self.tiers[tier].entries[entry.key] = entry
        self.tiers[tier].used += entry.size

    def pop(self, tier: str, key: str) -> IndexEntry[V] | None:
        """Takes an entry out of one tier; what becomes of it is the caller's business."""
        entry = self.tiers[tier].entries.pop(key, None)
        if entry is not None:
            self.tiers[tier].used -= entry.size
        return entry

    def make_room(self, tier: str, size: int) -> list[IndexEntry[V]] | None:
        """Evicts what was used least recently until `size` fits, and returns it; None, evicting nothing, if it can't.

        What has expired goes first, pinned or not.
        """
        there = self.tiers[tier]
        if there.budget is None or there.used + size <= there.budget:
            return []
        self.drop_expired()
        excess = there.used + size - there.budget
        chosen: list[IndexEntry[V]] = []
        for entry in there.entries.values():
            if excess <= 0:
                break
            if not self.is_kept(entry):
                chosen.append(entry)
                excess -= entry.size
        if excess > 0:
            return None
        for entry in chosen:
            self.pop(tier, entry.key)
            there.counts["evictions"] += 1
            self.freed(entry)
        return chosen

    def is_kept(self, entry: IndexEntry[V]) -> bool:
        """Whether an entry may not be evicted."""
        return entry.references > 0 or entry.key in self.pins or entry.key in self.claims

    def release(self, entry: IndexEntry[V]) -> None:
        """Takes back one reference."""
        entry.references -= 1
        if entry.references == 0 and entry in self.held:
            self.held.remove(entry)
            self.tiers[entry.tier].used -= entry.size
            self.freed(entry)

    def pin(self, key: str) -> bool:
        """Keeps `key` from being evicted until as many `unpin`; False (and no pin) if it is neither here nor claimed.

        The pin of a claimed key holds once its entry has arrived.
        """
        if self.get(key) is None and key not in self.claims:
            return False
        self.pins[key] += 1
        return True

    def unpin(self, key: str) -> bool:
        """Takes back one `pin`; False if there is none."""
        count = self.pins.pop(key, 0)
        if count > 1:
            self.pins[key] = count - 1
        return count > 0

    def expiry(self, ttl_s: float | None) -> float:
        """The time at which `ttl_s` seconds from now are over; None: never. Raises ValueError unless `ttl_s` > 0."""
        if ttl_s is None:
            return math.inf
        if not ttl_s > 0:
            raise ValueError(f"ttl_s expects seconds > 0, or None for no expiry, got {ttl_s}")
        return self.clock() + ttl_s

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        """Gives a key a new time to live, from now; None: for ever. False if it isn't here."""
        expires_at, known = self.expiry(ttl_s), self.get(key) is not None
        for tier in self.tiers.values():
            if key in tier.entries:
                tier.entries[key].expires_at = expires_at
        return known

    def drop(self, key: str) -> bool:
        """Forgets `key` in all tiers, pinned or not; True if it was there, or claimed."""
        entries = [entry for tier in self.tiers if (entry := self.pop(tier, key)) is not None]
        for entry in entries:
            if entry.references > 0:
                self.held.add(entry)  # takes room, though nobody finds it, until the last release
                self.tiers[entry.tier].used += entry.size
            else:
                self.freed(entry)
        self.pins.pop(key, None)
        self.dropped(key)
        if (claim := self.claims.get(key)) is not None:
            claim.dropped = True
        return bool(entries) or claim is not None

    def clear(self) -> None:
        """Drops every key."""
        for key in {*self.claims, *self.pins, *(key for tier in self.tiers.values() for key in tier.entries)}:
            self.drop(key)

    def drop_expired(self, keys: Iterable[str] | None = None) -> None:
        """Drops the keys whose time is over, pinned or not: of `keys`, or of all."""
        for key in {key for tier in self.tiers.values() for key in tier.entries} if keys is None else keys:
            found = [tier.entries[key] for tier in self.tiers.values() if key in tier.entries]
            if any(entry.expires_at <= self.clock() for entry in found):
                self.expired += 1
                self.drop(key)

    def claim(self, key: str, owner: Any) -> Claim:
        """Marks a key that nobody has claimed as being worked on."""
        assert key not in self.claims, key
        self.claims[key] = Claim(owner)
        return self.claims[key]

    @property
    def pinned_size(self) -> int:
        """What pinned entries take of the uppermost tier."""
        entries = next(iter(self.tiers.values())).entries
        return sum(entry.size for key in list(self.pins) if (entry := entries.get(key)) is not None)
