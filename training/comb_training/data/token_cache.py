"""Tokenised examples, kept on disk: made once, found again by every later run and every rank that needs the same.

A file is never changed. It is named by a hash of all that decides what is in it (`cache_key`): when something of it
changes, another file is made, and the old one stays until somebody removes it. It is a safetensors file under a
checksum: the token ids of each different document, which are read by memory map, and rows that name documents by
number, as JSON. (The package datasets could keep rows too, but notices no damage, and would come into every run.)
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from comb.cache.atomic import TEMPORARY_PREFIX, hub_folder, is_abandoned, write_temporary
from comb.documents.document import Prompt
from comb_training.data.batches import TrainingExample
from comb_training.data.cache_key import digest, plain

logger = logging.getLogger(__name__)

Tokenised = tuple[list[TrainingExample], dict[str, Any]]
"""Examples, and their counts as JSON values."""
COLUMNS = ("tokens", "ends", "rows")
"""Token ids of all documents; where each ends; and JSON of each example's prompt, target, id and references."""


class DamagedCacheError(ValueError):
    """A file that isn't what was written; the message says how that was seen."""


class DocumentTokens(Sequence[int]):
    """Token ids of one document of a file, read when somebody asks for them; equal to a tuple of the same ids.

    Its length costs nothing and its hash is kept, so that sorting examples into batches reads no document again.

    Args:
        ids: [tokens], a view of the file.
    """

    __slots__ = ("_hash", "_ids")

    def __init__(self, ids: Any) -> None:
        self._ids = ids
        self._hash: int | None = None

    def __len__(self) -> int:
        return len(self._ids)

    def __getitem__(self, index: Any) -> Any:
        return tuple(self._ids[index].tolist()) if isinstance(index, slice) else int(self._ids[index])

    def __iter__(self) -> Iterator[int]:
        return iter(self._ids.tolist())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._ids.astype(dtype or np.int64)

    def __hash__(self) -> int:
        # that of the tuple, which it is equal to
        if self._hash is None:
            self._hash = hash(tuple(self))
        return self._hash

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        if isinstance(other, tuple | DocumentTokens):
            return len(self) == len(other) and hash(self) == hash(other) and tuple(self) == tuple(other)
        return NotImplemented


def default_folder() -> Path:
    """The folder in the Hugging Face cache; HF_HOME moves it."""
    return hub_folder("tokens")


def cached(folder: str | Path | None, name: str, key: Mapping[str, Any], build: Callable[[], Tokenised]) -> Tokenised:
    """The examples under `key`, from the folder or built and kept there, and their counts.

    Nothing that happens to the folder stops a run: where a file can't be written or read, the examples that were built
    are given as they are, and a warning says so. Several processes may do this at once; the last file stays.

    Args:
        folder: None is `default_folder`.
        name: how the file's name starts, for people who look into the folder.
        key: JSON values that decide what the examples are.
        build: whatever it raises is raised.
    """
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)[:40]
    path = Path(folder if folder is not None else default_folder()) / f"{safe}-{digest(plain(key))[:32]}.safetensors"
    try:
        found = read(path)
    except FileNotFoundError:
        pass
    except (DamagedCacheError, OSError) as error:
        logger.warning("%s is damaged or can't be read (%s): the examples are tokenised again", path, error)
    else:
        logger.info("%s: %d tokenised examples found in %s", name, len(found[0]), path)
        return found
    built = build()
    if not built[0]:
        return built
    try:
        write(path, *built)
        return read(path)
    except (ValueError, OSError) as error:
        logger.warning("tokenised examples could not be kept in %s (%s); going on without", path, error)
        return built


def write(path: Path, examples: Sequence[TrainingExample], counts: Mapping[str, Any]) -> None:
    """Writes a file under another name and renames it when it is whole and on disk.

    Raises OSError when it can't be written; nothing is left then.
    """
    numbers: dict[tuple[int, ...], int] = {}
    for segment in chain.from_iterable(example.segments for example in examples):
        numbers.setdefault(segment, len(numbers))
    rows = []
    for example in examples:
        prompt = example.prompt
        segments = [numbers[segment] for segment in prompt.segments]
        rows.append([prompt.head, segments, prompt.tail, prompt.gaps, example.target, example.id, example.references])
    columns = {
        "tokens": np.fromiter(chain.from_iterable(numbers), np.int32),
        "ends": np.cumsum([len(segment) for segment in numbers]),
        "rows": np.frombuffer(json.dumps(rows).encode(), np.uint8).copy(),
    }
    told = json.dumps(plain(counts))
    tensors = {name: torch.from_numpy(array) for name, array in columns.items()}
    content = save(tensors, {"comb": json.dumps([_checksum(columns, told), told])})
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in filter(is_abandoned, path.parent.glob(f"{TEMPORARY_PREFIX}*")):
        abandoned.unlink(missing_ok=True)
    # ranks write the same file at the same time, each under a name of its own
    write_temporary(path.parent, content).replace(path)


def read(path: Path) -> Tokenised:
    """What `write` was given. Raises DamagedCacheError for a file that isn't what was written, OSError without one."""
    try:
        with safe_open(path, framework="pt") as file:  # of numpy it makes copies
            checksum, told = json.loads(file.metadata()["comb"])
            columns = {name: file.get_tensor(name).numpy() for name in COLUMNS}
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedCacheError(f"{type(error).__name__}: {error}") from error
    if _checksum(columns, told) != checksum:
        raise DamagedCacheError("its checksum is another one")
    documents: Any = list(map(DocumentTokens, np.split(columns["tokens"], columns["ends"][:-1])))
    examples = []
    heads: dict[tuple[int, ...], tuple[int, ...]] = {}  # most rows begin alike: few-shot examples are held once
    for head, segments, tail, gaps, target, id, references in json.loads(columns["rows"].tobytes()):
        own = tuple(documents[number] for number in segments)
        head = tuple(head)
        prompt = Prompt(heads.setdefault(head, head), own, tuple(tail), tuple(map(tuple, gaps)))
        examples.append(TrainingExample(prompt, tuple(target), id, tuple(references)))
    return examples, json.loads(told)


def _checksum(columns: Mapping[str, Any], told: str) -> str:
    digest = hashlib.sha256(told.encode())
    for name in COLUMNS:
        digest.update(f"{name} {columns[name].dtype} {len(columns[name])}".encode())
        digest.update(columns[name])
    return digest.hexdigest()
