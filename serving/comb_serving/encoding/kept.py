"""Documents beyond their time in a pool: in host memory, and in files that outlive the server.

Encoder processes and vLLM's workers have the same store below their pools. A worker's is filled behind the engine's
back (`KeptDocuments`), and documents come back by copy. Whatever goes wrong with it here (no room, a damaged file, a
full disk) means that they are compiled again.
"""

from __future__ import annotations

import logging
import queue
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from comb.cache.picache import PICache, register_kind
from comb.cache.store import PICacheStore

logger = logging.getLogger(__name__)

_WAITING = 64  # documents on their way down; more are let go, rather than that the engine waits


def kept_store(
    *,
    host_bytes: int,
    disk_path: str | Path | None,
    disk_bytes: int | None,
    largest_bytes: int,
    part: str = "",
    parts: int = 1,
) -> PICacheStore | None:
    """A store of documents that have left a pool; None without any tier.

    Args:
        host_bytes: of this store.
        disk_path, disk_bytes: of all `parts` stores together; each has its share, in a folder named after `part`, as no
            two processes share one.
        largest_bytes: of one document: what goes to the disk goes through memory, where there is always room for it.

    Raises:
        ValueError: for a folder that can't be used.
    """
    if not host_bytes and disk_path is None:
        return None
    if disk_path is not None and part:
        Path(disk_path).mkdir(mode=0o700, parents=True, exist_ok=True)
        disk_path = Path(disk_path) / f"{part}-of-{parts}"
    return PICacheStore(
        device="cpu",
        device_bytes=max(host_bytes, 0 if disk_path is None else largest_bytes),
        disk_path=disk_path,
        disk_bytes=None if disk_bytes is None else disk_bytes // parts,
    )


def kept_bytes(store: PICacheStore) -> dict[str, int]:
    """What is kept, by tier, and the size of host memory, which is the store's uppermost one."""
    tiers = store.stats().tiers
    found = {name: tiers[tier].bytes for name, tier in (("host", "device"), ("disk", "disk")) if tier in tiers}
    return {**found, "host_size": tiers["device"].budget_bytes or 0}


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

    def forget(self, name: str) -> None:
        """Deletes a document, or one key of it, behind what has been kept before."""
        self._queue.put(name)

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
        """The thread: keeps and deletes in order, and writes to the disk whenever nothing waits."""
        ended = False
        while not ended:
            item = self._queue.get()
            about = "disk"
            try:
                if isinstance(item, str):
                    about = item[:12]
                    self._store.remove_document(item)
                elif item is not None:
                    about = item[0][:12]
                    self._admit(*item)
            except Exception as error:
                logger.warning("documents are not kept (%s): %s: %s", about, type(error).__name__, error)
            ended, item = item is None, None  # the rows may be a GPU's
            if self._queue.empty() or ended:
                try:
                    self._store.flush()
                except Exception as error:
                    logger.warning("documents are not kept (disk): %s: %s", type(error).__name__, error)

    def _admit(self, key: str, rows: Tensor, gathered: Any) -> None:
        if gathered is None:
            host = rows.clone()
        else:
            device = torch.get_device_module(rows.device)
            if self._stream is None:
                self._stream = device.Stream(rows.device)
            self._stream.wait_event(gathered)  # streams are a thread's own: this one's knows nothing of the engine's
            rows.record_stream(self._stream)
            with device.stream(self._stream):
                host = rows.to("cpu")
        with self._store.acquire([key]) as held:
            if held.missing():
                held.add([PoolRowsPICache(key, host)])
