"""One running server: the private folder of its pools, and how its processes log.

A server that was killed can't remove its folder. The lock tells: whoever gets it knows that the owner is gone.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import re
import secrets
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

_SEGMENT = re.compile(r"(/dev/shm/(?:psm_|sem\.mp-|vllm_)\S+)$", re.MULTILINE)

PREFIX, LOCK, SECRET = "comb-instance-", "owner.lock", "secret"
READY, SEGMENTS = "ready", "segments"  # made when the server is; what vLLM has in shared memory outside of the folder


def default_root() -> Path:
    """Shared memory where there is such a place, else the folder of temporary files."""
    shared = Path("/dev/shm")
    return shared if os.access(shared, os.W_OK) else Path(tempfile.gettempdir())


@contextmanager
def instance_folder(root: Path | None = None) -> Iterator[Path]:
    """A new folder of mode 0700, gone after the ``with`` block; folders of dead servers of this user go first."""
    root = default_root() if root is None else root
    remove_abandoned(root)
    # under another name until it is locked, so that nobody takes it for abandoned
    folder = Path(tempfile.mkdtemp(prefix=f".{PREFIX}", dir=root))
    lock = os.open(folder / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        make_secret(folder)
        folder = folder.rename(folder.with_name(folder.name[1:]))
        yield folder
    finally:
        remove_segments(folder)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


@contextmanager
def own_disk(path: str | None, seconds: float) -> Iterator[tuple[int, ...]]:
    """Keeps other servers off a disk folder in the ``with`` block, and while a process has the descriptor it gives.

    One that is about to end has so many seconds for it. The folder itself is locked: a file would lie among documents.

    Raises:
        ValueError: another server has it, or it can't be made.
    """
    if path is None:
        yield ()
        return
    folder = Path(path)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ValueError(
            f"documents can't be kept in {folder} ({error.strerror}): give a folder that can be made and read"
        ) from error
    try:
        deadline, said = time.monotonic() + seconds, False
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ValueError(
                        f"--comb-disk {folder} is in use by another server: give each its own folder, or end that one "
                        "first"
                    ) from None
                if not said:
                    logger.warning("waiting up to %.0f s for another server on --comb-disk %s to end", seconds, folder)
                said = True
                time.sleep(0.1)
            except OSError as error:  # NFS locks no folders
                logger.warning("--comb-disk %s can't be locked (%s): give it to no other server", folder, error)
                break
        yield (lock,)
    finally:
        os.close(lock)


def make_secret(folder: Path) -> None:
    """What the front signs with and the engine verifies: it stays in the folder, which only this user can enter."""
    (folder / SECRET).write_bytes(secrets.token_bytes(32))


def read_secret(folder: Path) -> bytes:
    """Raises ValueError if the folder isn't an instance's."""
    try:
        return (folder / SECRET).read_bytes()
    except OSError as error:
        raise ValueError(f"{folder} is no instance's folder: start one with `comb serve`") from error


def remove_abandoned(root: Path) -> None:
    """Removes this user's instance folders whose owner is gone."""
    removed = []
    for folder in root.glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):  # another user's, or just being removed
            if folder.is_symlink() or folder.stat().st_uid != os.getuid():
                continue
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                remove_segments(folder)
                shutil.rmtree(folder)
                removed.append(folder)
            finally:
                os.close(lock)
    if removed:
        logger.warning("removed what killed servers had left: %s", ", ".join(map(str, removed)))


def note_segments(folder: Path) -> None:
    """Writes down the shared memory of vLLM's own that processes of this instance have mapped; what was noted stays.

    vLLM's processes remove it at their end, which a killed one doesn't reach.
    """
    mark, noted = f"={folder}".encode(), folder / SEGMENTS
    names = set(noted.read_text().split()) if noted.exists() else set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(entry.endswith(mark) for entry in (process / "environ").read_bytes().split(b"\0")):
                names |= set(_SEGMENT.findall((process / "maps").read_text()))
    noted.write_text("\n".join(sorted(names)))


def remove_segments(folder: Path) -> None:
    """Removes what `note_segments` has written down, if it is still there; the instance's processes have ended."""
    with contextlib.suppress(OSError):
        for name in (folder / SEGMENTS).read_text().split():
            with contextlib.suppress(FileNotFoundError):
                Path(name).unlink()
                logger.warning("removed what a killed process of vLLM had left: %s", name)


def configure(who: str) -> None:
    """Sends what this package logs to standard error; leaves it alone if someone has set it up already."""
    ours = logging.getLogger("comb_serving")
    if ours.handlers:
        return
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(levelname)s %(asctime)s {who}: %(message)s"))
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    ours.propagate = False
