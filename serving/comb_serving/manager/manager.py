"""The PIC manager: which document is where in the pool, who uses it, and what makes room for another.

One event loop owns it, so nothing here locks: between two ``await`` no other request runs. A document is encoded once,
however many requests want it (single flight), and only those wait. The index (`comb.cache.index`) counts blocks. Each
request has a reference to each of its documents, and so has the encoder while it writes one. What nobody refers to or
has pinned goes, least recently used first, when room is needed. Where only documents in use are in the way, a request
waits in a queue for their end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from comb.cache.index import CacheIndex, IndexEntry, Tier
from comb.cache.picache import content_key, document_of
from comb_serving.encoding.protocol import MADE, Encoded, EncoderError, Encoders
from comb_serving.linking.layout import LinkingLayout
from comb_serving.manager.counters import Counters
from comb_serving.manager.leases import (
    DocumentsTooLargeError,
    Lease,
    LeasedDocument,
    PoolFullError,
    PoolPinnedError,
    TenantQuotaError,
    WaitQueue,
    WantedDocument,
)
from comb_serving.pool.capability import PoolHandle
from comb_serving.pool.shared_pool import PoolLayout

PoolEntry = IndexEntry[PoolHandle]

NO_PLACE = (DocumentsTooLargeError, EncoderError, PoolFullError, PoolPinnedError, TenantQuotaError)
"""Why `PICManager.acquire` has no lease: what stands in a prompt anyway is computed with it then."""


@dataclass
class PICManager:
    """Leases of documents in a pool of `layout`, filled by `encoders`."""

    layout: PoolLayout | LinkingLayout
    encoders: Encoders
    wait_seconds: float = 0.0  # longest wait for room in the pool
    clock: Callable[[], float] = time.monotonic  # for expiry
    counters: Counters = field(default_factory=Counters)
    held_share: float = 1.0  # of the pool's blocks that one tenant may hold: in use or pinned
    pinned_share: float = 1.0  # that it may pin
    waiting: int = 0  # requests, for encoders

    def __post_init__(self) -> None:
        self.pool: Tier[PoolHandle] = Tier(self.layout.num_blocks)
        # what is evicted may come back from lower tiers, what is removed or over must not
        dropped = self.encoders.forget
        self.index = CacheIndex({"pool": self.pool}, clock=self.clock, freed=self._freed, dropped=dropped)
        self.free_blocks = list(range(self.layout.num_blocks))
        self.queue = WaitQueue()
        self.owners: dict[str, str] = {}  # tenants of the documents in the pool, whose keys are all different
        self._encoding: dict[PoolEntry, asyncio.Future[Encoded]] = {}

    async def keys(self, segments: Sequence[Sequence[int]], tenant: str) -> list[str]:
        """Content keys, different for every tenant.

        Raises:
            DocumentsTooLargeError: for a document longer than the encoder takes.
            ValueError: for ids that the model doesn't know.
            EncoderError: if there is no encoder.
        """
        identity = await self.encoders.identity()
        for ids in segments:
            if len(ids) > identity.max_document_tokens:
                raise DocumentsTooLargeError(
                    f"a document has {len(ids)} tokens, the encoder takes at most {identity.max_document_tokens}: "
                    "split it into several documents"
                )
            bad = next((token for token in ids if not 0 <= token < identity.vocab_size), None)
            if bad is not None:
                raise ValueError(f"token id {bad} is not in 0..{identity.vocab_size - 1}: another model's tokenizer?")
        made_by = {"fingerprint": identity.fingerprint, "method": identity.method, "dtype": identity.dtype}
        return [content_key(ids, **made_by, salt=tenant) for ids in segments]

    # ---- leases ----

    async def acquire(self, wanted: Sequence[WantedDocument]) -> Lease:
        """A lease of documents, all or none; encodes what isn't in the pool and waits for it.

        Raises:
            DocumentsTooLargeError: together, each as often as it is given, they have more blocks than the pool.
            PoolFullError: no room within `wait_seconds`.
            PoolPinnedError: no room as long as other documents are pinned.
            TenantQuotaError: the tenant would hold more than its share.
            EncoderError: a document could not be encoded.
            asyncio.CancelledError: then the documents are encoded all the same, for the next who asks.
        """
        unique = {document.key: document for document in wanted}
        # the pool holds a document that is given many times once; a layer of the decoder gathers it as often as given
        blocks = self._blocks(wanted)
        if blocks > self.layout.num_blocks:
            raise DocumentsTooLargeError(
                f"the documents, each as often as it is given, have {blocks} blocks of {self.layout.block_size} "
                f"tokens, the pool {self.layout.num_blocks}: send fewer, or start the server with a larger "
                "--comb-pool-bytes"
            )
        start = time.monotonic()
        entries, found = await self._in_turn(unique)
        entered = time.monotonic()
        flights = {key: self._encoding[entry] for key, entry in entries.items() if entry in self._encoding}
        try:
            if flights:
                self.waiting += 1
                try:
                    # asyncio.wait leaves the futures alone when this request is cancelled: others may wait for them
                    await asyncio.wait(flights.values())
                finally:
                    self.waiting -= 1
                for entry in entries.values():
                    self._land(entry)
            tiers = {key: flight.result().tier for key, flight in flights.items()} | dict.fromkeys(found, "pool")
        except BaseException:
            self._release(entries.values())
            raise
        # a document named twice is one reference and two handles
        documents = tuple(LeasedDocument(d.key, entries[d.key].value, tiers[d.key]) for d in wanted)
        give_back = partial(self._release, tuple(entries.values()))
        return Lease(documents, [give_back], entered - start, time.monotonic() - entered)

    def hold(self, documents: Sequence[WantedDocument]) -> Lease:
        """A lease of those documents of one tenant that are in the pool now, none where they would be over its share.

        Nothing is encoded, and nobody waits.
        """
        unique = {}
        for document in documents:
            entry = self._present(document.key)
            if entry is not None and entry not in self._encoding:
                unique[document.key] = document
        try:
            self._check_share("hold", unique, self.held_share)
        except TenantQuotaError:
            unique = {}
        entries = self._refer(unique)
        held = tuple(LeasedDocument(d.key, entries[d.key].value, "pool") for d in documents if d.key in entries)
        return Lease(held, [partial(self._release, tuple(entries.values()))])

    async def _in_turn(self, unique: dict[str, WantedDocument]) -> tuple[dict[str, PoolEntry], set[str]]:
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

    def _enter(self, unique: dict[str, WantedDocument]) -> tuple[dict[str, PoolEntry], set[str]]:
        """References to all documents, those that are missing on their way to the encoder, and who was there already.

        Raises PoolFullError, PoolPinnedError or TenantQuotaError, having changed nothing.
        """
        self._check_pins(unique)
        self._check_share("hold", unique, self.held_share)
        found = self._refer(unique)  # before room is made, which must not be theirs
        sizes = {key: self._blocks([document]) for key, document in unique.items() if key not in found}
        needed = sum(sizes.values())
        if needed > len(self.free_blocks):
            for entry in list(self._encoding):
                self._land(entry)  # one that has failed gives blocks back
        if self.index.make_room("pool", needed) is None:
            self._release(found.values())
            raise PoolFullError(
                f"no room for {needed} blocks: {len(self.free_blocks)} of {self.layout.num_blocks} are free, and what "
                "else could go is in use or pinned; try again when requests have ended, or unpin documents"
            )
        entries = dict(found)
        for key, size in sizes.items():
            document = unique[key]
            handle = PoolHandle(len(document.token_ids), tuple(self.free_blocks.pop() for _ in range(size)))
            entries[key] = entry = IndexEntry(key, size, handle, references=2)  # of the request and of the encoder
            self.index.add("pool", entry)
            self.owners[key] = document.tenant
            self._encoding[entry] = self.encoders.submit(
                key, document.token_ids, handle, document.lora, exact=document.exact
            )
            self._encoding[entry].add_done_callback(partial(self._land, entry))
        return entries, set(found)

    def _refer(self, keys: Iterable[str]) -> dict[str, PoolEntry]:
        """New references to what is in the pool, or on its way there."""
        found = {key: entry for key in keys if (entry := self._present(key)) is not None}
        for entry in found.values():
            entry.references += 1
            self.pool.touch(entry.key)
        return found

    def _blocks(self, documents: Iterable[WantedDocument]) -> int:
        return sum(self.layout.blocks_for(len(document.token_ids)) for document in documents)

    def _check_pins(self, unique: dict[str, WantedDocument]) -> None:
        """Raises PoolPinnedError if the documents don't fit beside all others that are pinned."""
        needed = self._blocks(unique.values())
        if needed + self.index.pinned_size <= self.layout.num_blocks:
            return
        self.index.drop_expired()  # which ends their pins
        own = [entry for key in unique if key in self.index.pins and (entry := self.pool.entries.get(key)) is not None]
        pinned = self.index.pinned_size - sum(entry.size for entry in own)
        if needed + pinned > self.layout.num_blocks:
            raise PoolPinnedError(
                f"no room for {needed} blocks beside {pinned} of {self.layout.num_blocks} that pinned documents take: "
                "unpin some, or start the server with a larger --comb-pool-bytes"
            )

    def check_pin(self, document: WantedDocument) -> None:
        """Raises TenantQuotaError if pinning a document would be more than its tenant may pin."""
        self._check_share("pin", {document.key: document}, self.pinned_share)

    def _check_share(self, what: str, wanted: dict[str, WantedDocument], share: float) -> None:
        """Raises TenantQuotaError if documents, of one tenant, are more than it may hold or pin."""
        if share >= 1 or not wanted:
            return
        tenant = next(iter(wanted.values())).tenant
        held, pinned = self.blocks_of(tenant, besides=wanted)
        blocks, limit = self._blocks(wanted.values()), int(share * self.layout.num_blocks)
        blocks += pinned if what == "pin" else held
        if blocks > limit:
            raise TenantQuotaError(
                f"your key would {what} {blocks} of {self.layout.num_blocks} blocks, its share is {limit}: unpin "
                "documents, or try again when your requests have ended"
            )

    def blocks_of(self, tenant: str, besides: Container[str] = ()) -> tuple[int, int]:
        """Blocks that a tenant's documents hold, in use or pinned, and those that are pinned."""
        entries = [
            entry
            for entry in (*self.pool.entries.values(), *self.index.held)
            if self.owners.get(entry.key) == tenant and entry.key not in besides
        ]
        pinned = sum(entry.size for entry in entries if entry.key in self.index.pins)
        in_use = sum(entry.size for entry in entries if entry.references > 0 and entry.key not in self.index.pins)
        return pinned + in_use, pinned

    def _present(self, key: str) -> PoolEntry | None:
        """The entry of a document that is in the pool or on its way there."""
        entry = self.index.get(key)
        if entry is not None:
            self._land(entry)  # an encoding that has failed ends here
        return self.pool.entries.get(key)

    def _land(self, entry: PoolEntry, _: object = None) -> None:
        """Takes note of an encoding's end, whoever still waits for it; a second call does nothing."""
        flight = self._encoding.get(entry)
        if flight is None or not flight.done():
            return
        del self._encoding[entry]
        tokens = entry.value.tokens
        if flight.cancelled() or flight.exception() is not None:
            self.counters.count("failed", tokens)
            if self.pool.entries.get(entry.key) is entry:
                self.index.drop(entry.key)
        elif (tier := flight.result().tier) in MADE:
            self.counters.count(tier, tokens)
            self.counters.encode_seconds.observe(flight.result().seconds)
        else:
            self.counters.count("copied", tokens)
        if entry.key not in self.pool.entries:  # removed meanwhile, or its time is over: it was kept behind that
            self.encoders.forget(entry.key)
        self._release([entry])

    def _release(self, entries: Iterable[PoolEntry]) -> None:
        for entry in entries:
            self.index.release(entry)
        self.queue.wake()

    def _freed(self, entry: PoolEntry) -> None:
        if entry.key not in self.pool.entries:
            self.owners.pop(entry.key, None)
        self.free_blocks.extend(entry.value.blocks)
        self.queue.wake()

    # ---- pins, expiry, removal: what a catalog of documents asks of a store ----

    def pin(self, key: str) -> bool:
        """Keeps a document from being evicted until as many `unpin`; False if it isn't in the pool."""
        return self.index.pin(key)

    def unpin(self, key: str) -> bool:
        """Takes back one `pin`; False if there is none."""
        known = self.index.unpin(key)
        self.queue.wake()
        return known

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        """Gives a document a new time to live, from now; None: for ever. False if it isn't in the pool."""
        return self.index.set_expiry(key, ttl_s)

    def remove(self, key: str) -> bool:
        """Forgets a document, pinned or not, whatever has compiled it; who uses it keeps it to the end. False if it
        isn't in the pool."""
        name = document_of(key)
        self.index.drop_expired()
        known = [each for each in self.pool.entries if document_of(each) == name]
        for each in known:
            self.index.drop(each)
        self.encoders.forget(name)
        self.queue.wake()
        return bool(known)

    def lookup(self, key: str) -> bool:
        """Whether a document is in the pool, or on its way there."""
        return self.index.get(key) is not None

    # ---- state; what /metrics shows of it is read by another thread, so from copies ----

    def blocks_by_state(self) -> dict[str, int]:
        """Blocks that are free, pinned, or used otherwise."""
        free, pinned = len(self.free_blocks), self.index.pinned_size
        return {"free": free, "used": self.layout.num_blocks - free - pinned, "pinned": pinned}

    @property
    def references(self) -> int:
        """All references of all leases."""
        entries = (*self.pool.entries.values(), *self.index.held)
        return sum(entry.references for entry in entries) - len(self._encoding)

    @property
    def used_bytes(self) -> int:
        """Bytes of the blocks that are taken, of all of one rank's pool."""
        return self.pool.used * self.layout.block_size * self.layout.bytes_per_token
