"""The documents known by id: what `add_documents` took, until it is removed or its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

from comb.cache.picache import document_of


class UnknownDocumentError(ValueError):
    """A document id that was never added, has been removed, or has expired."""


@dataclass(frozen=True)
class KeyedSegment:
    """A tokenised document, or one part of it where a splitter made several."""

    id: str  # the document's label in reports
    token_ids: tuple[int, ...]  # of this part
    key: str  # of its PICache
    part: int = 0  # a document's parts follow each other


def by_document(segments: Sequence[KeyedSegment]) -> list[list[KeyedSegment]]:
    """Segments in order, those of one document together."""
    documents: list[list[KeyedSegment]] = []
    for segment in segments:
        if segment.part == 0:
            documents.append([])
        documents[-1].append(segment)
    return documents


@dataclass(frozen=True)
class _CatalogEntry:
    segments: tuple[KeyedSegment, ...]
    pin: bool
    expires_at: float | None
    pinned: dict[tuple[int, ...], str] = field(default_factory=dict)  # by a part's tokens, whose pin the store has

    @property
    def id(self) -> str:
        return self.segments[0].id

    @cached_property
    def keys(self) -> set[str]:
        return {segment.key for segment in self.segments}  # later also those of other weights

    @property
    def token_ids(self) -> tuple[int, ...]:
        return tuple(token for segment in self.segments for token in segment.token_ids)


class CatalogStore(Protocol):
    """What a catalog asks of the store that keeps the PICaches, see `comb.cache.store.PICacheStore`."""

    def pin(self, key: str) -> bool: ...

    def unpin(self, key: str) -> bool: ...

    def set_expiry(self, key: str, ttl_s: float | None) -> bool: ...

    def remove(self, key: str) -> bool: ...


@dataclass
class DocumentCatalog:
    """Ids to segments. Token ids stay here, so an evicted PICache is compiled again, never missed.

    Thread-safe. The store's pins follow the ids: each pinned id holds one, from the time when the store has something
    to pin.
    """

    store: CatalogStore
    clock: Callable[[], float] = time.monotonic
    _entries: dict[str, _CatalogEntry] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, documents: Sequence[Sequence[KeyedSegment]]) -> None:
        """Raises ValueError if an id stands for another text, here or within `documents`."""
        with self._lock:
            self._forget_expired()
            asked = [_CatalogEntry(tuple(segments), False, None) for segments in documents]
            known = self._entries.keys() & {entry.id for entry in asked}  # not all: there may be very many
            meaning = {name: self._entries[name].token_ids for name in known}
        for entry in asked:
            if meaning.setdefault(entry.id, entry.token_ids) != entry.token_ids:
                raise ValueError(
                    f"document id {entry.id!r} stands for another text already: "
                    f"remove_documents([{entry.id!r}]) first, or choose another id"
                )

    def add(self, segments: Sequence[KeyedSegment], *, pin: bool, ttl: float | None) -> None:
        """Adds or renews one document. `ttl` in seconds; None is for ever.

        Whose PICaches the caller doesn't hold now gets its pin by `pin`.
        """
        entry = _CatalogEntry(tuple(segments), pin, None if ttl is None else self.clock() + ttl)
        with self._lock:
            before = self._entries.get(entry.id)
            self._entries[entry.id] = entry
            for segment in entry.segments:
                self._follow(entry, segment)
            if before is not None:
                self._unpin(before)
                entry.keys.update(before.keys)

    def follow(self, segments: Sequence[KeyedSegment]) -> None:
        """Gives PICaches that were compiled again (evicted, or of other weights) the time and the pins of their ids."""
        new = {segment.key: segment for segment in segments}
        with self._lock:
            for segment in segments:
                entry = self._entries.get(segment.id)
                if entry is not None and any(segment.token_ids == each.token_ids for each in entry.segments):
                    entry.keys.add(segment.key)
            known = [(entry, new[key]) for entry in self._entries.values() for key in entry.keys if key in new]
            for entry, segment in known:
                self._follow(entry, segment)

    def unpinned(self, segments: Iterable[KeyedSegment]) -> list[KeyedSegment]:
        """Those of pinned documents that the store had nothing of when they were added."""
        found = []
        with self._lock:
            for segment in segments:
                entry = self._entries.get(segment.id)
                if entry is not None and entry.pin and segment.key in entry.keys.difference(entry.pinned.values()):
                    found.append(segment)
        return found

    def pin(self, segment: KeyedSegment) -> None:
        """Pins the PICache of an `unpinned` segment, which the caller holds, until its id's time is over."""
        with self._lock:
            self._forget_expired()
            if (entry := self._entries.get(segment.id)) is not None:
                self._follow(entry, segment)

    def find(self, ids: Iterable[str]) -> list[KeyedSegment]:
        """The segments of `ids`, in order. Raises UnknownDocumentError naming the first that isn't here."""
        with self._lock:
            return [segment for entry in self._find(ids) for segment in entry.segments]

    def ids(self) -> list[str]:
        """All ids, in the order in which they were added."""
        with self._lock:
            self._forget_expired()
            return list(self._entries)

    def remove(self, ids: Iterable[str]) -> None:
        """Forgets `ids`, and the PICaches that no other id stands for. Raises UnknownDocumentError, removing none."""
        with self._lock:
            self._drop(self._find(ids))

    def _follow(self, entry: _CatalogEntry, segment: KeyedSegment) -> None:
        """Gives the store's PICache the time of its ids, and the pin of this one."""
        left, key, before = None, segment.key, entry.pinned.get(segment.token_ids)
        if entry.expires_at is not None:  # who stays for ever needn't be compared with all others
            ends, now = [each.expires_at for each in self._entries.values() if key in each.keys], self.clock()
            if None not in ends:  # a store takes no time that has just ended
                left = max(1e-3, *(end - now for end in ends if end is not None))
        self.store.set_expiry(key, left)
        if entry.pin and key != before and self.store.pin(key):
            entry.pinned[segment.token_ids] = key
            if before is not None:  # of other weights: else each change of theirs would leave one that stays
                self.store.unpin(before)

    def _find(self, ids: Iterable[str]) -> list[_CatalogEntry]:
        if isinstance(ids, str):
            raise ValueError(f"document ids come as a list: write [{ids!r}]")
        self._forget_expired()
        found = []
        for name in ids:
            entry = self._entries.get(name)
            if entry is None:
                raise UnknownDocumentError(
                    f"unknown document id {name!r}: it was never added, was removed, or its ttl has passed; "
                    "add_documents() gives ids, and text goes into documents="
                )
            found.append(entry)
        return found

    def _forget_expired(self) -> None:
        now = self.clock()
        expired = [e for e in self._entries.values() if e.expires_at is not None and e.expires_at <= now]
        if expired:
            self._drop(expired)

    def _drop(self, gone: Sequence[_CatalogEntry]) -> None:
        """Forgets entries, and takes what no other id stands for out of the store, which forgets the time of what it
        evicts."""
        for entry in gone:
            if self._entries.pop(entry.id, None) is not None:  # the same one may be asked for twice
                self._unpin(entry)
        kept = {document_of(key) for entry in self._entries.values() for key in entry.keys}
        for key in {key for entry in gone for key in entry.keys}:
            if document_of(key) not in kept:
                self.store.remove(key)

    def _unpin(self, entry: _CatalogEntry) -> None:
        for key in entry.pinned.values():
            self.store.unpin(key)
