"""The PICache store: PICaches by content key, with references, pins, LRU budgets, expiry and tiers.

    with store.acquire(keys) as held:
        while missing := held.missing():            # each is compiled by one thread, for all who want it
            held.add(compile(missing))
        link([held[key].picache for key in keys])   # safe until released: in use is never evicted

An entry is used on the device tier. Making room there moves the least recently used down, device -> host -> disk ->
gone; a lookup brings it up again. A move up from the host takes the entry along; one from disk leaves the file, so
that the next move down costs nothing and a restart finds it. `flush` writes what is only in memory. What has a time to
live stays in memory.

Thread-safe. One lock guards the index; compiling, copying and file contents are handled outside of it, with the key
claimed by one thread. Others who want the key wait for it, after finishing everything that they own themselves, so no
two threads wait for each other.

The size of a PICache is known only once it is compiled, and what is evicted for it is copied away only then: until
`add` returns, the device needs room for its misses beyond the budget.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

import torch

from comb.cache.index import CacheIndex, Claim, IndexEntry
from comb.cache.picache import PICache, document_of
from comb.cache.tiers import DiskTier, MemoryTier, StoreEntry

logger = logging.getLogger(__name__)

# keys are file names, so nothing that leads out of a folder or hides a file
_KEY = re.compile(r"[0-9A-Za-z_][0-9A-Za-z._-]{0,127}")


class PICacheTooLargeError(ValueError):
    """One PICache needs more bytes than the whole device budget."""


class StoreFullError(RuntimeError):
    """No room on the device: what is there is in use or pinned. Worth trying again once requests have ended."""


@dataclass(frozen=True)
class PICacheRef:
    """One PICache that a call holds, on the store's device."""

    key: str
    picache: PICache
    tier: str
    """Where it was found: "device", "host", "disk", or "compiled" where it wasn't."""

    @property
    def hit(self) -> bool:
        """Whether it was found, not compiled."""
        return self.tier != "compiled"


