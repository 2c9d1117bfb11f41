"""The store's directory: which key is in which tier, who uses it, what is pinned or in flight.

All of it is quick (of files, only names are touched) and happens under the one lock; `store` adds what takes time.
"""

from __future__ import annotations

import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from comb.cache.picache import PICache
from comb.cache.tiers import DiskTier, IndexEntry, LRUTier, TierStats

# keys are file names, so nothing that leads out of a folder or hides a file
_KEY = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._-]{0,127}")


class IntegrityError(AssertionError):
    """An invariant of the store is broken: a bug in it, not in its user."""


@dataclass(frozen=True)
class StoreStats:
    """Counts since the store was made, and its size now.

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


class PICacheRef:
    """A reference to one PICache, which stays on the device meanwhile. Release it in `finally`, or use `with`.

    On a GPU, release it when the work that reads it is done, or queued on the stream that its tensors were made on.

    hit: whether it was found, not compiled. tier: where it was found: "device", "host", "disk", or "compiled".
    """

    def __init__(self, store: Directory, entry: IndexEntry, tier: str) -> None:
        self.key = entry.key
        self.tier = tier
        self._store = store
        self._entry: IndexEntry | None = entry

    @property
    def hit(self) -> bool:
        return self.tier != "compiled"

    @property
    def picache(self) -> PICache:
        """The PICache, on the store's device. Raises RuntimeError after `release`."""
        if self._entry is None or self._entry.picache is None:
            raise RuntimeError(f"PICache {self.key} was used after its handle was released; acquire it again")
        return self._entry.picache

    def release(self) -> None:
        """Drops the reference; a second call does nothing."""
        with self._store._changed:
            entry, self._entry = self._entry, None
            if entry is not None:
                self._store._unreference(entry)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


class PICacheRefs(list[PICacheRef]):
    """The handles of one `acquire`, in the order of its keys; leaving the `with` block releases them all."""

    def release(self) -> None:
        for handle in self:
            handle.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.release()


@dataclass(eq=False)
class Flight:
    """A key being compiled or moved by the thread `owner`. `dropped`: removed meanwhile, so not to be stored."""

    owner: threading.Thread = field(default_factory=threading.current_thread)
    dropped: bool = False


