"""The PIC manager: which document is where in the pool, who uses it, and what makes room for another.

One event loop owns it, so nothing here locks: between two ``await`` no other request runs. A document is encoded once,
however many requests want it (single flight), and only those wait. References are counted per lease; what has one, is
pinned or is being encoded keeps its blocks. Everything else goes, least recently used first, when room is needed. Where
only documents in use are in the way, a request waits in line for their end.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from comb.cache.index import IntegrityError
from comb.cache.picache import content_key
from comb_serving.encoding.supervisor import Encoders, Identity
from comb_serving.manager.counters import Counters
from comb_serving.manager.leases import (
    DocumentsTooLargeError,
    Lease,
    LeasedDocument,
    PooledDocument,
    PoolFullError,
    PoolPinnedError,
    WantedDocument,
)
from comb_serving.manager.wait_queue import WaitQueue
from comb_serving.pool.blocks import BlockAllocator
from comb_serving.pool.handles import PoolHandle
from comb_serving.pool.pool import PoolLayout


@dataclass
class PICManager:
    """Leases of documents in a pool of `layout`, filled by `encoders`.

    Args:
        wait_seconds: longest wait for room in the pool.
        clock: seconds, for expiry.
    """

    layout: PoolLayout
    encoders: Encoders
    wait_seconds: float = 0.0
    clock: Callable[[], float] = time.monotonic
    counters: Counters = field(default_factory=Counters)
    waiting: int = 0
    _entries: OrderedDict[str, PooledDocument] = field(default_factory=OrderedDict)
    _leaving: set[PooledDocument] = field(default_factory=set)  # gone from lookup, their blocks still in use
    _pinned_blocks: int = 0

    def __post_init__(self) -> None:
        self.blocks = BlockAllocator(self.layout.num_blocks)
        self.queue = WaitQueue()

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

    async def acquire(self, wanted: Sequence[WantedDocument]) -> Lease:
        """A lease of documents, all or none; encodes what isn't in the pool and waits for it.

        Raises:
            DocumentsTooLargeError: together, each as often as it is given, they have more blocks than the pool.
            PoolFullError: no room within `wait_seconds`.
            PoolPinnedError: no room as long as other documents are pinned.
            EncoderError: a document could not be encoded.
            asyncio.CancelledError: then the documents are encoded all the same, for the next who asks.
        """
        unique = {document.key: document for document in wanted}
        # the pool holds a document that is given many times once; a layer of the decoder gathers it as often as given
        blocks = sum(self.layout.blocks_for(len(document.token_ids)) for document in wanted)
        if blocks > self.layout.num_blocks:
            raise DocumentsTooLargeError(
                f"the documents, each as often as it is given, have {blocks} blocks of {self.layout.block_size} "
                f"tokens, the pool {self.layout.num_blocks}: send fewer, or start the server with a larger "
                "--comb-pool-bytes"
            )
        start = time.monotonic()
        try:
            entries, found = await self._in_turn(unique)
        except (PoolFullError, PoolPinnedError):
            self.counters.refused += 1
            raise
        entered = time.monotonic()
        held = tuple(entries.values())
        try:
            tiers = await self._landed(entries)
        except BaseException:
            self._release(held)
            raise
        # a document named twice is one reference and two handles
        documents = [
            LeasedDocument(d.key, entries[d.key].handle, "pool" if d.key in found else tiers[d.key]) for d in wanted
        ]
        times = {"room_seconds": entered - start, "encode_seconds": time.monotonic() - entered}
        return Lease(documents, partial(self._release, held), **times)

    async def _in_turn(self, unique: dict[str, WantedDocument]) -> tuple[dict[str, PooledDocument], set[str]]:
        """`_enter`, at once where nobody is overtaken who waits for room, else when its turn has come."""
        needs_no_room = all(self._present(key) is not None for key in unique)
        # what is in the pool takes no room from those who wait, but keeps it from becoming free: not for too long
        if not len(self.queue) or (needs_no_room and self.queue.longest_wait < self.wait_seconds / 2):
            try:
                return self._enter(unique)
            except PoolFullError:
                if self.wait_seconds <= 0:
                    raise
        self._check_pins(unique)
        try:
            async with asyncio.timeout(self.wait_seconds):
                return await self.queue.wait(partial(self._enter, unique))
        except TimeoutError:
            raise PoolFullError(
                f"no room within {self.wait_seconds:g} s: the documents in the pool are in use or pinned; try again "
                "when requests have ended"
            ) from None

    def _enter(self, unique: dict[str, WantedDocument]) -> tuple[dict[str, PooledDocument], set[str]]:
        """References to all documents, those that are missing on their way to the encoder, and who was there already.

        Raises PoolFullError or PoolPinnedError, having changed nothing.
        """
        self._check_pins(unique)
        found = {key: entry for key in unique if (entry := self._present(key)) is not None}
        for entry in found.values():
            entry.references += 1  # before room is made, which must not be theirs
            self._entries.move_to_end(entry.key)
        try:
            admitted = self._admit([document for key, document in unique.items() if key not in found])
        except BaseException:
            self._release(tuple(found.values()))
            raise
        for entry in found.values():
            self.counters.count("hit", entry.handle.tokens)
        return {**found, **admitted}, set(found)

    def _check_pins(self, unique: dict[str, WantedDocument]) -> None:
        """Raises PoolPinnedError if the documents don't fit beside all others that are pinned."""
        needed = sum(self.layout.blocks_for(len(document.token_ids)) for document in unique.values())
        if needed + self._pinned_blocks <= self.layout.num_blocks:
            return
        self._drop_all_expired()  # which ends their pins
        own = [self._entries[key] for key in unique if key in self._entries]
        pinned = self._pinned_blocks - sum(len(entry.handle.blocks) for entry in own if entry.pins)
        if needed + pinned > self.layout.num_blocks:
            raise PoolPinnedError(
                f"no room for {needed} blocks beside {pinned} of {self.layout.num_blocks} that pinned documents take: "
                "unpin some, or start the server with a larger --comb-pool-bytes"
            )

    def _present(self, key: str) -> PooledDocument | None:
        """The entry of a document that is in the pool or on its way there."""
        self._drop_if_expired(key)
        if key in self._entries:
            self._land(self._entries[key])  # a flight that has failed ends here
        return self._entries.get(key)

    def _admit(self, missing: Sequence[WantedDocument]) -> dict[str, PooledDocument]:
        """New entries with blocks and a reference, on their way to the encoder.

        Raises PoolFullError, having changed nothing.
        """
        if not missing:
            return {}
        sizes = [self.layout.blocks_for(len(document.token_ids)) for document in missing]
        self._make_room(sum(sizes))
        admitted = {}
        for document, size in zip(missing, sizes, strict=True):
            handle = PoolHandle(len(document.token_ids), self.blocks.allocate(size))
            flight = self.encoders.submit(document.key, document.token_ids, handle)
            entry = self._entries[document.key] = PooledDocument(document.key, handle, flight, references=1)
            admitted[document.key] = entry
            flight.add_done_callback(partial(self._when_done, entry))
        return admitted

    def _make_room(self, needed: int) -> None:
        if needed > self.blocks.free:
            for entry in [entry for entry in self._entries.values() if entry.encoded is not None]:
                self._land(entry)
            self._drop_all_expired()
        missing = needed - self.blocks.free
        victims = []
        for entry in self._entries.values():
            if missing <= 0:
                break
            if not self._is_kept(entry):
                victims.append(entry)
                missing -= len(entry.handle.blocks)
        if missing > 0:
            raise PoolFullError(
                f"no room for {needed} blocks: {self.blocks.free} of {self.layout.num_blocks} are free, and what else "
                "could go is in use or pinned; try again when requests have ended, or unpin documents"
            )
        for entry in victims:
            self.counters.evictions += 1
            self._forget(entry)

    async def _landed(self, entries: dict[str, PooledDocument]) -> dict[str, str]:
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

    def _when_done(self, entry: PooledDocument, _: object) -> None:
        self._land(entry)

    def _land(self, entry: PooledDocument) -> None:
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
        self.queue.wake()

    def _release(self, entries: Sequence[PooledDocument]) -> None:
        for entry in entries:
            entry.references -= 1
            self._free_if_unused(entry)
        self.queue.wake()

    # ---- pins, expiry, removal: what `comb.documents.catalog.DocumentCatalog` asks of a store ----

    def pin(self, key: str) -> bool:
        """Keeps a document from being evicted until as many `unpin`; False if it isn't in the pool."""
        entry = self._entries.get(key)
        if entry is not None:
            self._pinned_blocks += 0 if entry.pins else len(entry.handle.blocks)
            entry.pins += 1
        return entry is not None

    def unpin(self, key: str) -> bool:
        """Takes back one `pin`; False if there is none."""
        entry = self._entries.get(key)
        if entry is None or entry.pins == 0:
            return False
        entry.pins -= 1
        if entry.pins == 0:
            self._pinned_blocks -= len(entry.handle.blocks)
            self.queue.wake()
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

    def _forget(self, entry: PooledDocument) -> None:
        del self._entries[entry.key]
        self._pinned_blocks -= len(entry.handle.blocks) if entry.pins else 0
        entry.removed = True
        self._leaving.add(entry)
        self._free_if_unused(entry)
        self.queue.wake()

    def _free_if_unused(self, entry: PooledDocument) -> None:
        if entry.removed and entry.references == 0 and entry.encoded is None and entry in self._leaving:
            self._leaving.remove(entry)
            self.blocks.release(entry.handle.blocks)

    def _drop_if_expired(self, key: str) -> None:
        entry = self._entries.get(key)
        if entry is not None and entry.expires_at <= self.clock():
            self.counters.expired += 1
            self._forget(entry)

    def _drop_all_expired(self) -> None:
        now = self.clock()
        for key in [key for key, entry in self._entries.items() if entry.expires_at <= now]:
            self._drop_if_expired(key)

    @staticmethod
    def _is_kept(entry: PooledDocument) -> bool:
        return entry.references > 0 or entry.pins > 0 or entry.encoded is not None

    # ---- state ----

    def blocks_by_state(self) -> dict[str, int]:
        """Blocks that are free, pinned, or used otherwise."""
        free, pinned = self.blocks.free, self._pinned_blocks
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
        pinned = sum(len(entry.handle.blocks) for entry in self._entries.values() if entry.pins)
        _check("pinned blocks are those of pinned documents", pinned == self._pinned_blocks)
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