class AcquiredPICaches(Mapping[str, PICacheRef], AbstractContextManager["AcquiredPICaches"]):
    """What one `PICacheStore.acquire` holds, by key: never evicted until it is released, in `finally` or by `with`.

    On a GPU, release it when the work that reads it is done, or queued on the stream that its tensors were made on.
    """

    def __init__(self, store: PICacheStore, keys: Sequence[str], expires_at: float) -> None:
        self._store, self._expires_at = store, expires_at
        self._wanted = list(keys)  # neither held nor claimed
        self._held: dict[str, tuple[StoreEntry, str]] = {}  # and the tier that each was found in
        self._claimed: dict[str, Claim] = {}
        self._evicted: list[tuple[StoreEntry, Claim]] = []  # to be moved down

    def missing(self) -> list[str]:
        """Keys that the caller is to compile and `add`, while others wait for them; none once all are held.

        Waits for what others are compiling, if nothing else is missing; what they failed to compile is missing here.
        """
        index, device, changed = self._store._index, self._store._device, self._store._changed
        while not self._claimed and self._wanted:
            with changed:
                while all(key in index.claims and key not in device.entries for key in self._wanted):
                    changed.wait()
            self._take()
        return list(self._claimed)

    def add(self, picaches: Sequence[PICache]) -> None:
        """Takes what the caller has compiled: one PICache for each of `missing`, in that order.

        Raises:
            ValueError: something else was given.
            PICacheTooLargeError, StoreFullError: no room; nothing was evicted in vain.
        """
        keys = list(self._claimed)
        if len(picaches) != len(keys) or not all(isinstance(picache, PICache) for picache in picaches):
            raise ValueError(f"expected one PICache for each of {len(keys)} missing keys, got {picaches!r}")
        entries = []
        for key, picache in zip(keys, picaches, strict=True):
            own = picache.to(self._store.device).standalone()
            entries.append(IndexEntry(key, own.nbytes, own, self._expires_at))
        self._admit(entries, "compiled")
        self._store._move_down(self._evicted)

    def release(self) -> None:
        """Lets go of everything; a second call does nothing."""
        store = self._store
        with store._changed:
            for entry, _ in self._held.values():
                store._index.release(entry)
            for key, claim in self._claimed.items():
                store._land(key, claim)
            self._held, self._claimed, self._wanted = {}, {}, []
        store._move_down(self._evicted)

    def _take(self) -> None:
        """Holds what is here, and claims what nobody works on."""
        store, busy = self._store, []
        with store._changed:
            for key in self._wanted:
                entry, claim = store._index.get(key), store._index.claims.get(key)
                if entry is not None and entry.tier == "device":
                    self._hold(entry, "device")
                    store._device.touch(key)
                elif claim is None:
                    self._claimed[key] = store._index.claim(key, threading.current_thread())
                elif claim.owner is threading.current_thread():
                    raise RuntimeError(f"this thread wants {key}, which it is compiling itself")
                else:
                    busy.append(key)
            self._wanted = busy
        for key in list(self._claimed):  # those that a lower tier has are brought up to the device
            with store._changed:
                entry = store._index.get(key)  # stays there until admitted: what is claimed is not evicted
            if entry is None:
                continue
            picache = store._tiers[entry.tier].read(entry)
            if picache is None:  # its file can't be used
                with store._changed:
                    store._index.pop(entry.tier, key)
                continue
            above = store._device.put(IndexEntry(key, picache.nbytes, picache, entry.expires_at))
            self._admit([above], entry.tier)
        store._move_down(self._evicted)  # nobody should wait for these while we compile

    def _admit(self, entries: Sequence[StoreEntry], tier: str) -> None:
        """Adds claimed entries, found in `tier`, to the device and holds them, or raises and has changed nothing."""
        store, device = self._store, self._store._device
        for entry in entries:
            if not device.takes(entry):
                raise PICacheTooLargeError(
                    f"the PICache {entry.key} has {entry.size} bytes, the whole device budget is "
                    f"{device.budget}; raise device_bytes, or split the document"
                )
        with store._changed:
            if not store._admit(entries, "device", self._evicted):
                needed = sum(entry.size for entry in entries)
                raise StoreFullError(
                    f"no room for {needed} bytes ({len(entries)} documents): the device budget is "
                    f"{device.budget} bytes, {device.used} are taken, and evicting what is neither in use "
                    "nor pinned does not free enough; try again when requests have ended, unpin documents, use fewer "
                    "per request, or raise device_bytes"
                )
            for entry in entries:
                store._index.pop("host", entry.key)
                self._hold(entry, tier)
                claim = self._claimed.pop(entry.key)
                if claim.dropped:  # removed while we worked on it: ours to use, nobody else's to find
                    store._index.drop(entry.key)
                store._land(entry.key, claim)

    def _hold(self, entry: StoreEntry, tier: str) -> None:
        entry.references += 1
        self._held[entry.key] = entry, tier
        if tier == "compiled":
            self._store._misses += 1
        else:
            self._store._tiers[tier].counts["hits"] += 1

    def __getitem__(self, key: str) -> PICacheRef:
        if key not in self._held:
            raise KeyError(f"PICache {key} is not held: it is missing, or was released; acquire it again")
        entry, tier = self._held[key]
        return PICacheRef(key, entry.value, tier)

    def __iter__(self) -> Iterator[str]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass(frozen=True)
class TierStats:
    """A tier's size now, and counts since the store was made."""

    entries: int
    bytes: int
    budget_bytes: int | None
    hits: int = 0  # keys found in this tier
    evictions: int = 0  # entries that left for lack of room
    damaged: int = 0  # unusable files met
    write_errors: int = 0  # files that could not be written


@dataclass(frozen=True)
class StoreStats:
    """The store now, and counts since it was made."""

    tiers: dict[str, TierStats]
    hits: int  # distinct keys per acquire call that were found, in any tier
    misses: int  # ... that had to be compiled
    expired: int
    in_use: int  # entries with a reference
    pinned: int
    removed_in_use: int  # of those in use, gone from lookup


