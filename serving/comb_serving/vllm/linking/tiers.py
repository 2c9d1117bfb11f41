"""Documents beyond their time in a rank's pool: in host memory, and in files that outlive the server.

A document that was compiled is copied there behind the engine's back, and copied back instead of being compiled again.
Whatever goes wrong with it here (no room, a damaged file, a full disk) means that it is compiled again.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from comb.cache.picache import PICache, register_kind
from comb.cache.store import PICacheStore
from comb_serving.encoding.kept import kept_bytes

logger = logging.getLogger(__name__)

_WAITING = 64  # documents on their way down; more are let go, rather than that the engine waits


@register_kind
@dataclass(frozen=True, eq=False, repr=False)
class PoolRowsPICache(PICache):
    """What a rank's layers cache of a document's tokens, one layer behind the other: [tokens, width of all layers]."""

    rows: Tensor
    kind: ClassVar[str] = "pool-rows"

    def __post_init__(self) -> None:
        if self.rows.ndim != 2 or not len(self.rows):
            raise ValueError(f"PoolRowsPICache expects rows [tokens >= 1, width], got {list(self.rows.shape)}")

    @property
    def num_tokens(self) -> int:
        return len(self.rows)


class KeptDocuments:
    """One rank's lower tiers, in a store on the host (`kept_store`)."""

    def __init__(self, store: PICacheStore) -> None:
        self._store = store
        self._queue: queue.Queue[tuple[str, Tensor, Any] | str | None] = queue.Queue(_WAITING)
        self._stream: Any = None  # of a GPU, for the copies
        self._thread = threading.Thread(target=self._work, name="comb-kept-documents", daemon=True)
        self._thread.start()

    def keep(self, key: str, rows: Tensor) -> None:
        """Takes a document [tokens, width], which nobody changes afterwards; never waits, neither for a GPU that is
        still gathering it."""
        gathered = None
        if rows.device.type != "cpu":
            device = torch.get_device_module(rows.device)
            gathered = device.Event()
            gathered.record(device.current_stream(rows.device))
        try:
            self._queue.put_nowait((key, rows, gathered))
        except queue.Full:
            logger.warning("document %s is not kept: %d wait already", key[:12], _WAITING)

    def forget(self, key: str) -> None:
        """Deletes a document, behind what has been kept before."""
        self._queue.put(key)

    def fetch(self, key: str) -> tuple[Tensor, str] | None:
        """A document's rows on the host, and the tier that had it ("host" or "disk"); None if none has."""
        try:
            with self._store.acquire([key]) as held:
                found = None if held.missing() else held[key]
        except Exception as error:
            logger.warning("document %s is compiled again: %s", key[:12], error)
            return None
        if found is None or not isinstance(found.picache, PoolRowsPICache):
            return None
        return found.picache.rows, "host" if found.tier == "device" else "disk"  # the uppermost one is host memory

    def nbytes(self) -> dict[str, int]:
        """What is kept, by tier."""
        return kept_bytes(self._store)

    def close(self) -> None:
        """Ends when all that waits is kept."""
        self._queue.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, str):
                self._try(item, partial(self._store.remove, item))
            else:
                self._try(item[0], partial(self._admit, *item))
            item = None  # the rows may be a GPU's
            if self._queue.empty():
                self._try("", self._store.flush)
        self._try("", self._store.flush)

    def _admit(self, key: str, rows: Tensor, gathered: Any) -> None:
        picache = PoolRowsPICache(key, rows.clone() if gathered is None else self._to_host(rows, gathered))
        with self._store.acquire([key]) as held:
            if held.missing():
                held.add([picache])

    def _to_host(self, rows: Tensor, gathered: Any) -> Tensor:
        """A copy behind `gathered`: streams are a thread's own, and this one's knows nothing of the engine's."""
        device = torch.get_device_module(rows.device)
        if self._stream is None:
            self._stream = device.Stream(rows.device)
        self._stream.wait_event(gathered)
        rows.record_stream(self._stream)
        with device.stream(self._stream):
            return rows.to("cpu")

    def _try(self, key: str, work: Callable[[], object]) -> None:
        try:
            work()
        except Exception as error:
            logger.warning("documents are not kept (%s): %s: %s", key[:12] or "disk", type(error).__name__, error)
