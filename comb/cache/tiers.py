"""The tiers of a PICache store: a byte-budgeted LRU index, and the disk tier, whose index describes a folder.

Nothing here locks: `store` calls the index methods under its lock, and `DiskTier.read`, `encode` and `stage`,
which move data, outside of it.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from comb.cache.atomic import TEMPORARY_PREFIX, is_abandoned, write_temporary
from comb.cache.picache import PICache
from comb.cache.picache_file import (
    MAX_HEADER_BYTES,
    PICacheError,
    PICacheHeader,
    deserialize,
    parse_header,
    serialize,
)

logger = logging.getLogger(__name__)

SUFFIX = ".picache.safetensors"  # ours alone: files without it are never touched


@dataclass(eq=False)
class IndexEntry:
    """One PICache in one tier. `expires_at` is by the store's clock (inf: never); on disk, `picache` is None."""

    key: str
    nbytes: int
    expires_at: float = math.inf
    picache: PICache | None = None
    references: int = 0


@dataclass
class TierStats:
    """Entries and bytes now, and counts since the store was made.

    hits: keys found in this tier. misses: keys looked for and not found in it (a tier is asked after those above it).
    evictions: entries that left for lack of room, of which `demotions` went one or two tiers down. promotions: entries
    copied from this tier to the device. damaged: unusable files met. write_errors: files that could not be written.
    """

    entries: int = 0
    bytes: int = 0
    budget_bytes: int | None = None
    hits: int = 0
    misses: int = 0
    evictions: int = 0
    promotions: int = 0
    demotions: int = 0
    damaged: int = 0
    write_errors: int = 0


@dataclass
class LRUTier:
    """Entries by key, least recently used first, and the bytes they take of a budget (None: unbounded).

    `held_bytes` counts against the budget without being in an entry: removed entries still in use, files being written.
    """

    name: str
    budget: int | None
    entries: OrderedDict[str, IndexEntry] = field(default_factory=OrderedDict)
    used_bytes: int = 0
    held_bytes: int = 0
    stats: TierStats = field(default_factory=TierStats)

    def add(self, entry: IndexEntry) -> None:
        """Adds (or replaces) as the most recently used; the caller has made room."""
        self.pop(entry.key)
        self.entries[entry.key] = entry
        self.used_bytes += entry.nbytes

    def pop(self, key: str) -> IndexEntry | None:
        entry = self.entries.pop(key, None)
        if entry is not None:
            self.used_bytes -= entry.nbytes
        return entry

    def get(self, key: str) -> IndexEntry | None:
        return self.entries.get(key)

    def touch(self, key: str) -> None:
        self.entries.move_to_end(key)

    def admits(self, nbytes: int) -> bool:
        """Whether something this large could ever be here."""
        return self.budget is None or nbytes <= self.budget

    def victims(self, nbytes: int, keep: Callable[[IndexEntry], bool]) -> list[IndexEntry] | None:
        """The least recently used entries whose eviction makes room for `nbytes`; None if there is no such set."""
        excess = -1 if self.budget is None else self.used_bytes + self.held_bytes + nbytes - self.budget
        chosen: list[IndexEntry] = []
        for entry in self.entries.values():
            if excess <= 0:
                break
            if not keep(entry):
                chosen.append(entry)
                excess -= entry.nbytes
        return chosen if excess <= 0 else None

    def snapshot(self) -> TierStats:
        """A copy of the counts with today's entries and bytes."""
        now = {"entries": len(self.entries), "bytes": self.used_bytes + self.held_bytes, "budget_bytes": self.budget}
        return TierStats(**(vars(self.stats) | now))


