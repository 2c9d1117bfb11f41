"""The PIC manager: which document is where in the pool, who uses it, and what makes room for another.

One event loop owns it, so nothing here locks: between two ``await`` no other request runs. A document is encoded once,
however many requests want it (single flight), and only those wait. References are counted per lease; what has one, is
pinned or is being encoded keeps its blocks. Everything else goes, least recently used first, when room is needed.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from comb.directory import IntegrityError
from comb.picache import content_key
from comb_serving.blocks import BlockAllocator
from comb_serving.counters import Counters
from comb_serving.encoders import Encoded, Encoders, Identity
from comb_serving.handles import Handle
from comb_serving.pool import PoolLayout


class PoolFullError(RuntimeError):
    """No room: what is in the pool is in use or pinned. Worth trying again once requests have ended."""


class DocumentsTooLargeError(ValueError):
    """Documents of one request that the encoder or the whole pool can't take; trying again won't help."""


@dataclass(frozen=True)
class Wanted:
    """A document of a request: its key (`PICManager.keys`) and its token ids."""

    key: str
    token_ids: tuple[int, ...]


@dataclass(eq=False)
class _Entry:
    """A document in the pool. `encoded` is the flight that fills its blocks; None once it has landed."""

    key: str
    handle: Handle
    encoded: asyncio.Future[Encoded] | None
    references: int = 0
    pins: int = 0
    expires_at: float = math.inf
    removed: bool = False


@dataclass(frozen=True)
class Held:
    """A document of a lease.

    Args:
        hit: it was in the pool, or on its way there for someone else.
        tier: where it came from: "pool", "host", "disk" or "encoded".
    """

    key: str
    handle: Handle
    hit: bool
    tier: str


class Lease:
    """The documents of one request, in order, which stay in the pool until `release`. Release it in `finally`."""

    def __init__(self, manager: PICManager, entries: Sequence[_Entry], documents: Sequence[Held]) -> None:
        self.documents = tuple(documents)
        self._manager = manager
        self._entries: tuple[_Entry, ...] = tuple(entries)

    @property
    def handles(self) -> list[Handle]:
        """What the worker needs."""
        return [document.handle for document in self.documents]

    def release(self) -> None:
        """Drops the references; a second call does nothing."""
        entries, self._entries = self._entries, ()
        self._manager._release(entries)


@dataclass
class PICManager:
    """Leases of documents in a pool of `layout`, filled by `encoders`.

    Args:
        clock: seconds, for expiry.
    """

    layout: PoolLayout
    encoders: Encoders
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    waiting: int = 0
    _entries: OrderedDict[str, _Entry] = field(default_factory=OrderedDict)
    _leaving: set[_Entry] = field(default_factory=set)  # gone from lookup, their blocks still in use

    def __post_init__(self) -> None:
        self.blocks = BlockAllocator(self.layout.num_blocks)

    async def identity(self) -> Identity:
        """What the encoder says about its weights. Raises EncoderError if there is none."""
        return await self.encoders.identity()

    async def keys(self, segments: Sequence[Sequence[int]], tenant: str) -> list[str]:
        """Content keys, different for every tenant.

        Raises:
            DocumentsTooLargeError: for a document longer than the encoder takes.
            ValueError: for ids that the model doesn't know.
            EncoderError: if there is no encoder.
        """
        identity = await self.identity()
        for ids in segments:
            if len(ids) > identity.max_document_tokens:
                raise DocumentsTooLargeError(
                    f"a document has {len(ids)} tokens, the encoder takes at most {identity.max_document_tokens}: "
                    "split it into several documents"
                )
            bad = next((token for token in ids if not 0 <= token < identity.vocab_size), None)
            if bad is not None:
                raise ValueError(f"token id {bad} is not in 0..{identity.vocab_size - 1}: another model's tokenizer?")
        made_by = {"fingerprint": identity.fingerprint, "method": "comb", "dtype": identity.dtype, "salt": tenant}
        return [content_key(ids, **made_by) for ids in segments]

    # ---- leases ----

    async def acquire(self, wanted: Sequence[Wanted]) -> Lease:
        """A lease of documents, all or none; encodes what isn't in the pool and waits for it.

        Raises:
            DocumentsTooLargeError: together they need more blocks than there are.
            PoolFullError: no room now.
            EncoderError: a document could not be encoded.
            asyncio.CancelledError: then the documents are encoded all the same, for the next who asks.
        """
        unique = {document.key: document for document in wanted}
        needed = sum(self.layout.blocks_for(len(document.token_ids)) for document in unique.values())
        if needed > self.layout.num_blocks:
            raise DocumentsTooLargeError(
                f"the documents need {needed} blocks of {self.layout.block_size} tokens, the pool has "
                f"{self.layout.num_blocks}: send fewer, or start the server with a larger --comb-pool-bytes"
            )
        for key in unique:
            self._drop_if_expired(key)
        found = {key: self._entries[key] for key in unique if key in self._entries}
        entries = {**found, **self._admit([document for key, document in unique.items() if key not in found], found)}
        for entry in found.values():
            self.counters.count("hit", entry.handle.tokens)
        for entry in entries.values():
            entry.references += 1
            self._entries.move_to_end(entry.key)
        held = tuple(entries.values())
        try:
            tiers = await self._landed(entries)
        except BaseException:
            self._release(held)
            raise
        # a document named twice is one reference and two handles
        documents = [
            Held(d.key, entries[d.key].handle, d.key in found, "pool" if d.key in found else tiers[d.key])
            for d in wanted
        ]
        return Lease(self, held, documents)

    def _admit(self, missing: Sequence[Wanted], keep: dict[str, _Entry]) -> dict[str, _Entry]:
        """New entries with blocks, on their way to the encoder. Raises PoolFullError, having changed nothing."""
        if not missing:
            return {}
        sizes = [self.layout.blocks_for(len(document.token_ids)) for document in missing]
        self._make_room(sum(sizes), keep)
        admitted = {}
        for document, size in zip(missing, sizes, strict=True):
            handle = Handle(len(document.token_ids), self.blocks.allocate(size))
            flight = self.encoders.submit(document.key, document.token_ids, handle)
            entry = self._entries[document.key] = _Entry(document.key, handle, flight)
            admitted[document.key] = entry
            flight.add_done_callback(partial(self._when_done, entry))
        return admitted

    def _make_room(self, needed: int, keep: dict[str, _Entry]) -> None:
        for entry in list(self._entries.values()):
            self._land(entry)
        missing = needed - self.blocks.free
        if missing > 0:
            self._drop_all_expired()
            missing = needed - self.blocks.free
        victims = []
        for entry in self._entries.values():
            if missing <= 0:
                break
            if not self._is_kept(entry) and entry.key not in keep:
                victims.append(entry)
                missing -= len(entry.handle.blocks)
        if missing > 0:
            self.counters.refused += 1
            raise PoolFullError(
                f"no room for {needed} blocks: {self.blocks.free} of {self.layout.num_blocks} are free, and what else "
                "could go is in use or pinned; try again when requests have ended, or unpin documents"
            )
        for entry in victims:
            self.counters.evictions += 1
            self._forget(entry)

    async def _landed(self, entries: dict[str, _Entry]) -> dict[str, str]:
        """Waits for everything under way; the tiers of what was."""
        flights = {key: entry.encoded for key, entry in entries.items() if entry.encoded is not None}
        if not flights:
            return {}
        self.waiting += 1
        try:
            # asyncio.wait leaves the futures alone when this request is cancelled: others may wait for them
            await asyncio.wait(flights.values())
        finally:
            self.waiting -= 1
        for entry in entries.values():
            self._land(entry)
        return {key: flight.result().tier for key, flight in flights.items()}

    def _when_done(self, entry: _Entry, _: object) -> None:
        self._land(entry)

    def _land(self, entry: _Entry) -> None:
        """Takes note of a flight's end, whoever still waits for it; a second call does nothing."""
        flight = entry.encoded
        if flight is None or not flight.done():
            return
        entry.encoded = None
        if flight.cancelled() or flight.exception() is not None:
            self.counters.count("failed", entry.handle.tokens)
            if not entry.removed:
                self._forget(entry)
        elif flight.result().tier == "encoded":
            self.counters.count("encoded", entry.handle.tokens)
            self.counters.encode_seconds.observe(flight.result().seconds)
        else:
            self.counters.count("copied", entry.handle.tokens)
        self._free_if_unused(entry)

    def _release(self, entries: Sequence[_Entry]) -> None:
        for entry in entries:
            entry.references -= 1
            self._free_if_unused(entry)

    # ---- pins, expiry, removal: what `comb.library.Library` asks of a store ----

    def pin(self, key: str) -> bool:
        """Keeps a document from being evicted until as many `unpin`; False if it isn't in the pool."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.pins += 1
        return entry is not None

    def unpin(self, key: str) -> bool:
        """Takes back one `pin`; False if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.pins == 0:
            return False
        entry.pins -= 1
        return True

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        """Gives a document a new time to live, from now; None: for ever. False if it isn't in the pool."""
        entry = self._entries.get(key)
        if entry is not None:
            entry.expires_at = math.inf if ttl_s is None else self.clock() + ttl_s
        return entry is not None

    def remove(self, key: str) -> bool:
        """Forgets a document, pinned or not; who uses it keeps it to the end. False if it isn't in the pool."""
        entry = self._entries.get(key)
        if entry is not None:
            self._forget(entry)
        return entry is not None

    def lookup(self, key: str) -> bool:
        """Whether a document is in the pool, or on its way there."""
        self._drop_if_expired(key)
        return key in self._entries

    def _forget(self, entry: _Entry) -> None:
        del self._entries[entry.key]
        entry.removed = True
        self._leaving.add(entry)
        self._free_if_unused(entry)

    def _free_if_unused(self, entry: _Entry) -> None:
        if entry.removed and entry.references == 0 and entry.encoded is None and entry in self._leaving:
            self._leaving.remove(entry)
            self.blocks.release(entry.handle.blocks)

    def _drop_if_expired(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at <= self.clock():
            self.counters.expired += 1
            self._forget(entry)

    def _drop_all_expired(self) -> None:
        for key in list(self._entries):
            self._drop_if_expired(key)

    @staticmethod
    def _is_kept(entry: _Entry) -> bool:
        return entry.references > 0 or entry.pins > 0 or entry.encoded is not None

    # ---- state ----

    def blocks_by_state(self) -> dict[str, int]:
        """Blocks that are free, pinned, or used otherwise."""
        pinned = sum(len(entry.handle.blocks) for entry in tuple(self._entries.values()) if entry.pins)
        free = self.blocks.free
        return {"free": free, "used": self.layout.num_blocks - free - pinned, "pinned": pinned}

    @property
    def references(self) -> int:
        """All references of all leases."""
        return sum(entry.references for entry in (*self._entries.values(), *self._leaving))

    @property
    def documents(self) -> int:
        """Documents in the pool."""
        return len(self._entries)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are taken, of all of one rank's pool."""
        return (self.layout.num_blocks - self.blocks.free) * self.layout.block_size * self.layout.bytes_per_token

    async def settle(self) -> None:
        """Waits until nothing is being encoded; for tests and orderly ends."""
        while flights := [e.encoded for e in (*self._entries.values(), *self._leaving) if e.encoded is not None]:
            await asyncio.wait(flights)
            await asyncio.sleep(0)

    def check_integrity(self) -> None:
        """Raises IntegrityError naming the first broken invariant."""
        entries = [*self._entries.values(), *self._leaving]
        blocks = [block for entry in entries for block in entry.handle.blocks]
        _check("no block belongs to two documents", len(set(blocks)) == len(blocks))
        _check("taken blocks are those of documents", set(blocks) == self.blocks.taken)
        _check("free and taken blocks are all", self.blocks.free + len(blocks) == self.layout.num_blocks)
        _check("references and pins >= 0", all(entry.references >= 0 and entry.pins >= 0 for entry in entries))
        _check("entries are listed under their keys", all(key == entry.key for key, entry in self._entries.items()))
        _check("entries in lookup aren't removed", not any(entry.removed for entry in self._entries.values()))
        _check(
            "what has left is in use or being written",
            all(entry.references > 0 or entry.encoded is not None for entry in self._leaving),
        )
        for entry in entries:
            size = self.layout.blocks_for(entry.handle.tokens)
            _check(f"{entry.key[:12]} has {size} blocks", len(entry.handle.blocks) == size)


def _check(invariant: str, holds: bool) -> None:
    if not holds:
        raise IntegrityError(f"PIC manager: broken invariant: {invariant}")