class Directory:
    """See `comb.cache.store.PICacheStore`, which is the class to use."""

    def __init__(
        self,
        *,
        device_bytes: int | None,
        host_bytes: int,
        disk_path: Path | str | None,
        disk_bytes: int | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        for name, budget in (("device_bytes", device_bytes), ("host_bytes", host_bytes), ("disk_bytes", disk_bytes)):
            if budget is not None and budget < 0:
                raise ValueError(f"{name} expects a number of bytes >= 0, got {budget}")
        self._clock = clock
        self._changed = threading.Condition()
        self._device = LRUTier("device", device_bytes)
        self._host = LRUTier("host", host_bytes)
        self._disk = None
        if disk_path is not None:
            self._disk = DiskTier(Path(disk_path), disk_bytes, clock=clock, wall_clock=wall_clock)
        self._in_flight: dict[str, Flight] = {}
        self._removed: set[IndexEntry] = set()  # gone from lookup, still in use; the device tier holds their bytes
        self._pins: dict[str, int] = {}
        self._hits = self._misses = self._expired = 0

    def lookup(self, key: str) -> str | None:
        """The uppermost tier that has `key` ("device", "host", "disk"), or None; takes no reference, moves nothing."""
        with self._changed:
            self._drop_if_expired(key)
            return next((tier.name for tier in self._tiers() if tier.get(key) is not None), None)

    def pin(self, key: str) -> bool:
        """Keeps `key` from being evicted until as many `unpin`; False (and no pin) if no tier has it.

        A key that is just being compiled or moved can be pinned: the pin holds once it has arrived.
        """
        with self._changed:
            if self.lookup(key) is None and key not in self._in_flight:
                return False
            self._pins[key] = self._pins.get(key, 0) + 1
            return True

    def unpin(self, key: str) -> bool:
        """Takes back one `pin`; False if there is none (expiry, `remove` and `clear` end pins)."""
        with self._changed:
            count = self._pins.pop(key, 0)
            if count > 1:
                self._pins[key] = count - 1
            return count > 0

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        """Gives an entry in memory a new time to live, from now; None: for ever. False if it isn't in memory.

        A copy on disk is dropped, as it holds the old time; it is written again at the next eviction or flush.

        Raises:
            ValueError: `ttl_s` <= 0.
        """
        with self._changed:
            self._drop_if_expired(key)
            found = [entry for tier in (self._device, self._host) if (entry := tier.get(key)) is not None]
            for entry in found:
                entry.expires_at = self._expiry(ttl_s)
            if found and self._disk is not None:
                self._disk.remove(key)
            return bool(found)

    def _expiry(self, ttl_s: float | None) -> float:
        if ttl_s is None:
            return math.inf
        if not ttl_s > 0:
            raise ValueError(f"ttl_s expects seconds > 0, or None for no expiry, got {ttl_s}")
        return self._clock() + ttl_s

    def remove(self, key: str) -> bool:
        """Forgets `key` in all tiers, pinned or not; True if it was there (or being compiled or moved).

        It is gone from lookup at once. In use, it stays valid for those who hold it and its memory is freed at the last
        release. Being compiled, the result goes to those who asked for it and is not stored.
        """
        with self._changed:
            self._drop_if_expired(key)
            return bool(_KEY.fullmatch(key)) and self._drop(key)

    def clear(self) -> None:
        """Removes every entry from every tier, pins included."""
        with self._changed:
            for key in {*self._in_flight, *self._pins, *(key for tier in self._tiers() for key in tier.entries)}:
                self._drop(key)

    def sweep(self) -> int:
        """Drops what has expired, and looks for files other processes wrote or deleted; returns how many expired.

        Expired entries are never found in any case; call this now and then to free their memory without waiting for
        someone to ask for them.
        """
        found = self._disk.scan() if self._disk is not None else []
        with self._changed:
            if self._disk is not None:
                self._disk.forget_vanished()
                for key, entry in found:
                    self._disk.adopt(key, entry, self._is_kept)
            return self._drop_all_expired()

    def _tiers(self) -> list[LRUTier]:
        return [self._device, self._host, *([self._disk.index] if self._disk is not None else [])]

    def _drop(self, key: str) -> bool:
        entry = self._device.pop(key)
        if entry is not None and entry.references > 0:
            self._removed.add(entry)
            self._device.held_bytes += entry.nbytes
        known = entry is not None
        known |= self._host.pop(key) is not None
        if self._disk is not None:
            known |= self._disk.remove(key)
        self._pins.pop(key, None)
        if (flight := self._in_flight.get(key)) is not None:
            flight.dropped = known = True
        return known

    def _drop_if_expired(self, key: str) -> None:
        now = self._clock()
        if any(entry.expires_at <= now for tier in self._tiers() if (entry := tier.get(key)) is not None):
            self._expired += 1
            self._drop(key)

    def _drop_all_expired(self) -> int:
        before, now = self._expired, self._clock()
        for key in {k for tier in self._tiers() for k, entry in tier.entries.items() if entry.expires_at <= now}:
            self._drop_if_expired(key)
        return self._expired - before

    def stats(self) -> StoreStats:
        """Counts and sizes, taken in one moment."""
        with self._changed:
            in_use = sum(entry.references > 0 for entry in self._device.entries.values()) + len(self._removed)
            return StoreStats(
                tiers={tier.name: tier.snapshot() for tier in self._tiers()},
                hits=self._hits,
                misses=self._misses,
                expired=self._expired,
                in_use=in_use,
                pinned=len(self._pins),
                removed_in_use=len(self._removed),
            )

    def check_integrity(self, *, shared_folder: bool = False) -> None:
        """Raises IntegrityError naming the first broken invariant. Cheap enough to call whenever the engine is idle.

        Args:
            shared_folder: other processes write to the disk folder, so its files are not compared with the index.
        """
        with self._changed:
            for tier in self._tiers():
                _check_tier(tier)
            _check("references >= 0", all(e.references >= 0 for e in self._device.entries.values()))
            _check("no references outside the device tier", not any(e.references for e in self._host.entries.values()))
            _check("no key on device and host at once", self._device.entries.keys().isdisjoint(self._host.entries))
            _check("removed entries are in use", all(entry.references > 0 for entry in self._removed))
            held = sum(entry.nbytes for entry in self._removed)
            _check(f"device holds {held} bytes of removed entries", self._device.held_bytes == held)
            _check("pins > 0", all(count > 0 for count in self._pins.values()))
            ownerless = [key for key, flight in self._in_flight.items() if not flight.owner.is_alive()]
            _check(f"no key in flight without an owner: {ownerless}", not ownerless)
            if self._disk is not None:
                writing = sum(self._disk.writing.values())
                _check(f"disk holds {writing} bytes being written", self._disk.index.held_bytes == writing)
                different = "" if shared_folder else self._disk.differences()
                _check(f"disk index equals the folder: {different}", not different)

    def _land(self, key: str, flight: Flight) -> None:
        if self._in_flight.get(key) is flight:
            del self._in_flight[key]
            self._changed.notify_all()

    def _unreference(self, entry: IndexEntry) -> None:
        entry.references -= 1
        if entry.references == 0 and entry in self._removed:
            self._removed.remove(entry)
            self._device.held_bytes -= entry.nbytes

    def _is_kept(self, entry: IndexEntry) -> bool:
        """Whether an entry may not be evicted: in use, pinned, or being worked on."""
        return entry.references > 0 or entry.key in self._pins or entry.key in self._in_flight


def checked_key(key: str) -> str:
    """`key` if it can be one. Raises ValueError."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"a key expects 1 to 128 letters, digits, '_', '-', '.' (content_key gives such), got {key!r}")
    return key


def _check_tier(tier: LRUTier) -> None:
    total = sum(entry.nbytes for entry in tier.entries.values())
    _check(f"{tier.name}: bytes counted {tier.used_bytes} equal the sum of entries {total}", tier.used_bytes == total)
    taken = tier.used_bytes + tier.held_bytes
    _check(f"{tier.name}: {taken} bytes within the budget {tier.budget}", tier.budget is None or taken <= tier.budget)
    for key, entry in tier.entries.items():
        _check(f"{tier.name}: listed as {key}, is {entry.key}", key == entry.key)
        size = entry.nbytes if entry.picache is None else entry.picache.nbytes
        _check(f"{tier.name}: {key} counted as {entry.nbytes} bytes, has {size}", size == entry.nbytes)


def _check(invariant: str, holds: bool) -> None:
    if not holds:
        raise IntegrityError(f"PICache store: broken invariant: {invariant}")
