"""The PICache store: a directory of PICaches by content key, with references, pins, LRU budgets, expiry and tiers.

    with store.acquire(keys, compile) as handles:      # looked up, or compiled once in one batch
        link([handle.picache for handle in handles])   # safe until released: in use is never evicted

An entry is used on the device tier. Making room there moves the least recently used down, device -> host -> disk ->
gone; a lookup brings it up again. A move up from the host takes the entry along; one from disk leaves the file, so
that the next move down costs nothing and a restart finds it. `flush` writes what is only in memory.

Thread-safe. One lock guards the directory; compiling, copying and file contents are handled outside of it, with the key
"in flight" and owned by one thread. Others who want the key wait for it, after finishing everything that they own
themselves, so no two threads wait for each other.

The size of a PICache is known only once it is compiled, and what is evicted for it is copied away only then: until the
call that compiles returns, the device needs room for its misses beyond the budget.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from comb.cache.index import Directory, Flight, IntegrityError, PICacheRef, PICacheRefs, StoreStats, checked_key
from comb.cache.picache import PICache
from comb.cache.picache_file import PICacheError
from comb.cache.tiers import IndexEntry, LRUTier

__all__ = [
    "IntegrityError",
    "PICacheRef",
    "PICacheRefs",
    "PICacheStore",
    "PICacheTooLargeError",
    "StoreFullError",
    "StoreStats",
]

logger = logging.getLogger(__name__)


class PICacheTooLargeError(ValueError):
    """One PICache needs more bytes than the whole device budget."""


class StoreFullError(RuntimeError):
    """No room on the device: what is there is in use or pinned. Worth trying again once requests have ended."""


@dataclass
class PendingAcquire:
    """One acquire under way: what it references, what it has claimed, and what it has evicted and must move down."""

    expires_at: float
    held: dict[str, tuple[IndexEntry, str]] = field(default_factory=dict)
    claimed: dict[str, Flight] = field(default_factory=dict)
    evicted: list[tuple[IndexEntry, LRUTier, Flight]] = field(default_factory=list)


class PICacheStore(Directory):
    """PICaches by content key, over the tiers device, host and disk.

    Pins are counted: as many `unpin` as `pin` calls. A pinned entry is never evicted from the tier it is in, but
    expiry, `remove` and `clear` end it and its pins: they say that the content must go, a pin only that it is worth
    keeping.

    Args:
        device: where PICaches are used.
        device_bytes: budget of the device tier; None: unbounded.
        host_bytes: budget of the host tier, for what the device has no room for; 0: no such tier.
        disk_path: folder of the disk tier, private and of its own; None: no such tier.
        disk_bytes: budget of the disk tier, in bytes of files; None: unbounded.
        clock: seconds, for TTLs in memory. wall_clock: seconds since the epoch, for TTLs on disk.
        wait_s: the longest wait for a key that another thread is compiling or moving.

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
        wall_clock: Callable[[], float] = time.time,
        wait_s: float = 600.0,
    ) -> None:
        super().__init__(
            device_bytes=device_bytes,
            host_bytes=host_bytes,
            disk_path=disk_path,
            disk_bytes=disk_bytes,
            clock=clock,
            wall_clock=wall_clock,
        )
        self.device = torch.device(device)
        self._wait_s = wait_s

    # ---- acquire ----

    def acquire(
        self,
        keys: Sequence[str],
        compile: Callable[[list[int]], Sequence[PICache]],
        *,
        ttl_s: float | None = None,
    ) -> PICacheRefs:
        """References to the PICaches of `keys`, all or none, each on the device.

        Args:
            keys: one per document; a key given twice is compiled once and referenced twice.
            compile: called without the lock with the indices (into `keys`) of the misses, in one batch; returns one
                PICache each. Called again for keys that another thread failed to compile.
            ttl_s: seconds after which what this call compiles expires; None: never. A hit keeps its own expiry.

        Raises:
            ValueError: a key that can't be a file name, `ttl_s` <= 0, or `compile` returned something else.
            PICacheTooLargeError, StoreFullError: no room; nothing was evicted in vain.
            TimeoutError: another thread didn't finish a key within `wait_s`.
            Exception: whatever `compile` raised. In all these cases every reference taken by the call is dropped.
        """
        positions: dict[str, int] = {}
        for index, key in enumerate(keys):
            positions.setdefault(checked_key(key), index)
        call = PendingAcquire(self._expiry(ttl_s))
        pending = list(positions)
        try:
            while pending:
                busy = self._claim(pending, call)
                self._finish_claims(positions, compile, call)
                self._settle(call)  # so nobody waits for us while we wait
                if busy:
                    self._wait_for_any(busy)
                pending = busy
            with self._changed:
                for key in keys:
                    call.held[key][0].references += 1
                return PICacheRefs(PICacheRef(self, *call.held[key]) for key in keys)
        finally:
            with self._changed:  # the handles have references of their own
                for entry, _ in call.held.values():
                    self._unreference(entry)
            self._settle(call)

    def _claim(self, pending: Iterable[str], call: PendingAcquire) -> list[str]:
        """References what is on the device, claims what nobody works on; returns the keys in flight elsewhere."""
        busy = []
        with self._changed:
            for key in pending:
                self._drop_if_expired(key)
                entry, flight = self._device.get(key), self._in_flight.get(key)
                if entry is not None:
                    entry.references += 1
                    self._device.touch(key)
                    self._device.stats.hits += 1
                    self._hits += 1
                    call.held[key] = entry, "device"
                elif flight is None:
                    self._device.stats.misses += 1
                    call.claimed[key] = self._in_flight[key] = Flight()
                elif flight.owner is threading.current_thread():
                    raise RuntimeError(f"compile asked the store for {key}, which it is compiling itself")
                else:
                    busy.append(key)
        return busy

    def _finish_claims(
        self, positions: dict[str, int], compile: Callable[[list[int]], Sequence[PICache]], call: PendingAcquire
    ) -> None:
        """Brings up or compiles all claimed keys, in one batch."""
        missing = [key for key in list(call.claimed) if not self._promote(key, call)]
        self._move_down(call.evicted)  # nobody should wait for these while we compile
        if missing:
            compiled = compile([positions[key] for key in missing])
            self._admit_compiled(missing, compiled, call)

    def _settle(self, call: PendingAcquire) -> None:
        """Whatever happened: no key stays in flight on the call's account."""
        with self._changed:
            for key, flight in call.claimed.items():
                self._land(key, flight)
            call.claimed.clear()
        self._move_down(call.evicted)

    def _promote(self, key: str, call: PendingAcquire) -> bool:
        """Brings a claimed key up from host or disk; False if it is in neither."""
        with self._changed:
            stored = self._host.get(key)  # stays there until admitted: a key in flight is not evicted
        if stored is not None:
            assert stored.picache is not None
            entry, source = (
                IndexEntry(key, stored.nbytes, stored.expires_at, stored.picache.to(self.device)),
                self._host,
            )
        else:
            with self._changed:
                self._host.stats.misses += 1
            found = self._read_from_disk(key)
            if found is None or self._disk is None:
                return False
            entry, source = found, self._disk.index
        with self._changed:
            self._admit([entry], call, source.name)
            self._host.pop(key)
            source.stats.hits += 1
            source.stats.promotions += 1
            self._hits += 1
        return True

    def _read_from_disk(self, key: str) -> IndexEntry | None:
        """A claimed key's entry with its PICache; None if there is none, it expired, or its file can't be used."""
        disk = self._disk
        if disk is None:
            return None
        # asked even if the index does not know the key: another process may have written the file
        try:
            picache, file = disk.read(key, self.device)
        except (OSError, PICacheError) as error:
            with self._changed:
                disk.index.stats.misses += 1
                if isinstance(error, FileNotFoundError):
                    disk.index.pop(key)
                else:
                    disk.drop_damaged(key, error)
            return None
        with self._changed:
            if file.expires_at <= self._clock():
                disk.index.stats.misses += 1
                self._expired += 1
                self._pins.pop(key, None)
                disk.remove(key)
                return None
            if key in disk.index.entries:
                disk.index.touch(key)
            else:
                disk.adopt(key, file, self._is_kept)
        return IndexEntry(key, picache.nbytes, file.expires_at, picache)

    def _admit_compiled(self, keys: list[str], compiled: Sequence[PICache], call: PendingAcquire) -> None:
        """Puts what `compile` returned on the device. Raises ValueError if it isn't one PICache per key."""
        if len(compiled) != len(keys) or not all(isinstance(picache, PICache) for picache in compiled):
            raise ValueError(f"compile expects to return one PICache for each of {len(keys)} indices, got {compiled!r}")
        own = [picache.to(self.device).standalone() for picache in compiled]
        entries = [IndexEntry(key, p.nbytes, call.expires_at, p) for key, p in zip(keys, own, strict=True)]
        with self._changed:
            self._admit(entries, call, "compiled")
            self._misses += len(entries)

    def _admit(self, entries: list[IndexEntry], call: PendingAcquire, tier: str) -> None:
        """Adds claimed entries to the device tier, referenced by `call`, or raises without having changed anything."""
        for entry in entries:
            if not self._device.admits(entry.nbytes):
                raise PICacheTooLargeError(
                    f"the PICache {entry.key} has {entry.nbytes} bytes, the whole device budget is "
                    f"{self._device.budget}; raise device_bytes, or split the document"
                )
        needed = sum(entry.nbytes for entry in entries)
        victims = self._device.victims(needed, self._is_kept)
        if victims is None:
            self._drop_all_expired()  # they may be pinned
            victims = self._device.victims(needed, self._is_kept)
        if victims is None:
            raise StoreFullError(
                f"no room for {needed} bytes ({len(entries)} documents): the device budget is {self._device.budget} "
                f"bytes, {self._device.used_bytes + self._device.held_bytes} are taken, and evicting what is neither "
                "in use nor pinned does not free enough; try again when requests have ended, unpin documents, use "
                "fewer per request, or raise device_bytes"
            )
        for victim in victims:
            self._evict(victim, self._device, call.evicted)
        for entry in entries:
            flight = call.claimed.pop(entry.key)
            entry.references = 1
            call.held[entry.key] = entry, tier
            if flight.dropped:  # removed while we worked on it: ours to use, nobody else's to find
                self._removed.add(entry)
                self._device.held_bytes += entry.nbytes
            else:
                self._device.add(entry)
            self._land(entry.key, flight)

    def _wait_for_any(self, busy: list[str]) -> None:
        with self._changed:
            if not self._changed.wait_for(
                lambda: any(key not in self._in_flight or key in self._device.entries for key in busy), self._wait_s
            ):
                raise TimeoutError(f"another thread has been compiling or moving {busy[0]} for over {self._wait_s} s")

    # ---- moving down ----

    def _evict(self, entry: IndexEntry, tier: LRUTier, evicted: list[tuple[IndexEntry, LRUTier, Flight]]) -> None:
        """Takes an entry out of a memory tier, in flight until `_move_down` has put it below."""
        tier.pop(entry.key)
        tier.stats.evictions += 1
        flight = self._in_flight[entry.key] = Flight()
        evicted.append((entry, tier, flight))

    def _move_down(self, evicted: list[tuple[IndexEntry, LRUTier, Flight]]) -> None:
        """Puts evicted entries into the next tier with room (outside the lock); trouble loses entries, not requests."""
        try:
            for entry, source, flight in evicted:  # grows while we go: the host tier evicts too
                try:
                    to_host = source is self._device and self._put_on_host(entry, flight, evicted)
                    if to_host or self._put_on_disk(entry, flight):
                        source.stats.demotions += 1
                except Exception:
                    logger.exception("could not move the PICache %s to a lower tier; dropping it", entry.key)
                with self._changed:
                    self._land(entry.key, flight)
        finally:
            with self._changed:
                for entry, _, flight in evicted:
                    self._land(entry.key, flight)
            evicted.clear()

    def _put_on_host(
        self, entry: IndexEntry, flight: Flight, evicted: list[tuple[IndexEntry, LRUTier, Flight]]
    ) -> bool:
        if not self._host.admits(entry.nbytes) or entry.picache is None or entry.expires_at <= self._clock():
            return False
        copy = IndexEntry(entry.key, entry.nbytes, entry.expires_at, entry.picache.to("cpu"))
        with self._changed:
            victims = None if flight.dropped else self._host.victims(entry.nbytes, self._is_kept)
            if victims is None:
                return False
            for victim in victims:
                self._evict(victim, self._host, evicted)
            self._host.add(copy)
            return True

    def _put_on_disk(self, entry: IndexEntry, flight: Flight) -> bool:
        """Writes an entry whose key is in flight, unless its file is there; False if there is no room or it failed."""
        disk = self._disk
        if disk is None or entry.expires_at <= self._clock() or not disk.index.admits(entry.nbytes):
            return False
        with self._changed:
            if entry.key in disk.index.entries and disk.exists(entry.key):
                disk.index.touch(entry.key)
                return True
            disk.index.pop(entry.key)  # its file vanished
        data = disk.encode(entry)
        file = IndexEntry(entry.key, len(data), entry.expires_at)
        with self._changed:
            if flight.dropped or not disk.make_room(file.nbytes, self._is_kept):
                return False
            disk.writing[file.key] = file.nbytes
            disk.index.held_bytes += file.nbytes
        temporary: Path | None = None
        try:
            temporary = disk.stage(data)
        finally:
            with self._changed:
                disk.index.held_bytes -= disk.writing.pop(file.key)
                written = self._commit(temporary, file, flight)
        return written

    def _commit(self, temporary: Path | None, file: IndexEntry, flight: Flight) -> bool:
        if self._disk is None or temporary is None:
            return False
        if flight.dropped:  # removed while it was being written
            self._disk.discard(temporary)
            return False
        return self._disk.commit(temporary, file)

    def flush(self) -> int:
        """Writes what is only in memory to the disk tier, and leaves it where it is; returns how many were written.

        Entries that another thread is working on are left to it. Without a disk tier nothing happens.
        """
        if self._disk is None:
            return 0
        written = 0
        with self._changed:
            entries = [*self._host.entries.values(), *self._device.entries.values()]
        for entry in entries:
            with self._changed:
                tiers = (self._device, self._host)
                current = any(tier.get(entry.key) is entry for tier in tiers)
                if not current or entry.key in self._in_flight or entry.key in self._disk.index.entries:
                    continue
                flight = self._in_flight[entry.key] = Flight()
            try:
                written += self._put_on_disk(entry, flight)
            finally:
                with self._changed:
                    self._land(entry.key, flight)
        return written
