"""One file of tokenised examples, read by memory map, row by row, in any order.

It is an Arrow table of one row (so that each column is one flat array, whatever its length), and the checksum of that
behind it. Documents stand in it once; rows name them by number. A file is never changed.
"""

from __future__ import annotations

import array
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
import pyarrow as pa

from comb.cache.atomic import TEMPORARY_PREFIX, is_abandoned, write_temporary
from comb.documents.document import Prompt
from comb_training.data.batches import TrainingExample
from comb_training.data.cache_key import plain

_TRAILER = b"comb-tok"
_RECENT = 1024  # documents kept as Python integers: more than a batch has
_LISTS = ("documents", "segments", "head", "tail", "target")  # of integers


class DamagedCacheError(ValueError):
    """A file that isn't what was written; the message says how that was seen."""


class Segment(Sequence[int]):
    """Token ids of one document of a file, read when somebody asks for them; equal to a tuple of the same ids.

    Its length costs nothing and its hash is kept, so that sorting examples into batches reads no document again.
    """

    __slots__ = ("_hash", "_number", "_store")

    def __init__(self, store: TrainingExamples, number: int) -> None:
        self._store = store
        self._number = number
        self._hash: int | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The token ids themselves."""
        ids: tuple[int, ...] = self._store.document(self._number)
        return ids

    def __len__(self) -> int:
        return self._store.document_length(self._number)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[int, ...]: ...
    def __getitem__(self, index: int | slice) -> int | tuple[int, ...]:
        return self.ids[index]

    def __iter__(self) -> Iterator[int]:
        return iter(self.ids)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return self._store.document_array(self._number).astype(dtype or np.int64)

    def __hash__(self) -> int:
        # that of the tuple, which it is equal to
        if self._hash is None:
            self._hash = hash(self.ids)
        return self._hash

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Segment):
            if other._store is self._store:
                return other._number == self._number
            return len(self) == len(other) and hash(self) == hash(other) and self.ids == other.ids
        if isinstance(other, tuple):
            return len(self) == len(other) and self.ids == other
        return NotImplemented

    def __repr__(self) -> str:
        return f"Segment({len(self)} tokens)"

    def __reduce__(self) -> tuple[Any, ...]:
        return tuple, (list(self.ids),)


class TrainingExamples(Sequence[TrainingExample]):
    """The examples of one file, by memory map: a row becomes Python objects when it is asked for, and only then.

    Raises:
        DamagedCacheError: for a file that is not what was written under this key.
        OSError: when there is none.
    """

    def __init__(self, path: str | Path, key: Mapping[str, Any] | None = None) -> None:
        self.path = Path(path)
        self._key = key
        columns, metadata = _read(self.path)
        self._lists = {name: _flat(columns[name]) for name in _LISTS}
        self._ids = columns["id"]
        self._references = columns["references"]
        self._documents: dict[int, Segment] = {}
        # torch.tensor asks for one token after the other
        self.document = lru_cache(_RECENT)(self._document)
        """Token ids of a document, by number."""
        self.counts: dict[str, Any] = metadata["counts"]
        """What happened to the rows when the file was made."""
        if key is not None and metadata["key"] != plain(key):
            raise DamagedCacheError("it was made from other data")
        rows = {name: len(self._lists[name][0]) - 1 for name in ("segments", "head", "tail", "target")}
        rows |= {"id": len(self._ids), "references": len(self._references)}
        if set(rows.values()) != {metadata["examples"]}:
            raise DamagedCacheError(f"{metadata['examples']} rows were written, it has {rows}")

    def __len__(self) -> int:
        return len(self._ids)

    @overload
    def __getitem__(self, index: int) -> TrainingExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingExample]: ...
    def __getitem__(self, index: int | slice) -> TrainingExample | list[TrainingExample]:
        if isinstance(index, slice):
            return [self._example(place) for place in range(*index.indices(len(self)))]
        return self._example(range(len(self))[index])

    def _example(self, index: int) -> TrainingExample:
        # a Segment is a tuple to all who use one
        segments: Any = tuple(self._segment(number) for number in self._row("segments", index).tolist())
        head, tail, target = (tuple(self._row(name, index).tolist()) for name in ("head", "tail", "target"))
        return TrainingExample(
            Prompt(head, segments, tail), target, self._ids[index].as_py(), tuple(self._references[index].as_py())
        )

    def _row(self, name: str, index: int) -> Any:
        offsets, values = self._lists[name]
        return values[offsets[index] : offsets[index + 1]]

    def _segment(self, number: int) -> Segment:
        if number not in self._documents:
            self._documents[number] = Segment(self, number)
        return self._documents[number]

    def document_length(self, number: int) -> int:
        """Tokens of a document."""
        offsets = self._lists["documents"][0]
        return int(offsets[number + 1] - offsets[number])

    def document_array(self, number: int) -> Any:
        """Token ids of a document, as a view of the file."""
        return self._row("documents", number)

    def _document(self, number: int) -> tuple[int, ...]:
        return tuple(self._row("documents", number).tolist())

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
    documents: dict[tuple[int, ...], int] = {}
    for example in examples:
        for segment in example.segments:
            documents.setdefault(segment, len(documents))
    columns = {
        "documents": _list_array(documents),
        "segments": _list_array([documents[segment] for segment in example.segments] for example in examples),
        "head": _list_array(example.prompt.head for example in examples),
        "tail": _list_array(example.prompt.tail for example in examples),
        "target": _list_array(example.target for example in examples),
        "id": pa.array([example.id for example in examples], pa.large_string()),
        "references": pa.array([example.references for example in examples], pa.large_list(pa.large_string())),
    }
    described = {"examples": len(examples), "counts": plain(counts), "key": plain(key)}
    table = pa.table(
        {name: pa.LargeListArray.from_arrays([0, len(column)], column) for name, column in columns.items()}
    ).replace_schema_metadata({"comb": json.dumps(described)})
    sink = pa.BufferOutputStream()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    content = sink.getvalue()
    trailer = _TRAILER + hashlib.sha256(content).digest()
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    for abandoned in filter(is_abandoned, path.parent.glob(f"{TEMPORARY_PREFIX}*")):
        abandoned.unlink(missing_ok=True)
    # ranks write the same file at the same time, each under a name of its own
    write_temporary(path.parent, b"".join((content, trailer))).replace(path)


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns, as views of the file, and what is written about them."""
    try:
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
    except pa.ArrowInvalid as error:  # an empty file can't be mapped
        raise DamagedCacheError(str(error)) from error
    size = content.size - len(_TRAILER) - hashlib.sha256().digest_size
    if size <= 0 or content.slice(size, len(_TRAILER)).to_pybytes() != _TRAILER:
        raise DamagedCacheError("it is not whole")
    view = memoryview(content)
    if hashlib.sha256(view[:size]).digest() != view[size + len(_TRAILER) :].tobytes():
        raise DamagedCacheError("its checksum is another one")
    try:
        table = pa.ipc.open_file(pa.BufferReader(content.slice(0, size))).read_all()
        described = json.loads(table.schema.metadata[b"comb"])
        columns = {name: table.column(name).chunk(0).values for name in table.column_names}
    except (pa.ArrowException, KeyError, TypeError, IndexError, ValueError) as error:
        raise DamagedCacheError(f"{type(error).__name__}: {error}") from error
    missing = {*_LISTS, "id", "references"} - columns.keys() | {"examples", "counts", "key"} - described.keys()
    if missing:
        raise DamagedCacheError(f"it has no {', '.join(sorted(missing))}")
    return columns, described


def _list_array(rows: Iterable[Sequence[int]]) -> Any:
    # flat as it comes: a row of Python integers takes ten times the place
    values, offsets = array.array("i"), array.array("q", [0])
    for row in rows:
        values.extend(row)
        offsets.append(len(values))
    return pa.LargeListArray.from_arrays(
        pa.array(np.array(offsets, dtype=np.int64)), pa.array(np.array(values, dtype=np.int32))
    )


def _flat(column: Any) -> tuple[Any, Any]:
    """Offsets and values of a column of lists, as views."""
    return column.offsets.to_numpy(), column.values.to_numpy(zero_copy_only=True)
