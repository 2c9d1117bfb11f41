"""One file of tokenised examples, read by memory map, row by row, in any order.

A safetensors file of ragged columns (flat values, and offsets into them) under a checksum. Documents stand in it once;
rows name them by number. A file is never changed. The package datasets could keep such rows too, but notices no damage,
and would come into every training run.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, chain
from pathlib import Path
from typing import Any, overload

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from comb.cache.atomic import TEMPORARY_PREFIX, is_abandoned, write_temporary
from comb.documents.document import Prompt
from comb_training.data.batches import TrainingExample
from comb_training.data.cache_key import plain

COLUMNS = ("documents", "segments", "head", "tail", "target", "texts")
"""Token ids of a document; and of each example its documents' numbers, token ids, and id and references as JSON."""


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

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
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

    def __repr__(self) -> str:
        return f"DocumentTokens({len(self)} tokens)"

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self),)


class TrainingExamples(Sequence[TrainingExample]):
    """The examples of one file, by memory map: a row becomes Python objects when it is asked for, and only then.

    Raises:
        DamagedCacheError: for a file that is not what was written under this key.
        OSError: when there is none.
    """

    def __init__(self, path: str | Path, key: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._key = key
        self._columns, described = _read(self.path)
        self._documents: dict[int, DocumentTokens] = {}
        self.counts: dict[str, Any] = described["counts"]
        """What happened to the rows when the file was made."""
        if key is not None and described["key"] != plain(key):
            raise DamagedCacheError("it was made from other data")

    def __len__(self) -> int:
        return len(self._columns["texts"][1]) - 1

    @overload
    def __getitem__(self, index: int) -> TrainingExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingExample]: ...
    def __getitem__(self, index: int | slice) -> TrainingExample | list[TrainingExample]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        # DocumentTokens are a tuple to all who use one
        segments: Any = tuple(map(self._document, self._row("segments", index).tolist()))
        head, tail, target = (tuple(self._row(name, index).tolist()) for name in ("head", "tail", "target"))
        id, references = json.loads(self._row("texts", index).tobytes())
        return TrainingExample(Prompt(head, segments, tail), target, id, tuple(references))

    def _row(self, name: str, index: int) -> Any:
        values, offsets = self._columns[name]
        return values[offsets[index] : offsets[index + 1]]

    def _document(self, number: int) -> DocumentTokens:
        if number not in self._documents:
            self._documents[number] = DocumentTokens(self._row("documents", number))
        return self._documents[number]

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingExamples, (self.path, self._key)


def write(
    path: str | Path, examples: Sequence[TrainingExample], counts: Mapping[str, Any], key: Mapping[str, Any]
) -> None:
    """Writes a file for `TrainingExamples` under another name and renames it when it is whole and on disk.

    Raises:
        OSError: when it can't be written; nothing is left then.
        ValueError: for examples with tokens between their documents, which no reader makes.
    """
    if any(example.prompt.gaps for example in examples):
        raise ValueError("an example has tokens between its documents; there is no place for them in the cache")
    numbers: dict[tuple[int, ...], int] = {}
    for segment in chain.from_iterable(example.segments for example in examples):
        numbers.setdefault(segment, len(numbers))
    texts = [json.dumps([example.id, list(example.references)]).encode() for example in examples]
    columns = {
        "documents": _ragged(numbers),
        "segments": _ragged([numbers[segment] for segment in example.segments] for example in examples),
        "head": _ragged(example.prompt.head for example in examples),
        "tail": _ragged(example.prompt.tail for example in examples),
        "target": _ragged(example.target for example in examples),
        "texts": _ragged(texts, np.uint8),
    }
    described = json.dumps({"counts": plain(counts), "key": plain(key)})
    tensors = {
        f"{name}.{part}": torch.from_numpy(array)
        for name, column in columns.items()
        for part, array in zip(("values", "offsets"), column, strict=True)
    }
    content = save(tensors, {"comb": json.dumps([_checksum(columns, described), described])})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in filter(is_abandoned, path.parent.glob(f"{TEMPORARY_PREFIX}*")):
        abandoned.unlink(missing_ok=True)
    # ranks write the same file at the same time, each under a name of its own
    write_temporary(path.parent, content).replace(path)


def _read(path: Path) -> tuple[dict[str, tuple[Any, Any]], dict[str, Any]]:
    """Columns, as views of the file, and what is written about them."""
    try:
        with safe_open(path, framework="pt") as file:  # of numpy it makes copies
            checksum, described = json.loads(file.metadata()["comb"])
            columns = {
                name: (file.get_tensor(f"{name}.values").numpy(), file.get_tensor(f"{name}.offsets").numpy())
                for name in COLUMNS
            }
    except (SafetensorError, KeyError, TypeError, ValueError) as error:
        raise DamagedCacheError(f"{type(error).__name__}: {error}") from error
    if _checksum(columns, described) != checksum:
        raise DamagedCacheError("its checksum is another one")
    return columns, json.loads(described)


def _ragged(rows: Iterable[Sequence[int]], dtype: Any = np.int32) -> tuple[Any, Any]:
    """Values and offsets of rows."""
    arrays = [np.frombuffer(row, dtype) if isinstance(row, bytes) else np.array(row, dtype) for row in rows]
    values = np.concatenate(arrays) if arrays else np.empty(0, dtype)
    return values, np.fromiter(accumulate(map(len, arrays), initial=0), dtype=np.int64)


def _checksum(columns: Mapping[str, tuple[Any, Any]], described: str) -> str:
    digest = hashlib.sha256(described.encode())
    for name in COLUMNS:
        for array in columns[name]:
            digest.update(f"{name} {array.dtype} {len(array)}".encode())
            digest.update(memoryview(array).cast("B") if len(array) else b"")
    return digest.hexdigest()
