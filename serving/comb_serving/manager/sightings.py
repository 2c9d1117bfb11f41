"""Segments that prompts bring again: counted when they are seen, compiled when nobody is kept waiting by it.

A segment that was seen once may never come back, so the second sight has it compiled, and the third finds it. The table
holds keys of documents, which are hashes with the tenant in them: it says nothing about texts, and nobody finds out
through it what another tenant has asked.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from comb.documents.found import SegmentFinder
from comb_serving.manager.leases import WantedDocument
from comb_serving.manager.manager import NO_PLACE, PICManager

logger = logging.getLogger(__name__)

REMEMBERED = 65_536
SIGHTS = 2  # of a segment until it is compiled


class Sightings:
    """How often segments were seen, the last `REMEMBERED` of them, and those that are to be compiled.

    They are compiled one by one while no request is open, and one at the end of each answer where others are, so that a
    server that is never idle comes to them too. Who asks meanwhile waits for one segment at most.

    Args:
        finder: of segments in prompts.
        spare: whether all open requests have their first token: what is computed beside them delays none.
    """

    def __init__(self, manager: PICManager, finder: SegmentFinder, spare: Callable[[], bool]) -> None:
        self.finder = finder
        self._manager, self._spare = manager, spare
        self._seen: OrderedDict[str, int] = OrderedDict()
        self._wanted: OrderedDict[str, WantedDocument] = OrderedDict()
        self._answering = 0
        self._task: asyncio.Task[None] | None = None

    def note(self, document: WantedDocument) -> None:
        """One more sight of a segment that isn't in the pool."""
        count = self._seen[document.key] = self._seen.pop(document.key, 0) + 1
        if len(self._seen) > REMEMBERED:
            self._seen.popitem(last=False)
        if count >= SIGHTS:
            self._wanted[document.key] = document
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
        if self._task is None and self._wanted and (not self._answering or (beside and self._spare())):
            self._task = asyncio.get_running_loop().create_task(self._compile())

    async def _compile(self) -> None:
        try:
            while self._wanted:
                _, document = self._wanted.popitem(last=False)
                try:
                    (await self._manager.acquire([document])).release()
                except NO_PLACE as error:
                    logger.info("a segment of %d tokens is not compiled: %s", len(document.token_ids), error)
                if self._answering:
                    break
        finally:
            self._task = None