class DiskTier:
    """A private folder with one safetensors file per key, and the index over it.

    Several processes may share the folder: a file that vanishes is a miss, one that appears is found when asked for.
    The budget is kept by each process over the files that it knows of.

    Args:
        folder: made with mode 0700 if absent.
        budget: bytes of all files; None: unbounded.
        clock: the store's clock, in seconds; the index is kept in it.
        wall_clock: seconds since the epoch; the files are kept in it, so that expiry survives a restart.

    Raises:
        ValueError: `folder` can't be made or listed, or is open to others and not ours to close.
    """

    def __init__(
        self,
        folder: Path,
        budget: int | None,
        *,
        clock: Callable[[], float],
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        self.folder = Path(folder)
        self.index = LRUTier("disk", budget)
        self.writing: dict[str, int] = {}
        self._clock = clock
        self._wall_clock = wall_clock
        self._ignored: set[str] = set()  # files that can neither be used nor deleted
        self._said: set[object] = set()
        try:
            self._open_folder()
            for path in self.folder.iterdir():
                if is_abandoned(path):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"disk_path expects a folder that can be made and read, {folder}: {error}") from error
        for key, found in self.scan():
            self.adopt(key, found, keep=lambda entry: False)

    def _open_folder(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name != "posix" or not (mode := self.folder.stat().st_mode) & 0o077:
            return
        # a forged file would answer with someone else's content, so the folder is ours alone; never close a shared one
        foreign = [p.name for p in self.folder.iterdir() if not p.name.endswith(SUFFIX) and not is_temporary(p)]
        if foreign:
            raise ValueError(
                f"disk_path expects a folder of its own that only its owner may enter (mode 0700), {self.folder} has "
                f"mode {mode & 0o777:04o} and holds {foreign[0]!r}; give an empty or new folder"
            )
        self.folder.chmod(0o700)

    def path(self, key: str) -> Path:
        return self.folder / f"{key}{SUFFIX}"

    def exists(self, key: str) -> bool:
        """Whether the key's file is there and can be asked for."""
        try:
            return key not in self._ignored and bool(self.path(key).stat())
        except OSError:
            return False

    # ---- moving data: outside the store's lock ----

    def scan(self) -> list[tuple[str, IndexEntry | Exception]]:
        """Files not in the index, oldest use first, each by key with its entry, or what is wrong with its header."""
        found: list[tuple[float, str, IndexEntry | Exception]] = []
        for path in self.files():
            key = path.name.removesuffix(SUFFIX)
            if key in self.index.entries or key in self._ignored:
                continue
            try:
                status = path.stat()
                header = self._read_header(path)
                if header.key != key:
                    raise PICacheError(f"the file holds the key {header.key!r}")
                entry = IndexEntry(key, status.st_size, self._to_clock(header.expires_at))
                found.append((status.st_mtime, key, entry))
            except FileNotFoundError:
                continue
            except (PICacheError, OSError) as error:
                found.append((0.0, key, error))
        return [(key, entry) for _, key, entry in sorted(found, key=lambda item: item[:2])]

    @staticmethod
    def _read_header(path: Path) -> PICacheHeader:
        with path.open("rb") as file:
            start = file.read(8)
            return parse_header(start + file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)))

    def files(self) -> list[Path]:
        """The folder's PICache files, in no order."""
        try:
            return [path for path in self.folder.iterdir() if path.name.endswith(SUFFIX) and not is_temporary(path)]
        except OSError as error:
            self._say(("list", error.errno), "could not list the disk tier %s: %s", self.folder, error)
            return []

    def read(self, key: str, device: torch.device | str) -> tuple[PICache, IndexEntry]:
        """The PICache on `device`, and its index entry as the file has it.

        Raises:
            FileNotFoundError: no such file (any more).
            PICacheError, OSError: it can't be used; `drop_damaged` is the caller's next step.
        """
        path = self.path(key)
        if key in self._ignored:
            raise FileNotFoundError(path)
        data = path.read_bytes()
        picache = deserialize(data, key, device)
        try:
            os.utime(path)  # the order of use survives a restart
        except OSError:
            logger.debug("could not mark %s as used", path)
        return picache, IndexEntry(key, len(data), self._to_clock(parse_header(data).expires_at))

    def encode(self, entry: IndexEntry) -> bytes:
        """The file's content for an entry that has a PICache."""
        assert entry.picache is not None
        remaining = entry.expires_at - self._clock()
        return serialize(
            entry.picache,
            entry.key,
            expires_at=None if math.isinf(remaining) else self._wall_clock() + remaining,
        )

    def stage(self, data: bytes) -> Path | None:
        """Writes a temporary file for `commit`; None if that failed, which is counted and said."""
        try:
            return write_temporary(self.folder, data)
        except OSError as error:
            self._write_failed(error)
            return None

    # ---- the index and its folder: under the store's lock ----

    def commit(self, temporary: Path, entry: IndexEntry) -> bool:
        """Renames a staged file into place and adds its entry (the caller has made room); False if that failed."""
        try:
            temporary.replace(self.path(entry.key))
        except OSError as error:
            self.discard(temporary)
            self._write_failed(error)
            return False
        self._ignored.discard(entry.key)
        self.index.add(entry)
        return True

    def discard(self, temporary: Path) -> None:
        """Deletes a staged file."""
        try:
            temporary.unlink(missing_ok=True)
        except OSError as error:
            self._say(("discard", error.errno), "could not delete the temporary file %s: %s", temporary, error)

    def remove(self, key: str) -> bool:
        """Takes `key` out of the index and deletes its file; True if it was in the index."""
        known = self.index.pop(key) is not None
        try:
            self.path(key).unlink(missing_ok=True)
        except OSError as error:
            self._ignored.add(key)
            self._say(("unlink", error.errno), "could not delete %s, ignoring the file: %s", self.path(key), error)
        return known

    def drop_damaged(self, key: str, error: Exception) -> None:
        """Deletes a file that can't be used, counting and saying so: the next lookup is a plain miss."""
        self.index.stats.damaged += 1
        logger.warning("dropping the unusable cache file %s: %s", self.path(key), error)
        self.remove(key)

    def adopt(self, key: str, found: IndexEntry | Exception, keep: Callable[[IndexEntry], bool]) -> None:
        """Takes a file found in the folder into the index, within the budget; deletes an unusable one."""
        if key in self.index.entries or not self.exists(key):
            return
        if isinstance(found, Exception):
            self.drop_damaged(key, found)
            return
        if self.make_room(found.nbytes, keep):
            self.index.add(found)
        else:
            self.index.stats.evictions += 1
            self.remove(key)

    def make_room(self, nbytes: int, keep: Callable[[IndexEntry], bool]) -> bool:
        """Deletes the least recently used files until `nbytes` fit; False, deleting nothing, if they can't."""
        victims = self.index.victims(nbytes, keep)
        for victim in victims or ():
            self.index.stats.evictions += 1
            self.remove(victim.key)
        return victims is not None

    def forget_vanished(self) -> None:
        """Takes entries out of the index whose files another process deleted."""
        for key in [key for key in self.index.entries if not self.exists(key)]:
            self.index.pop(key)

    def differences(self) -> str:
        """How the index differs from the folder, in words; empty if it doesn't."""
        on_disk = {path.name.removesuffix(SUFFIX): path.stat().st_size for path in self.files()}
        listed = {key: entry.nbytes for key, entry in self.index.entries.items()}
        different = {key for key, _ in on_disk.items() ^ listed.items()} - self._ignored
        return ", ".join(f"{k}: {listed.get(k)} bytes listed, {on_disk.get(k)} on disk" for k in sorted(different))

    def _to_clock(self, expires_at: float | None) -> float:
        return math.inf if expires_at is None else self._clock() + (expires_at - self._wall_clock())

    def _write_failed(self, error: OSError) -> None:
        self.index.stats.write_errors += 1
        self._say(("write", error.errno), "could not write to the disk tier %s: %s", self.folder, error)

    def _say(self, what: object, message: str, *arguments: object) -> None:
        """A warning the first time, debug level after that."""
        logger.log(logging.DEBUG if what in self._said else logging.WARNING, message, *arguments)
        self._said.add(what)


def is_temporary(path: Path) -> bool:
    """Whether `path` is a file being written by this or another process."""
    return path.name.startswith(TEMPORARY_PREFIX)
