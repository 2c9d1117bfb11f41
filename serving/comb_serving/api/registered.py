"""What tenants have registered: a catalog each and, for the next start, a file for each document in the disk folder."""

from __future__ import annotations

import asyncio
import errno
import hashlib
import json
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from comb.cache.picache import document_key, document_of
from comb.cache.tiers import SUFFIX as PICACHE
from comb.documents.catalog import CatalogStore, DocumentCatalog, KeyedSegment, UnknownDocumentError
from comb.files import private_folder, write_whole
from comb_serving.api.http import RequestError
from comb_serving.api.routes import DOCUMENTS

logger = logging.getLogger(__name__)

FOLDER, SUFFIX = "registrations", ".registration"
LOOK_SECONDS = 30.0
"""After which documents whose time is over are gone, if nobody asks before."""

Keys = Callable[[Sequence[tuple[int, ...]], str], Awaitable[list[str]]]  # of token ids, for a tenant


@dataclass
class _NotedStore:
    """A store that notes which documents are removed from it (`document_key`)."""

    store: CatalogStore
    removed: set[str] = field(default_factory=set)

    def pin(self, key: str) -> bool:
        return self.store.pin(key)

    def unpin(self, key: str) -> bool:
        return self.store.unpin(key)

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        return self.store.set_expiry(key, ttl_s)

    def remove(self, key: str) -> bool:
        self.removed.add(document_of(key))
        return self.store.remove(key)


