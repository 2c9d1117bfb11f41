"""A private folder with one safetensors file per PICache, which several processes may share.

What is done about trouble is decided here: it is said once and counted, and never takes a request with it. Which files
fit the budget is decided by the index over them, see `comb.cache.tiers`.
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Container
from dataclasses import dataclass
from pathlib import Path

import torch

from comb.cache.atomic import TEMPORARY_PREFIX, is_abandoned, write_temporary
from comb.cache.picache import PICache
from comb.cache.picache_file import MAX_HEADER_BYTES, PICacheError, PICacheHeader, deserialize, parse_header

logger = logging.getLogger(__name__)

SUFFIX = ".picache.safetensors"  # ours alone: files without it are never touched


@dataclass(frozen=True)
class FoundFile:
    """A file of the folder. `trouble`: why it can't be used. `expires_at`: in seconds since the epoch; None: never."""

    key: str
    nbytes: int = 0
    expires_at: float | None = None
    trouble: Exception | None = None


class DiskFolder:
    """Reads, writes and deletes files by key.

    Args:
        folder: made with mode 0700 if absent.

    Attributes:
        counts: "damaged" (unusable files met) and "write_errors" (files that could not be written).

    Raises:
        ValueError: `folder` can't be made or listed, or is open to others and not ours to close.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.counts: Counter[str] = Counter()
        self._ignored: set[str] = set()  # files that can neither be used nor deleted
        self._said: set[object] = set()
        try:
            self._open()
            for path in self.folder.iterdir():
                if is_abandoned(path):
                    path.unlink(missing_ok=True)
        except OSError as error:
            raise ValueError(f"disk_path expects a folder that can be made and read, {folder}: {error}") from error

    def _open(self) -> None:
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name != "posix" or not (mode := self.folder.stat().st_mode) & 0o077:
            return
        # a forged file would answer with someone else's content, so the folder is ours alone; never close a shared one
        names = [path.name for path in self.folder.iterdir()]
        foreign = [name for name in names if not name.endswith(SUFFIX) and not name.startswith(TEMPORARY_PREFIX)]
        if foreign:
            raise ValueError(
                f"disk_path expects a folder of its own that only its owner may enter (mode 0700), {self.folder} has "
                f"mode {mode & 0o777:04o} and holds {foreign[0]!r}; give an empty or new folder"
            )
        self.folder.chmod(0o700)

    def path(self, key: str) -> Path:
        """The file of `key`."""
        return self.folder / f"{key}{SUFFIX}"

    def exists(self, key: str) -> bool:
        """Whether the key's file is there and can be asked for."""
        try:
            return key not in self._ignored and bool(self.path(key).stat())
        except OSError:
            return False

    def sizes(self) -> dict[str, int]:
        """Bytes of all files that can be asked for, by key."""
        sizes = {path.name.removesuffix(SUFFIX): path.stat().st_size for path in self._files()}
        return {key: size for key, size in sizes.items() if key not in self._ignored}

    def scan(self, known: Container[str]) -> list[FoundFile]:
        """Files that are not `known`, the one whose use is longest ago first; only headers are read."""
        found: list[tuple[float, FoundFile]] = []
        for path in self._files():
            key = path.name.removesuffix(SUFFIX)
            if key in known or key in self._ignored:
                continue
            try:
                status = path.stat()
                header = _read_header(path)
                if header.key != key:
                    raise PICacheError(f"the file holds the key {header.key!r}")
                found.append((status.st_mtime, FoundFile(key, status.st_size, header.expires_at)))
            except FileNotFoundError:
                continue
            except (PICacheError, OSError) as error:
                found.append((0.0, FoundFile(key, trouble=error)))
        return [file for _, file in sorted(found, key=lambda item: (item[0], item[1].key))]

    def _files(self) -> list[Path]:
        try:
            return [path for path in self.folder.iterdir() if path.name.endswith(SUFFIX)]
        except OSError as error:
            self._say(("list", error.errno), "could not list the disk tier %s: %s", self.folder, error)
            return []

    def read(self, key: str, device: torch.device | str) -> tuple[PICache, FoundFile]:
        """The PICache on `device`, and what the index is to know of its file.

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
        return picache, FoundFile(key, len(data), parse_header(data).expires_at)

    def stage(self, data: bytes) -> Path | None:
        """Writes a temporary file for `commit`; None if that failed."""
        try:
            return write_temporary(self.folder, data)
        except OSError as error:
            self._write_failed(error)
            return None

    def commit(self, temporary: Path, key: str) -> bool:
        """Renames a staged file into place; False if that failed."""
        try:
            temporary.replace(self.path(key))
        except OSError as error:
            self._write_failed(error)
            return False
        self._ignored.discard(key)
        return True

    def discard(self, temporary: Path) -> None:
        """Deletes a staged file."""
        try:
            temporary.unlink(missing_ok=True)
        except OSError as error:
            self._say(("discard", error.errno), "could not delete the temporary file %s: %s", temporary, error)

    def delete(self, key: str) -> None:
        """Deletes the key's file, if there is one; one that can't be deleted is ignored from now on."""
        try:
            self.path(key).unlink(missing_ok=True)
        except OSError as error:
            self._ignored.add(key)
            self._say(("unlink", error.errno), "could not delete %s, ignoring the file: %s", self.path(key), error)

    def drop_damaged(self, key: str, error: Exception) -> None:
        """Deletes a file that can't be used: the next lookup is a plain miss."""
        self.counts["damaged"] += 1
        logger.warning("dropping the unusable cache file %s: %s", self.path(key), error)
        self.delete(key)

    def _write_failed(self, error: OSError) -> None:
        self.counts["write_errors"] += 1
        self._say(("write", error.errno), "could not write to the disk tier %s: %s", self.folder, error)

    def _say(self, what: object, message: str, *arguments: object) -> None:
        """A warning the first time, debug level after that."""
        logger.log(logging.DEBUG if what in self._said else logging.WARNING, message, *arguments)
        self._said.add(what)


def _read_header(path: Path) -> PICacheHeader:
    with path.open("rb") as file:
        start = file.read(8)
        return parse_header(start + file.read(min(int.from_bytes(start, "little"), MAX_HEADER_BYTES)))