class PICacheStore:
    """PICaches by content key, over the tiers device, host and disk.

    Pins are counted: as many `unpin` as `pin` calls. A pinned entry is never evicted from the tier it is in, but
    expiry, `remove` and `clear` end it and its pins: they say that the content must go, a pin only that it is worth
    keeping.

    Args:
        device: where PICaches are used.
        device_bytes: budget of the device tier; None: unbounded.
        host_bytes: budget of the host tier, for what the device has no room for; 0: no such tier.
        disk_path: folder of the disk tier, private and of one process at a time; None: no such tier.
        disk_bytes: budget of the disk tier, in bytes of files; None: unbounded.
        clock: seconds, for times to live.

    Raises:
        ValueError: a negative budget, or a folder that can't be used.
    """

    def __init__(
        self,
        *,
        device: torch.device | str = "cpu",
        device_bytes: int | None = None,
        host_bytes: int = 0,
        disk_path: Path | str | None = None,
        disk_bytes: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, budget in {"device": device_bytes, "host": host_bytes, "disk": disk_bytes}.items():
            if budget is not None and not (isinstance(budget, int | float) and budget >= 0):
                raise ValueError(f"{name}_bytes expects a number of bytes >= 0, got {budget!r}")
        self.device = torch.device(device)
        self._device, self._host = MemoryTier(device_bytes, device), MemoryTier(host_bytes, "cpu")
        self._tiers: dict[str, MemoryTier | DiskTier] = {"device": self._device, "host": self._host}
        disk = None if disk_path is None else DiskTier(disk_bytes, Path(disk_path).expanduser())
        if disk is not None:
            self._tiers["disk"] = disk
        self._index = CacheIndex(self._tiers, clock=clock, freed=lambda entry: self._tiers[entry.tier].freed(entry))
        self._changed = threading.Condition()
        self._misses = 0
        for entry in disk.found() if disk is not None else ():
            if self._index.make_room("disk", entry.size) is None:
                self._index.freed(entry)
            else:
                self._index.add("disk", entry)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a PICacheStore, and a PICEngine with it, can't be copied or pickled: make one in each process")

    def acquire(self, keys: Sequence[str], *, ttl_s: float | None = None) -> AcquiredPICaches:
        """Holds the PICaches of `keys` that are here, on the device; the caller compiles those that are `missing`.

        Args:
            keys: one per document; one that is given twice is held once.
            ttl_s: seconds after which what is added expires; None: never. A hit keeps its own expiry.

        Raises:
            ValueError: a key that can't be a file name, or `ttl_s` <= 0.
            StoreFullError: no room on the device for what is in lower tiers.
            RuntimeError: this thread is compiling one of them already.
        """
        for key in keys:
            if not isinstance(key, str) or not _KEY.fullmatch(key):
                raise ValueError(
                    f"a key expects 1 to 128 letters, digits, '_', '-', '.' (content_key gives such), got {key!r}"
                )
        held = AcquiredPICaches(self, list(dict.fromkeys(keys)), self._index.expiry(ttl_s))
        try:
            held._take()
        except BaseException:
            held.release()
            raise
        return held

    def _land(self, key: str, claim: Claim) -> None:
        """Ends a claim, unless that has happened already."""
        if self._index.claims.get(key) is claim:
            del self._index.claims[key]
            self._changed.notify_all()

    def _admit(self, entries: Sequence[StoreEntry], tier: str, evicted: list[tuple[StoreEntry, Claim]]) -> bool:
        """Adds entries to a tier, evicting what it takes; False, having changed nothing, if there is no such room."""
        victims = self._index.make_room(tier, sum(entry.size for entry in entries))
        if victims is None:
            return False
        evicted += [(victim, self._index.claim(victim.key, threading.current_thread())) for victim in victims]
        for entry in entries:
            self._index.add(tier, entry)
        return True

    def _move_down(self, evicted: list[tuple[StoreEntry, Claim]]) -> None:
        """Puts evicted entries into the next tier with room (outside the lock); trouble loses entries, not requests."""
        names = list(self._tiers)
        try:
            for entry, claim in evicted:  # grows while we go: lower tiers evict too
                try:
                    any(self._keep(entry, claim, name, evicted) for name in names[names.index(entry.tier) + 1 :])
                except Exception:
                    logger.exception("could not move the PICache %s to a lower tier; dropping it", entry.key)
                with self._changed:
                    self._land(entry.key, claim)
        finally:
            with self._changed:
                for entry, claim in evicted:
                    self._land(entry.key, claim)
            evicted.clear()

    def _keep(self, entry: StoreEntry, claim: Claim, name: str, evicted: list[tuple[StoreEntry, Claim]]) -> bool:
        """Puts an entry whose key is claimed into a lower tier, unless it is there; False if there is no room."""
        tier = self._tiers[name]
        with self._changed:
            if entry.key in tier.entries:
                tier.touch(entry.key)
                return True
        kept = tier.put(entry) if tier.takes(entry) else None
        if kept is None:
            return False
        with self._changed:  # it may have been removed, or been given a time to live
            done = not claim.dropped and tier.takes(entry) and self._admit([kept], name, evicted)
            if not done:
                tier.freed(kept)
        return done

    def flush(self) -> int:
        """Writes what is only in memory to the disk tier, and leaves it where it is; returns how many were written.

        Entries that another thread is working on are left to it. Without a disk tier nothing happens.
        """
        written = 0
        with self._changed:
            entries = [*self._host.entries.values(), *self._device.entries.values()] if "disk" in self._tiers else []
        for entry in entries:
            key, evicted = entry.key, list[tuple[StoreEntry, Claim]]()
            with self._changed:
                current = self._tiers[entry.tier].entries.get(key) is entry
                if not current or key in self._index.claims or key in self._tiers["disk"].entries:
                    continue
                claim = self._index.claim(key, threading.current_thread())
            try:
                written += self._keep(entry, claim, "disk", evicted)
            finally:
                with self._changed:
                    self._land(key, claim)
                self._move_down(evicted)
        return written

    def lookup(self, key: str) -> str | None:
        """The uppermost tier that has `key` ("device", "host", "disk"), or None; takes no reference, moves nothing."""
        with self._changed:
            entry = self._index.get(key)
            return None if entry is None else entry.tier

    def pin(self, key: str) -> bool:
        """Keeps `key` from being evicted until as many `unpin`; False (no pin) if it is neither here nor coming."""
        with self._changed:
            return self._index.pin(key)

    def unpin(self, key: str) -> bool:
        """Takes back one `pin`; False if there is none."""
        with self._changed:
            return self._index.unpin(key)

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        """Gives an entry in memory a new time to live, from now; None: for ever. False if it isn't in memory.

        With an end, its copy on disk is deleted. Raises ValueError if `ttl_s` <= 0.
        """
        with self._changed:
            entry = self._index.get(key)
            if entry is None or entry.tier == "disk":
                return False
            self._index.set_expiry(key, ttl_s)
            if ttl_s is not None and "disk" in self._tiers and (copy := self._index.pop("disk", key)) is not None:
                self._index.freed(copy)
            return True

    def remove(self, key: str) -> bool:
        """Forgets `key` in all tiers, pinned or not; True if it was there (or being compiled or moved).

        In use, it stays valid for those who hold it, and its memory is freed at the last release. Being compiled, the
        result goes to those who asked for it and is not stored.
        """
        with self._changed:
            self._index.get(key)  # what has expired isn't there
            return self._index.drop(key)

    def remove_document(self, name: str) -> None:
        """As `remove`, of one key or, given a `document_key`, of all that begin with it: whatever has compiled it."""
        with self._changed:
            for key in {*self._index.claims, *(key for tier in self._tiers.values() for key in tier.entries)}:
                if name in (key, document_of(key)):
                    self._index.drop(key)

    def clear(self) -> None:
        """Removes every entry from every tier, pins included."""
        with self._changed:
            self._index.clear()

    def stats(self) -> StoreStats:
        """Counts and sizes, taken in one moment."""
        with self._changed:
            tiers = {
                name: TierStats(len(tier.entries), tier.used, tier.budget, **tier.counts)
                for name, tier in self._tiers.items()
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
