"""The PICache store: PICaches by content key, with references, pins, LRU budgets, expiry and tiers.

    with store.acquire(keys, compile) as found:     # looked up, or compiled once in one batch
        link([ref.picache for ref in found])        # safe until released: in use is never evicted

An entry is used on the device tier. Making room there moves the least recently used down, device -> host -> disk ->
gone; a lookup brings it up again. A move up from the host takes the entry along; one from disk leaves the file, so
that the next move down costs nothing and a restart finds it. `flush` writes what is only in memory.

Thread-safe. One lock guards the index; compiling, copying and file contents are handled outside of it, with the key
claimed by one thread. Others who want the key wait for it, after finishing everything that they own themselves, so no
two threads wait for each other.

The size of a PICache is known only once it is compiled, and what is evicted for it is copied away only then: until the
call that compiles returns, the device needs room for its misses beyond the budget.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from comb.cache.index import Claim, IndexEntry
from comb.cache.picache import PICache
from comb.cache.picache_file import PICacheError
from comb.cache.tiers import Evicted, StoreEntry, StoreTiers, checked_key


class PICacheTooLargeError(ValueError):
    """One PICache needs more bytes than the whole device budget."""


class StoreFullError(RuntimeError):
    """No room on the device: what is there is in use or pinned. Worth trying again once requests have ended."""


class PICacheRef(AbstractContextManager["PICacheRef"]):
    """A reference to one PICache, which stays on the device meanwhile. Release it in `finally`, or use `with`.

    On a GPU, release it when the work that reads it is done, or queued on the stream that its tensors were made on.

    hit: whether it was found, not compiled. tier: where it was found: "device", "host", "disk", or "compiled".
    """

    def __init__(self, store: PICacheStore, entry: StoreEntry, tier: str) -> None:
        self.key = entry.key
        self.tier = tier
        self.hit = tier != "compiled"
        self._store = store
        self._entry: StoreEntry | None = entry

    @property
    def picache(self) -> PICache:
        """The PICache, on the store's device. Raises RuntimeError after `release`."""
        if self._entry is None:
            raise RuntimeError(f"PICache {self.key} was used after its reference was released; acquire it again")
        picache: PICache = self._entry.value
        return picache

    def release(self) -> None:
        """Drops the reference; a second call does nothing."""
        with self._store._changed:
            entry, self._entry = self._entry, None
            if entry is not None:
                self._store._index.release(entry)

    def __exit__(self, *_: object) -> None:
        self.release()


class PICacheRefs(list[PICacheRef], AbstractContextManager["PICacheRefs"]):
    """The references of one `acquire`, in the order of its keys; leaving the `with` block releases them all."""

    def release(self) -> None:
        """Drops all of them."""
        for ref in self:
            ref.release()

    def __exit__(self, *_: object) -> None:
        self.release()


@dataclass
class PendingAcquire:
    """One acquire under way: what it references, what it has claimed, and what it has evicted and must move down."""

    expires_at: float
    held: dict[str, tuple[StoreEntry, str]] = field(default_factory=dict)
    claimed: dict[str, Claim] = field(default_factory=dict)
    evicted: Evicted = field(default_factory=list)


