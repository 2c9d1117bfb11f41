"""What PICaches are kept in: memory of a device, memory of the host, files. One interface, no bookkeeping.

Copies and contents of files take time, so `put` and `read` are called outside of the store's lock, with the key
claimed: nobody else touches what is kept under it meanwhile.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from comb.cache.index import IndexEntry, Tier
from comb.cache.picache import PICache, PICacheError, deserialize, serialize
from comb.files import private_folder, write_whole

logger = logging.getLogger(__name__)

StoreEntry = IndexEntry[Any]  # the value is a PICache, on disk None
SUFFIX = ".picache.safetensors"  # ours alone: files without it are never touched


class MemoryTier(Tier[Any]):
    """PICaches in the memory of a device, within a budget of bytes."""

    def __init__(self, budget: int | None, device: torch.device | str) -> None:
        super().__init__(budget)
        self.device = torch.device(device)

    def put(self, entry: StoreEntry) -> StoreEntry:
        """Keeps an entry of another tier: what is kept, and its size. On disk None where that failed."""
        own = entry.value.to(self.device)
        return IndexEntry(entry.key, own.nbytes, own, entry.expires_at)

    def read(self, entry: StoreEntry) -> PICache:
        """What is kept. On disk None where it can't be used."""
        picache: PICache = entry.value
        return picache

    def freed(self, entry: StoreEntry) -> None:
        """Takes note that nobody needs an entry any more."""


class DiskTier(Tier[Any]):
    """PICaches in files of a private folder, which belongs to one process at a time.

    Trouble is counted (`TierStats`) and said, and never takes a request with it. What expires isn't kept: nothing is to
    be found after its time, not by the next process either.
    """

    def __init__(self, budget: int | None, folder: Path) -> None:
        super().__init__(budget)
        self.folder = folder
        self._said: set[int | None] = set()  # kinds of errors that were warned of
        private_folder(folder, SUFFIX)

    def found(self) -> list[StoreEntry]:
        """What is there, the one whose use is longest ago first."""
        files = []
        for path in self.folder.iterdir():
            if path.name.endswith(SUFFIX):
                with suppress(OSError):  # a link to nothing, or gone since it was listed
                    files.append((path.stat(), path.name))
        files.sort(key=lambda file: (file[0].st_mtime, file[1]))
        return [IndexEntry(name.removesuffix(SUFFIX), stat.st_size, None, tier="disk") for stat, name in files]

    def path(self, entry: StoreEntry) -> Path:
        return self.folder / f"{entry.key}{SUFFIX}"

    def takes(self, entry: StoreEntry) -> bool:
        return math.isinf(entry.expires_at) and super().takes(entry)

    def put(self, entry: StoreEntry) -> StoreEntry | None:
        data = serialize(entry.value, entry.key)
        try:
            write_whole(self.path(entry), data)
        except OSError as error:
            self.counts["write_errors"] += 1
            level = logging.DEBUG if error.errno in self._said else logging.WARNING
            logger.log(level, "could not write to the disk tier %s: %s", self.folder, error)
            self._said.add(error.errno)
            return None
        return IndexEntry(entry.key, len(data), None)

    def read(self, entry: StoreEntry) -> PICache | None:
        path = self.path(entry)
        try:
            picache = deserialize(path.read_bytes(), entry.key)
        except FileNotFoundError:
            return None
        except (OSError, PICacheError) as error:
            self.counts["damaged"] += 1
            logger.warning("dropping the unusable file %s: %s", path, error)
            self.freed(entry)
            return None
        with suppress(OSError):
            os.utime(path)  # the order of use survives a restart
        return picache

    def freed(self, entry: StoreEntry) -> None:
        try:
            self.path(entry).unlink(missing_ok=True)
        except OSError as error:
            logger.warning("could not delete %s: %s", self.path(entry), error)