class RegisteredDocuments:
    """The documents of all tenants.

    Args:
        store: keeps their PICaches.
        disk_path: outlives the server; None: a restart forgets them. ValueError for a folder that can't be used.
        tokenizer: fingerprint of the one whose ids they are.
    """

    def __init__(self, store: CatalogStore, disk_path: str | None = None, tokenizer: str = "") -> None:
        self._store, self._tokenizer = _NotedStore(store), tokenizer
        self._disk = None if disk_path is None else Path(disk_path)
        self._folder = None if self._disk is None else self._disk / FOLDER
        if self._folder is not None:
            private_folder(self._folder, SUFFIX)
        self._catalogs: dict[str, DocumentCatalog] = {}
        self._ends: dict[Path, float] = {}  # of files with a time to live, since the epoch
        self._changing = asyncio.Lock()
        self.restored = self._folder is None  # whether those of before a restart are there
        self._looking: asyncio.Task[None] | None = None

    def of(self, tenant: str) -> DocumentCatalog:
        """The documents of a tenant; changed by the methods here alone."""
        return self._catalogs.get(tenant) or DocumentCatalog(self._store)

    def check_restored(self) -> None:
        """Raises RequestError (503) while documents of before a restart may be missing."""
        if not self.restored:
            raise RequestError(503, "the server is starting: registered documents are not there yet", retry_after=2)

    def find(self, tenant: str, names: Sequence[Any]) -> list[KeyedSegment]:
        """Documents by the ids in a request. Raises RequestError: 400, 404, or as `check_restored`."""
        for name in names:
            if not isinstance(name, str):
                raise RequestError(400, f"a document's id is a text, not {type(name).__name__}", param="documents")
        if names:
            self.check_restored()
        catalog = self.of(tenant)
        try:
            return catalog.find(names)
        except UnknownDocumentError:
            known = set(catalog.ids())
            missing = next((name for name in names if name not in known), None)
            reason = f"unknown document {missing!r}: add it with POST {DOCUMENTS}"
            raise RequestError(404, reason, param="documents") from None

    async def add(
        self, tenant: str, segment: KeyedSegment, *, pin: bool, ttl: float | None, check: Callable[[], None]
    ) -> None:
        """Registers a document or renews it, unless `check` raises. RequestError: 503 if it can't be written."""

        async def work() -> None:
            async with self._changing:  # one at a time, of file and catalog together
                check()
                if self._folder is not None:
                    await _on_disk(partial(self._write, tenant, segment, pin, ttl))
                self._catalogs.setdefault(tenant, DocumentCatalog(self._store)).add([segment], pin=pin, ttl=ttl)

        await asyncio.shield(work())  # to the end, whoever leaves meanwhile

    def keep(self, tenant: str, segment: KeyedSegment, ttl: float, check: Callable[[KeyedSegment], None]) -> None:
        """Registers and pins for a time what is leased, unless `check` raises; a restart forgets it."""
        if self._changing.locked():  # as in `pin`; a client that asks again has it kept then
            return
        # an id of the server's own, whose time mustn't end a document that a client has named
        named = replace(segment, id=f"cached-{segment.id}")
        check(named)
        self._catalogs.setdefault(tenant, DocumentCatalog(self._store)).add([named], pin=True, ttl=ttl)

    async def remove(self, tenant: str, name: str) -> None:
        """Forgets a document. Raises UnknownDocumentError; RequestError: 503 if its file can't be deleted."""

        async def work() -> None:
            async with self._changing:
                self.of(tenant).find([name])
                if self._folder is not None:
                    await _on_disk(partial(_unlink, self._path(tenant, name)))
                self.of(tenant).remove([name])
                await self._delete_removed()

        await asyncio.shield(work())  # to the end, whoever leaves meanwhile

    def pin(self, tenant: str, segments: Sequence[KeyedSegment], check: Callable[[KeyedSegment], None]) -> None:
        """Pins what is leased of pinned documents that was not there when they were registered, or before a restart."""
        if self._changing.locked():  # a document that is being registered may have been promised the room
            return
        catalog = self.of(tenant)
        for segment in catalog.unpinned(segments):
            try:
                check(segment)
                catalog.pin(segment)
            except RuntimeError as error:
                # tried again at its next use
                logger.info("document %s is not pinned: %s", segment.key[:12], error)

    async def restore(self, keys: Keys) -> None:
        """Takes what was registered before a restart, with the `keys` of the weights that are here now.

        What can't be is deleted, and said in the log, and so is what ended meanwhile, with its keys and values. Pins
        come back when documents are used. From now on documents end in their time.
        """
        paths: list[Path] = []
        if self._folder is not None:
            found = self._folder.glob(f"*{SUFFIX}")
            paths = await asyncio.to_thread(sorted, found, key=lambda path: (path.stat().st_mtime_ns, path.name))
        dropped, gone, alive = Counter[str](), set[str](), set[str]()
        for path in paths:
            document = ""
            try:
                tokenizer, tenant, name, ids, pin, end = await asyncio.to_thread(self._read, path)
                document = document_key(ids, tenant)
                if tokenizer != self._tokenizer:
                    raise ValueError("their tokens are another tokenizer's")
                if end is not None:
                    self._ends[path] = end
                if end is not None and end <= time.time():
                    gone.add(document)
                    continue
                (key,) = await keys([ids], tenant)
                catalog = self._catalogs.setdefault(tenant, DocumentCatalog(self._store))
                catalog.add([KeyedSegment(name, ids, key)], pin=pin, ttl=None if end is None else end - time.time())
                alive.add(document)
            except OSError as error:
                logger.warning("a registered document can't be read: %s", error)
            except (ValueError, RequestError) as error:
                dropped[str(error)] += 1
                gone.add(document)
                await asyncio.to_thread(_delete, path)
        for reason, count in dropped.items():
            logger.warning("%d registered documents are dropped: %s", count, reason)
        logger.info("%d registered documents of before are there", sum(len(c.ids()) for c in self._catalogs.values()))
        for document in gone - alive:
            self._store.remove(document)
        await asyncio.to_thread(self._delete_ended)
        await self._delete_removed()
        self.restored, self._looking = True, asyncio.create_task(self._look())

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            async with self._changing:
                for catalog in self._catalogs.values():
                    catalog.ids()  # it forgets those whose time is over, and the store with it
                await asyncio.to_thread(self._delete_ended)
                await self._delete_removed()

    def stop(self) -> None:
        """Ends what looks for documents whose time is over."""
        if self._looking is not None:
            self._looking.cancel()

    def _path(self, tenant: str, name: str) -> Path:
        assert self._folder is not None
        return self._folder / f"{hashlib.sha256(json.dumps([tenant, name]).encode()).hexdigest()}{SUFFIX}"

    def _write(self, tenant: str, segment: KeyedSegment, pin: bool, ttl: float | None) -> None:
        self._delete_ended()
        path, end = self._path(tenant, segment.id), None if ttl is None else time.time() + ttl
        # no key: that names the weights of whoever reads it
        text = json.dumps([self._tokenizer, tenant, segment.id, segment.token_ids, pin, end]).encode()
        write_whole(path, f"{hashlib.sha256(text).hexdigest()}\n".encode() + text)
        self._ends.pop(path, None)
        if end is not None:
            self._ends[path] = end

    def _read(self, path: Path) -> tuple[str, str, str, tuple[int, ...], bool, float | None]:
        """Tokenizer, tenant, id, token ids, pin and end in a file. Raises ValueError for one that isn't ours, or
        damaged."""
        digest, _, text = path.read_bytes().partition(b"\n")
        if digest.decode(errors="replace") != hashlib.sha256(text).hexdigest():
            raise ValueError("their files are damaged")
        tokenizer, tenant, name, ids, pin, end = json.loads(text)
        if path != self._path(tenant, name):
            raise ValueError("their files have other documents' names")
        return tokenizer, tenant, name, tuple(ids), pin, end

    def _delete_ended(self) -> None:
        """Nothing of a document is to be found after its time."""
        now = time.time()
        for path in [path for path, end in self._ends.items() if end <= now]:
            _delete(path)
            del self._ends[path]

    async def _delete_removed(self) -> None:
        """Deletes files of removed documents: workers know those of their own weights and method alone."""
        names, self._store.removed = self._store.removed, set()
        if self._disk is not None and names:
            await asyncio.to_thread(_delete_documents, self._disk, names)


async def _on_disk(work: Callable[[], None]) -> None:
    try:
        await asyncio.to_thread(work)
    except OSError as error:
        reason = f"the server can't change what it keeps on disk: {error.strerror}; nothing was changed"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise RequestError(503, f"{reason}, try again when there is room", retry_after=60) from error
        # a folder that is gone, or may only be read, is not the client's to mend, nor mended by waiting
        logger.warning("what is registered can't be kept or deleted: %s", error)
        raise RequestError(503, f"{reason}, its operator finds in the log which file it is") from error


def _unlink(path: Path) -> None:
    path.parent.stat()  # one that is gone may come back with the file in it, as a disk that isn't mounted
    path.unlink(missing_ok=True)


def _delete_documents(folder: Path, names: set[str]) -> None:
    for path in folder.rglob(f"*{PICACHE}"):
        if document_of(path.name) in names:
            _delete(path)


def _delete(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        logger.warning("could not delete %s: %s", path, error)
