"""Files that are there whole or not at all (a temporary one in the same folder, synced, then renamed into place), and
folders that nobody else may enter."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import uuid
from pathlib import Path

from huggingface_hub import constants

TEMPORARY_PREFIX = ".tmp-"
FOREIGN_AGE_S = 86_400.0  # another host's process can't be asked for; nobody writes one file for a day

_HOST = hashlib.sha256(socket.gethostname().encode()).hexdigest()[:8]
_PROCESS = uuid.uuid4().hex[:8]  # tells us from an earlier process with our id (ids repeat in containers)


def hub_folder(name: str) -> Path:
    """comb's folder of this name in the Hugging Face cache; HF_HOME moves it."""
    return Path(os.environ.get("HF_HOME") or constants.HF_HOME).expanduser() / "comb" / name


def write_temporary(folder: Path, data: bytes) -> Path:
    """Writes and syncs a private temporary file in `folder`, named after this process.

    Raises OSError, and then leaves nothing.
    """
    path = folder / f"{TEMPORARY_PREFIX}{_HOST}-{os.getpid()}-{_PROCESS}-{uuid.uuid4().hex}"
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    return path


def write_whole(path: Path, data: bytes) -> None:
    """Writes a file in one step, over one that is there. Raises OSError, and then leaves what was there."""
    temporary = write_temporary(path.parent, data)
    try:
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def is_abandoned(path: Path) -> bool:
    """Whether `path` is a temporary file whose process is gone."""
    if not path.name.startswith(TEMPORARY_PREFIX):
        return False
    try:
        host, pid, process, _ = path.name.removeprefix(TEMPORARY_PREFIX).split("-")
        if host != _HOST:
            return path.stat().st_mtime < time.time() - FOREIGN_AGE_S
        if int(pid) == os.getpid():
            return process != _PROCESS
        os.kill(int(pid), 0)
    except (ProcessLookupError, OverflowError):
        return True
    except (OSError, ValueError):  # not ours to signal, hence alive; or vanished; or no name of ours
        return False
    return False


def private_folder(folder: Path, suffix: str) -> None:
    """Makes a folder of mode 0700, or one of what is there; left over temporary files are deleted.

    Args:
        suffix: of the files that are kept there.

    Raises:
        ValueError: it can't be made or listed, or is open to others and holds something else.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix" and (mode := folder.stat().st_mode) & 0o077:
            # a forged file would answer with someone else's content, so it is ours alone; never close a shared one
            for path in folder.iterdir():
                if path.name.endswith(suffix) or path.name.startswith(TEMPORARY_PREFIX) or _is_private(path):
                    continue
                raise ValueError(
                    f"disk_path expects a folder of its own that only its owner may enter (mode 0700), {folder} "
                    f"has mode {mode & 0o777:04o} and holds {path.name!r}; give an empty or new folder"
                )
            folder.chmod(0o700)
        for path in filter(is_abandoned, folder.iterdir()):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(f"disk_path expects a folder that can be made and read, {folder}: {error}") from error


def _is_private(path: Path) -> bool:
    """Whether this is a folder that others can't enter anyway, such as those of `comb serve`."""
    return path.is_dir() and not path.is_symlink() and not path.stat().st_mode & 0o077
