"""The documents an engine knows by id: what `add_documents` took, until it is removed or its time is over."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from comb.store import PICacheStore


class UnknownDocumentError(ValueError):
    """A document id that was never added, has been removed, or has expired."""


@dataclass(frozen=True)
class Segment:
    """A tokenised document: its label in reports, its token ids, and the key of its PICache."""

    id: str
    token_ids: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class _Entry:
    segment: Segment
    pinned: bool
    expires_at: float | None


@dataclass
class Library:
    """Ids to segments. Token ids stay here, so an evicted PICache is compiled again, never missed.

    Thread-safe. The store's pins follow the ids: each pinned id holds one.
    """

    store: PICacheStore
    clock: Callable[[], float] = time.monotonic
    _entries: dict[str, _Entry] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, segments: Sequence[Segment]) -> None:
        """Raises ValueError if an id stands for another text, here or within `segments`."""
        with self._lock:
            self._forget_expired()
            meaning = {name: entry.segment.token_ids for name, entry in self._entries.items()}
        for segment in segments:
            if meaning.setdefault(segment.id, segment.token_ids) != segment.token_ids:
                raise ValueError(
                    f"document id {segment.id!r} stands for another text already: "
                    f"remove_documents([{segment.id!r}]) first, or choose another id"
                )

    def add(self, segment: Segment, *, pin: bool, ttl: float | None) -> None:
        """Adds or renews one id, whose PICache the caller holds. `ttl` in seconds; None is for ever."""
        entry = _Entry(segment, pin, None if ttl is None else self.clock() + ttl)
        with self._lock:
            before = self._entries.get(segment.id)
            self._entries[segment.id] = entry
            self.store.set_expiry(segment.key, self._longest_left(segment.key))
            if pin:
                self.store.pin(segment.key)
            if before is not None:
                self._unpin(before)

    def find(self, ids: Iterable[str]) -> list[Segment]:
        """The segments of `ids`, in order. Raises UnknownDocumentError naming the first that isn't here."""
        with self._lock:
            return [entry.segment for entry in self._find(ids)]

    def remove(self, ids: Iterable[str]) -> None:
        """Forgets `ids`, and the PICaches that no other id stands for. Raises UnknownDocumentError, removing none."""
        with self._lock:
            found = self._find(ids)
            for entry in found:
                if self._entries.pop(entry.segment.id, None) is not None:
                    self._unpin(entry)
            kept = {entry.segment.key for entry in self._entries.values()}
            for entry in found:
                if entry.segment.key not in kept:
                    self.store.remove(entry.segment.key)

    def _longest_left(self, key: str) -> float | None:
        """Seconds until the last id of a content expires; None if one never does."""
        ends = [entry.expires_at for entry in self._entries.values() if entry.segment.key == key]
        now = self.clock()
        return None if None in ends else max(end - now for end in ends if end is not None)

    def _find(self, ids: Iterable[str]) -> list[_Entry]:
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
        for entry in expired:
            del self._entries[entry.segment.id]
            self._unpin(entry)

    def _unpin(self, entry: _Entry) -> None:
        if entry.pinned:
            self.store.unpin(entry.segment.key)
