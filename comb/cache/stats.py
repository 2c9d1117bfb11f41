"""What a PICache store says of itself."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TierStats:
    """A tier's size now, and counts since the store was made.

    hits: keys found in this tier. evictions: entries that left for lack of room. damaged: unusable files met.
    write_errors: files that could not be written.
    """

    entries: int
    bytes: int
    budget_bytes: int | None
    hits: int = 0
    evictions: int = 0
    damaged: int = 0
    write_errors: int = 0


@dataclass(frozen=True)
class StoreStats:
    """The store now, and counts since it was made.

    hits, misses: distinct keys per acquire call that were found (in any tier) or had to be compiled.
    in_use: entries with a reference, `removed_in_use` of which are gone from lookup. expired: entries dropped by TTL.
    """

    tiers: dict[str, TierStats]
    hits: int
    misses: int
    expired: int
    in_use: int
    pinned: int
    removed_in_use: int
