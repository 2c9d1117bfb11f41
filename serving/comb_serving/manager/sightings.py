"""Segments that prompts bring again: counted when they are seen, compiled when nobody is kept waiting by it.

A segment that was seen once may never come back, so the second sight has it compiled, and the third finds it. The table
holds keys of documents, which are hashes with the tenant in them: it says nothing about texts, and nobody finds out
through it what another tenant has asked.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from comb.documents.found import SegmentFinder
from comb_serving.manager.leases import WantedDocument
from comb_serving.manager.manager import NO_PLACE, PICManager

logger = logging.getLogger(__name__)

REMEMBERED = 65_536
SIGHTS = 2  # of a segment until it is compiled
PATIENCE = 0.1  # seconds that somebody may wait for segments of others, if more than one is compiled
SHARE, MOST = 0.05, 2048  # of the tokens that are computed of segments where something always waits; so many at once


class Sightings:
    """How often segments were seen, the last `REMEMBERED` of them, and those that are to be compiled.

    They are compiled while no request is open, and some at the end of each answer where others are, so that a server
    that is never idle comes to them too. How many at once goes by the tokens that were compiled in a second before:
    who asks meanwhile waits for `PATIENCE`, or for one segment. Where there is always somebody who waits for a first
    token, they are compiled behind those who wait: `SHARE` of what segments that weren't there have cost.

    Args:
        finder: of segments in prompts; None where beginnings of prompts alone are noted.
        spare: whether all open requests have their first token: what is computed beside them delays none.
    """

    def __init__(self, manager: PICManager, finder: SegmentFinder | None, spare: Callable[[], bool]) -> None:
        self.finder = finder
        self._manager, self._spare = manager, spare
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._wanted: OrderedDict[str, WantedDocument] = OrderedDict()
        self._answering = 0
        self._tokens_per_second = self._credit = 0.0
        self._task: asyncio.Task[None] | None = None

    def note(self, document: WantedDocument) -> None:
        """One more sight of a segment that isn't in the pool."""
        tokens = len(document.token_ids)
        self._credit = min(self._credit + SHARE * tokens, max(MOST, tokens))
        count = self._seen[document.key] = self._seen.pop(document.key, 0) + 1
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        if count >= SIGHTS:
            self._wanted[document.key] = document
            self._wanted.move_to_end(document.key)
            if len(self._wanted) > REMEMBERED:
                self._wanted.popitem(last=False)
            self._go_on()

    @contextmanager
    def answering(self) -> Iterator[None]:
        """While a request is open; at its end something may be compiled."""
        self._answering += 1
        try:
            yield
        finally:
            self._answering -= 1
            self._go_on(beside=True)

    def stop(self) -> None:
        """Compiles nothing more."""
        self._wanted.clear()
        if self._task is not None:
            self._task.cancel()

    def _go_on(self, *, beside: bool = False) -> None:
        if self._task is None and self._wanted and (not self._answering or (beside and self._room() > 0)):
            self._task = asyncio.get_running_loop().create_task(self._compile())

    def _room(self) -> float:
        """Tokens that may be compiled now; 0: not even one segment."""
        if not self._answering or self._spare():
            return max(self._tokens_per_second * PATIENCE, 1)
        return self._credit if self._credit >= len(next(reversed(self._wanted.values())).token_ids) else 0

    async def _compile(self) -> None:
        try:
            while self._wanted and (room := self._room()) > 0:
                # the one that was seen last, and as many of its tenant before it as are compiled with it in time: a
                # server that comes to few of them comes to those that prompts bring now
                documents = list[WantedDocument]()
                while self._wanted:
                    document = next(reversed(self._wanted.values()))
                    room -= len(document.token_ids)
                    if documents and (room < 0 or document.tenant != documents[0].tenant):  # a lease is one tenant's
                        break
                    documents.append(self._wanted.pop(document.key))
                self._credit = max(0.0, self._credit - sum(len(document.token_ids) for document in documents))
                await self._compile_some(documents)
                if self._answering:
                    break
        finally:
            self._task = None

    async def _compile_some(self, documents: list[WantedDocument]) -> None:
        tokens, start = sum(len(document.token_ids) for document in documents), time.monotonic()
        try:
            (await self._manager.acquire(documents)).release()
        except NO_PLACE as error:
            if len(documents) == 1:
                logger.info("a segment of %d tokens is not compiled: %s", tokens, error)
                return
            for document in documents:  # what has no place together may have one alone
                await self._compile_some([document])
            return
        self._tokens_per_second = tokens / max(time.monotonic() - start, 1e-6)