class PICacheStore(StoreTiers):
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
        budgets = {"device": device_bytes, "host": host_bytes, "disk": disk_bytes}
        super().__init__(budgets, None if disk_path is None else Path(disk_path).expanduser(), clock, wall_clock)
        self.device = torch.device(device)
        self._wait_s = wait_s

    def acquire(
        self, keys: Sequence[str], compile: Callable[[list[int]], Sequence[PICache]], *, ttl_s: float | None = None
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
        pending = PendingAcquire(self._index.expiry(ttl_s))
        wanted = list(positions)
        try:
            while wanted:
                wanted = self._claim_missing(wanted, pending)
                missing = [key for key in list(pending.claimed) if not self._promote(key, pending)]
                self._move_down(pending.evicted)  # nobody should wait for these while we compile
                if missing:
                    compiled = compile([positions[key] for key in missing])
                    self._admit_compiled(missing, compiled, pending)
                self._settle(pending)  # so nobody waits for us while we wait
                self._wait_for_any(wanted)
            with self._changed:
                for key in keys:
                    pending.held[key][0].references += 1
                return PICacheRefs(PICacheRef(self, *pending.held[key]) for key in keys)
        finally:
            with self._changed:  # what is returned has references of its own
                for entry, _ in pending.held.values():
                    self._index.release(entry)
            self._settle(pending)

    def _claim_missing(self, wanted: Iterable[str], pending: PendingAcquire) -> list[str]:
        """References what is on the device, claims what nobody works on; returns the keys that others have claimed."""
        busy = []
        with self._changed:
            for key in wanted:
                entry, claim = self._index.get(key), self._index.claims.get(key)
                if entry is not None and entry.tier == "device":
                    self._hold(entry, "device", pending)
                    self._device.touch(key)
                elif claim is None:
                    pending.claimed[key] = self._claim(key)
                elif claim.owner is threading.current_thread():
                    raise RuntimeError(f"compile asked the store for {key}, which it is compiling itself")
                else:
                    busy.append(key)
        return busy

    def _hold(self, entry: StoreEntry, tier: str, pending: PendingAcquire) -> None:
        entry.references += 1
        pending.held[entry.key] = entry, tier
        if tier == "compiled":
            self._misses += 1
        else:
            self._index.tiers[tier].counts["hits"] += 1

    def _settle(self, pending: PendingAcquire) -> None:
        """Whatever happened: no key stays claimed on the call's account."""
        with self._changed:
            for key, claim in pending.claimed.items():
                self._land(key, claim)
            pending.claimed.clear()
        self._move_down(pending.evicted)

    def _promote(self, key: str, pending: PendingAcquire) -> bool:
        """Brings a claimed key up from host or disk; False if it is in neither."""
        with self._changed:
            stored = self._host.entries.get(key)  # stays there until admitted: what is claimed is not evicted
        if stored is not None:
            entry = IndexEntry(key, stored.size, stored.value.to(self.device), stored.expires_at)
            self._admit([entry], "host", pending)
            return True
        found = self._read_from_disk(key)
        if found is not None:
            self._admit([found], "disk", pending)
        return found is not None

    def _read_from_disk(self, key: str) -> StoreEntry | None:
        """A claimed key's entry with its PICache; None if there is none, it expired, or its file can't be used."""
        folder = self._folder
        if folder is None:
            return None
        try:  # even if the index does not know the key: another process may have written the file
            picache, file = folder.read(key, self.device)
        except (OSError, PICacheError) as error:
            with self._changed:
                self._index.pop("disk", key)
                if not isinstance(error, FileNotFoundError):
                    folder.drop_damaged(key, error)
            return None
        with self._changed:
            on_disk = self._entry_of(file)
            if self._is_over(on_disk):
                self._index.pop("disk", key)
                self._index.pins.pop(key, None)
                self._index.expired += 1
                folder.delete(key)
                return None
            if key in self._index.tiers["disk"].entries:
                self._index.tiers["disk"].touch(key)
            else:
                self._adopt(file)
        return IndexEntry(key, picache.nbytes, picache, on_disk.expires_at)

    def _admit_compiled(self, keys: list[str], compiled: Sequence[PICache], pending: PendingAcquire) -> None:
        """Puts what `compile` returned on the device. Raises ValueError if it isn't one PICache per key."""
        if len(compiled) != len(keys) or not all(isinstance(picache, PICache) for picache in compiled):
            raise ValueError(f"compile expects to return one PICache for each of {len(keys)} indices, got {compiled!r}")
        own = [picache.to(self.device).standalone() for picache in compiled]
        entries = [IndexEntry(key, p.nbytes, p, pending.expires_at) for key, p in zip(keys, own, strict=True)]
        self._admit(entries, "compiled", pending)

    def _admit(self, entries: Sequence[StoreEntry], tier: str, pending: PendingAcquire) -> None:
        """Adds claimed entries to the device tier, referenced, or raises without having changed anything."""
        for entry in entries:
            if not self._device.admits(entry.size):
                raise PICacheTooLargeError(
                    f"the PICache {entry.key} has {entry.size} bytes, the whole device budget is "
                    f"{self._device.budget}; raise device_bytes, or split the document"
                )
        needed = sum(entry.size for entry in entries)
        with self._changed:
            victims = self._index.victims("device", needed)
            if victims is None:
                self._index.drop_expired()  # they may be pinned
                victims = self._index.victims("device", needed)
            if victims is None:
                raise StoreFullError(
                    f"no room for {needed} bytes ({len(entries)} documents): the device budget is "
                    f"{self._device.budget} bytes, {self._device.used} are taken, and evicting what is neither in use "
                    "nor pinned does not free enough; try again when requests have ended, unpin documents, use fewer "
                    "per request, or raise device_bytes"
                )
            for victim in victims:
                self._evict(victim, pending.evicted)
            for entry in entries:
                claim = pending.claimed.pop(entry.key)
                self._hold(entry, tier, pending)
                if claim.dropped:  # removed while we worked on it: ours to use, nobody else's to find
                    self._index.hold("device", entry)
                else:
                    self._index.pop("host", entry.key)
                    self._index.add("device", entry)
                self._land(entry.key, claim)

    def _wait_for_any(self, busy: list[str]) -> None:
        def one_is_free() -> bool:
            return any(key not in self._index.claims or key in self._device.entries for key in busy)

        with self._changed:
            if busy and not self._changed.wait_for(one_is_free, self._wait_s):
                raise TimeoutError(f"another thread has been compiling or moving {busy[0]} for over {self._wait_s} s")
