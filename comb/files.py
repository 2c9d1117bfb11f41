"""Files that a person names, read or refused with what to do; files of ours, written whole or not at all."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import yaml

TEMPORARY_PREFIX = ".tmp-"
ABANDONED_S = 86_400.0  # nobody writes one file for a day


def read_text(path: str | Path) -> str:
    """The text of a UTF-8 file, with or without a mark in front (Windows editors put one there). Raises ValueError for
    other text, naming the file, and OSError as `open` does."""
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}): save it as UTF-8") from error


def read_json(path: str | Path, remedy: str = "write or download it again") -> dict[str, Any]:
    """The object in a JSON file. Raises ValueError if it is none, naming the file and the `remedy`, and OSError."""
    try:
        content = json.loads(read_text(path))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is damaged, it is not JSON ({error}): {remedy}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} should be a JSON object, it is a {type(content).__name__}: {remedy}")
    return content


def write_whole(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Writes a file in one step, over one that is there. Raises OSError, which names it, and leaves what was there."""
    temporary = path.parent / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())  # or a crash may leave the name without the content
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):  # that of a full disk names no file, others the temporary one
            raise OSError(error.errno, error.strerror, str(path)) from error
        raise


def failed_to_write(error: Exception) -> bool:
    """Whether it is what Python, safetensors, or tokenizers (an Exception of no kind) say on a full disk."""
    from safetensors import SafetensorError  # `comb --help` doesn't wait for it

    return type(error) is Exception or isinstance(error, OSError | SafetensorError)


@contextmanager
def rewritten(folder: Path, patterns: Sequence[str] = ()) -> Iterator[Path]:
    """A folder to write files in, which take their places in `folder` when the block has ended without an error; files
    there of these `patterns` go then, where the new ones have none of that name.

    Raises:
        OSError: if the new files can't be written; `folder` is as it was before.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in filter(is_abandoned, folder.iterdir()):
        shutil.rmtree(old, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=TEMPORARY_PREFIX, dir=folder, ignore_cleanup_errors=True) as temporary:
        try:
            yield Path(temporary)
        except Exception as error:
            if failed_to_write(error):
                raise OSError(f"{folder} is as it was before, the new files can't be written ({error})") from error
            raise
        made = {path.relative_to(temporary): path for path in Path(temporary).rglob("*") if path.is_file()}
        for name, path in made.items():
            (folder / name).parent.mkdir(exist_ok=True)
            path.replace(folder / name)
    for path in {path for pattern in patterns for path in folder.glob(pattern)}:
        if path.relative_to(folder) not in made and not path.is_dir():
            path.unlink(missing_ok=True)


def share_weights(folder: Path) -> None:
    """Lets whoever may read a model's configuration read its weights: safetensors makes them their owner's alone."""
    for file in folder.glob("*.safetensors"):
        shutil.copymode(folder / "config.json", file)


def is_abandoned(path: Path) -> bool:
    """Whether `path` is a temporary file that nobody finishes any more."""
    with suppress(FileNotFoundError):  # just finished, or deleted by another process
        return path.name.startswith(TEMPORARY_PREFIX) and path.stat().st_mtime < time.time() - ABANDONED_S
    return False


def private_folder(folder: Path, suffix: str) -> None:
    """Makes a folder of mode 0700, or one of what is there; left over temporary files are deleted.

    Raises:
        ValueError: it can't be made or listed, or is open to others and holds something else than files of `suffix`.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.name == "posix" and (mode := folder.stat().st_mode) & 0o077:
            # a forged file would answer with someone else's content, so it is ours alone; never close a shared one
            for path in folder.iterdir():
                if path.name.endswith(suffix) or path.name.startswith(TEMPORARY_PREFIX):
                    continue
                # others can't enter such a folder anyway: those of `comb serve`
                if not path.is_dir() or path.is_symlink() or path.stat().st_mode & 0o077:
                    raise ValueError(
                        "documents are kept in a folder of their own that only its owner may enter (mode 0700), "
                        f"{folder} has mode {mode & 0o777:04o} and holds {path.name!r}; give an empty or new folder"
                    )
            folder.chmod(0o700)
        for path in filter(is_abandoned, folder.iterdir()):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ValueError(
            f"documents can't be kept in {folder} ({error.strerror}): give a folder that can be made and read"
        ) from error


class OnceEach(yaml.SafeLoader):
    """YAML in which a key stands once: of two sections of one name PyYAML keeps the last, in silence."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set[Any]()
        for key, _ in node.value:
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            name = self.construct_object(key, deep=True)
            if not isinstance(name, Hashable):
                raise yaml.constructor.ConstructorError(None, None, f"a key is {name}, not a text", key.start_mark)
            if name in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{name} stands there twice", key.start_mark)
            seen.add(name)
        return super().construct_mapping(node, deep)
