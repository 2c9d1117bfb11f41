"""The store's tiers: one index over device, host and disk, what is quickly asked of it, and how entries move down.

What takes time (copies, contents of files) happens outside of the lock, with the key claimed in the index.
"""

from __future__ import annotations

import logging
import math
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comb.cache.disk import DiskFolder, FoundFile
from comb.cache.index import CacheIndex, Claim, IndexEntry, check
from comb.cache.picache_file import serialize

logger = logging.getLogger(__name__)

StoreEntry = IndexEntry[Any]  # the value is a PICache, on disk None
Evicted = list[tuple[StoreEntry, Claim]]

# keys are file names, so nothing that leads out of a folder or hides a file
_KEY = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._-]{0,127}")


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


class StoreTiers:
    """See `comb.cache.store.PICacheStore`, which is the class to use."""

    def __init__(
        self,
        budgets: dict[str, int | None],
        disk_path: Path | None,
        clock: Callable[[], float],
        wall_clock: Callable[[], float],
    ) -> None:
        for name, budget in budgets.items():
            if budget is not None and budget < 0:
                raise ValueError(f"{name}_bytes expects a number of bytes >= 0, got {budget}")
        self._folder = None if disk_path is None else DiskFolder(disk_path)
        tiers = {name: budget for name, budget in budgets.items() if name != "disk" or disk_path is not None}
        self._index: CacheIndex[Any] = CacheIndex(tiers, clock=clock, freed=self._freed)
        self._device, self._host = self._index.tiers["device"], self._index.tiers["host"]
        self._wall_clock = wall_clock
        self._changed = threading.Condition()
        self._misses = 0
        self.sweep()

    def _freed(self, entry: StoreEntry) -> None:
        if entry.tier == "disk" and self._folder is not None:
            self._folder.delete(entry.key)

    def lookup(self, key: str) -> str | None:
        """The uppermost tier that has `key` ("device", "host", "disk"), or None; takes no reference, moves nothing."""
        with self._changed:
            entry = self._index.get(key)
            return None if entry is None else entry.tier

    def pin(self, key: str) -> bool:
        """Keeps `key` from being evicted until as many `unpin`; False (and no pin) if it is neither here nor coming."""
        with self._changed:
            return self._index.pin(key)

    def unpin(self, key: str) -> bool:
        """Takes back one `pin`; False if there is none (expiry, `remove` and `clear` end pins)."""
        with self._changed:
            return self._index.unpin(key)

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        """Gives an entry in memory a new time to live, from now; None: for ever. False if it isn't in memory.

        A copy on disk is dropped, as it holds the old time; it is written again at the next eviction or flush.

        Raises:
            ValueError: `ttl_s` <= 0.
        """
        with self._changed:
            entry = self._index.get(key)
            if entry is None or entry.tier == "disk":
                return False
            self._index.set_expiry(key, ttl_s)
            if self._folder is not None:
                self._index.pop("disk", key)
                self._folder.delete(key)
            return True

    def remove(self, key: str) -> bool:
        """Forgets `key` in all tiers, pinned or not; True if it was there (or being compiled or moved).

        It is gone from lookup at once. In use, it stays valid for those who hold it and its memory is freed at the last
        release. Being compiled, the result goes to those who asked for it and is not stored.
        """
        with self._changed:
            if not _KEY.fullmatch(key):
                return False
            self._index.get(key)  # what has expired isn't there
            if self._folder is not None:
                self._folder.delete(key)  # also one that another process wrote
            return self._index.drop(key)

    def clear(self) -> None:
        """Removes every entry from every tier, pins included."""
        with self._changed:
            self._index.clear()

    def sweep(self) -> int:
        """Drops what has expired, and looks for files other processes wrote or deleted; returns how many expired.

        Expired entries are never found in any case; call this now and then to free their memory without waiting for
        someone to ask for them.
        """
        found = [] if self._folder is None else self._folder.scan(self._index.tiers["disk"].entries)
        with self._changed:
            if self._folder is not None:
                for key in list(self._index.tiers["disk"].entries):
                    if not self._folder.exists(key):
                        self._index.pop("disk", key)
            for file in found:
                self._adopt(file)
            return self._index.drop_expired()

    def _adopt(self, file: FoundFile) -> None:
        """Takes a file found in the folder into the index, within the budget; deletes an unusable one."""
        assert self._folder is not None
        if file.key in self._index.tiers["disk"].entries or not self._folder.exists(file.key):
            return
        if file.trouble is not None:
            self._folder.drop_damaged(file.key, file.trouble)
        elif self._make_room_on_disk(file.nbytes):
            self._index.add("disk", self._entry_of(file))
        else:
            self._index.tiers["disk"].counts["evictions"] += 1
            self._folder.delete(file.key)

    def _entry_of(self, file: FoundFile) -> StoreEntry:
        left = math.inf if file.expires_at is None else file.expires_at - self._wall_clock()
        return IndexEntry(file.key, file.nbytes, None, self._index.clock() + left)

    def _make_room_on_disk(self, nbytes: int) -> bool:
        victims = self._index.victims("disk", nbytes)
        for victim in victims or ():
            self._index.evict(victim)
        return victims is not None

    def stats(self) -> StoreStats:
        """Counts and sizes, taken in one moment."""
        with self._changed:
            counts = {name: tier.counts for name, tier in self._index.tiers.items()}
            if self._folder is not None:
                counts["disk"] = counts["disk"] + self._folder.counts
            tiers = {
                name: TierStats(len(tier.entries), tier.used, tier.budget, **counts[name])
                for name, tier in self._index.tiers.items()
            }
            removed = len(self._index.held)
            return StoreStats(
                tiers=tiers,
                hits=sum(tier.hits for tier in tiers.values()),
                misses=self._misses,
                expired=self._index.expired,
                in_use=sum(entry.references > 0 for entry in self._device.entries.values()) + removed,
                pinned=len(self._index.pins),
                removed_in_use=removed,
            )

    def check_integrity(self, *, shared_folder: bool = False) -> None:
        """Raises IntegrityError naming the first broken invariant. Cheap enough to call whenever the engine is idle.

        Args:
            shared_folder: other processes write to the disk folder, so its files are not compared with the index.
        """
        with self._changed:
            self._index.check_integrity()
            for tier in (self._device, self._host):
                for key, entry in tier.entries.items():
                    size = entry.value.nbytes
                    check(f"{key} counted as {entry.size} bytes, has {size}", size == entry.size)
            check("no references on the host", not any(entry.references for entry in self._host.entries.values()))
            check("no key on device and host at once", self._device.entries.keys().isdisjoint(self._host.entries))
            ownerless = [key for key, claim in self._index.claims.items() if not claim.owner.is_alive()]
            check(f"no key in flight without an owner: {ownerless}", not ownerless)
            if self._folder is not None and not shared_folder:
                there = self._folder.sizes()
                listed = {key: entry.size for key, entry in self._index.tiers["disk"].entries.items()}
                different = sorted({key for key, _ in there.items() ^ listed.items()})
                said = ", ".join(f"{k}: {listed.get(k)} bytes listed, {there.get(k)} on disk" for k in different)
                check(f"disk index equals the folder: {said}", not different)

    # ---- claims and moving down ----

    def _claim(self, key: str) -> Claim:
        return self._index.claim(key, threading.current_thread())

    def _land(self, key: str, claim: Claim) -> None:
        if self._index.land(key, claim):
            self._changed.notify_all()

    def _evict(self, entry: StoreEntry, evicted: Evicted) -> None:
        """Takes an entry out of a memory tier, claimed until `_move_down` has put it below."""
        self._index.evict(entry)
        evicted.append((entry, self._claim(entry.key)))

    def _move_down(self, evicted: Evicted) -> None:
        """Puts evicted entries into the next tier with room (outside the lock); trouble loses entries, not requests."""
        try:
            for entry, claim in evicted:  # grows while we go: the host tier evicts too
                try:
                    _ = self._put_on_host(entry, claim, evicted) or self._put_on_disk(entry, claim)
                except Exception:
                    logger.exception("could not move the PICache %s to a lower tier; dropping it", entry.key)
                with self._changed:
                    self._land(entry.key, claim)
        finally:
            with self._changed:
                for entry, claim in evicted:
                    self._land(entry.key, claim)
            evicted.clear()

    def _put_on_host(self, entry: StoreEntry, claim: Claim, evicted: Evicted) -> bool:
        if entry.tier == "host" or not self._host.admits(entry.size) or self._is_over(entry):
            return False
        copy = IndexEntry(entry.key, entry.size, entry.value.to("cpu"), entry.expires_at)
        with self._changed:
            victims = None if claim.dropped else self._index.victims("host", entry.size)
            if victims is None:
                return False
            for victim in victims:
                self._evict(victim, evicted)
            self._index.add("host", copy)
            return True

    def _put_on_disk(self, entry: StoreEntry, claim: Claim) -> bool:
        """Writes an entry whose key is claimed, unless its file is there; False if there is no room or it failed."""
        folder = self._folder
        if folder is None or self._is_over(entry) or not (disk := self._index.tiers["disk"]).admits(entry.size):
            return False
        with self._changed:
            if entry.key in disk.entries and folder.exists(entry.key):
                disk.touch(entry.key)
                return True
            self._index.pop("disk", entry.key)  # its file vanished
        left = entry.expires_at - self._index.clock()
        data = serialize(entry.value, entry.key, expires_at=None if math.isinf(left) else self._wall_clock() + left)
        temporary = folder.stage(data)
        if temporary is None:
            return False
        with self._changed:
            kept = not claim.dropped and self._make_room_on_disk(len(data)) and folder.commit(temporary, entry.key)
            if kept:
                self._index.add("disk", IndexEntry(entry.key, len(data), None, entry.expires_at))
            else:
                folder.discard(temporary)
        return kept

    def _is_over(self, entry: StoreEntry) -> bool:
        return entry.expires_at <= self._index.clock()

    def flush(self) -> int:
        """Writes what is only in memory to the disk tier, and leaves it where it is; returns how many were written.

        Entries that another thread is working on are left to it. Without a disk tier nothing happens.
        """
        if self._folder is None:
            return 0
        written = 0
        with self._changed:
            entries = [*self._host.entries.values(), *self._device.entries.values()]
        for entry in entries:
            key = entry.key
            with self._changed:
                current = any(tier.entries.get(key) is entry for tier in (self._device, self._host))
                if not current or key in self._index.claims or key in self._index.tiers["disk"].entries:
                    continue
                claim = self._claim(key)
            try:
                written += self._put_on_disk(entry, claim)
            finally:
                with self._changed:
                    self._land(key, claim)
        return written


def checked_key(key: str) -> str:
    """`key` if it can be one. Raises ValueError."""
    if not isinstance(key, str) or not _KEY.fullmatch(key):
        raise ValueError(f"a key expects 1 to 128 letters, digits, '_', '-', '.' (content_key gives such), got {key!r}")
    return key
