"""Tokenised examples on disk: made once, read by memory map, row by row, in any order (exact resume needs that).

A file is named by a hash of all that decides what is in it: data, file contents, tokenizer, templates, code. Another
one of these is another file, and a file is never changed. It is an Arrow table of one row (so that each column is one
flat array, whatever its length), and the checksum of that behind it. Documents stand in it once; rows name them by
number.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, overload

import numpy as np
from huggingface_hub import constants

from comb.compatibility import tokenizer_fingerprint
from comb.documents import Prompt, PromptBuilder
from comb_training.batches import TokenStatistics, TrainingExample

logger = logging.getLogger(__name__)

FORMAT = 1
"""Goes into every key: raise it when the same data must become other tokens, or files other bytes."""

_TRAILER = b"comb-tok"
_CHUNK = 1 << 24
_RECENT = 1024  # documents kept as Python integers: more than a batch has
_LISTS = ("documents", "segments", "head", "tail", "target")  # of integers
_numbers = itertools.count()


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
        if key is not None and metadata["key"] != _plain(key):
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

    def blocks(self) -> list[list[int]]:
        """Places of the examples, those over the same documents together, without reading any document."""
        found: dict[bytes, list[int]] = {}
        for index in range(len(self)):
            found.setdefault(self._row("segments", index).tobytes(), []).append(index)
        return list(found.values())

    def __reduce__(self) -> tuple[Any, ...]:
        return TrainingExamples, (self.path, self._key)


def statistics(examples: Sequence[TrainingExample]) -> TokenStatistics:
    """`TokenStatistics.of`, from lengths alone: no document is read. Raises ValueError if there is no example."""
    if not examples:
        return TokenStatistics.of(examples)
    lengths = np.empty((len(examples), 4), dtype=np.int64)
    different: dict[Sequence[int], int] = {}
    for index, example in enumerate(examples):
        tokens = [len(segment) for segment in example.segments]
        different.update(zip(example.segments, tokens, strict=True))
        query = len(example.prompt.query)
        lengths[index] = len(tokens), query, len(example.target), query + sum(tokens)
    spreads = [
        (float(column.min()), float(column.sum()) / len(column), float(column.max()))
        for column in [*lengths.T, np.array(list(different.values()) or [0])]
    ]
    return TokenStatistics(
        examples=len(examples),
        different_documents=len(different),
        documents_per_example=spreads[0],
        document_tokens=spreads[4],
        query_tokens=spreads[1],
        target_tokens=spreads[2],
        prompt_tokens=spreads[3],
    )


def default_folder() -> Path:
    """The folder in the Hugging Face cache; HF_HOME moves it."""
    return Path(os.environ.get("HF_HOME") or constants.HF_HOME).expanduser() / "comb" / "tokens"


def cached(
    folder: str | Path | None,
    name: str,
    key: Mapping[str, Any],
    build: Callable[[], tuple[list[TrainingExample], dict[str, Any]]],
) -> tuple[Sequence[TrainingExample], dict[str, Any]]:
    """The examples under `key`, from the folder or built and kept there, and their counts.

    Nothing that happens to the folder stops a run: where a file can't be written or read, the examples that were built
    are given as they are, and a warning says so. Several processes may do this at once; the last file stays.

    Args:
        folder: None is `default_folder`.
        name: how the file's name starts, for people who look into the folder.
        key: JSON values that decide what the examples are.
        build: examples and counts (JSON values); whatever it raises is raised.
    """
    if not _arrow():
        return build()
    safe = "".join(letter if letter.isalnum() or letter in "-_" else "-" for letter in name)[:40]
    path = Path(folder if folder is not None else default_folder()) / f"{safe}-{_digest(_plain(key))[:32]}.arrow"
    try:
        found = TrainingExamples(path, key)
    except FileNotFoundError:
        pass
    except DamagedCacheError as error:
        logger.warning("%s is damaged (%s): the examples are tokenised again", path, error)
    except OSError as error:
        logger.warning("%s can't be read (%s): the examples are tokenised again", path, error)
    else:
        logger.info("%s: %d tokenised examples found in %s", name, len(found), path)
        return found, found.counts
    examples, counts = build()
    if not examples:
        return examples, counts
    try:
        write(path, examples, counts, key)
        return TrainingExamples(path, key), counts
    except (DamagedCacheError, OSError) as error:
        logger.warning("tokenised examples could not be kept in %s (%s); going on without", path, error)
        return examples, counts


def write(
    path: str | Path, examples: Sequence[TrainingExample], counts: Mapping[str, Any], key: Mapping[str, Any]
) -> None:
    """Writes a file for `TrainingExamples` under another name and renames it when it is whole and on disk.

    Raises:
        OSError: when it can't be written; nothing is left then.
        ValueError: for examples with tokens between their documents, which no reader makes.
    """
    import pyarrow as pa  # type: ignore[import-untyped]  # it has none

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
    described = {"examples": len(examples), "counts": _plain(counts), "key": _plain(key)}
    table = pa.table(
        {name: pa.LargeListArray.from_arrays([0, len(column)], column) for name, column in columns.items()}
    ).replace_schema_metadata({"comb": json.dumps(described)})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # one name for each process and call: ranks write the same file at the same time
    temporary = path.with_name(f".{path.stem}.{os.uname().nodename}.{os.getpid()}.{next(_numbers)}.tmp")
    try:
        with temporary.open("xb") as file:
            sink = _Hashing(file)
            with pa.ipc.new_file(pa.PythonFile(sink, mode="w"), table.schema) as writer:
                writer.write_table(table)
            file.write(_TRAILER + sink.digest.digest())
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


class _Hashing:
    """A file that keeps the checksum of what is written."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.digest = hashlib.sha256()
        self.closed = False

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        self.digest.update(view)
        written: int = self.file.write(view)
        return written

    def tell(self) -> int:
        place: int = self.file.tell()
        return place

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        # the trailer comes behind
        self.closed = True

    def writable(self) -> bool:
        return True

    def readable(self) -> bool:
        return False

    def seekable(self) -> bool:
        return False


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns, as views of the file, and what is written about them."""
    import pyarrow as pa

    try:
        with pa.memory_map(str(path)) as file:
            content = file.read_buffer()
    except pa.ArrowInvalid as error:  # an empty file can't be mapped
        raise DamagedCacheError(str(error)) from error
    size = content.size - len(_TRAILER) - hashlib.sha256().digest_size
    if size <= 0 or content.slice(size, len(_TRAILER)).to_pybytes() != _TRAILER:
        raise DamagedCacheError("it is not whole")
    digest = hashlib.sha256()
    view = memoryview(content)
    for start in range(0, size, _CHUNK):
        digest.update(view[start : min(start + _CHUNK, size)])
    if digest.digest() != view[size + len(_TRAILER) :].tobytes():
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
    import array

    import pyarrow as pa

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


def _arrow() -> bool:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        logger.warning("tokenised examples are not kept: pyarrow is not installed (pip install 'comb-pic[train]')")
        return False
    return True


# ---- what decides the content ----


def builder_key(builder: PromptBuilder) -> dict[str, Any]:
    """All of a prompt builder that decides token ids: vocabulary, rules, templates, and what they make of a probe.

    The probe is for what no setting shows: a chat template may write today's date.
    """
    tokenizer = builder.tokenizer
    backend = getattr(tokenizer, "backend_tokenizer", None)
    probe = builder.build("Where is it?", [builder.segment("A document.")])
    return {
        "vocabulary": tokenizer_fingerprint(tokenizer),
        "rules": _digest(backend.to_str() if backend is not None else repr(tokenizer)),
        "chat_template": _digest(str(tokenizer.chat_template)),
        "chat_template_kwargs": repr(sorted(builder.chat_template_kwargs.items())),
        "document_template": builder.document_template,
        "probe": [list(probe.head), list(probe.flat), list(builder.answer("There."))],
    }


def file_key(path: str | Path | None) -> str | None:
    """A hash of a file's content, or of all names and contents in a folder: moving it changes nothing.

    None where there is nothing to read.
    """
    if path is None or not Path(path).exists():  # the reader says what is wrong
        return None
    path = Path(path)
    if not path.is_dir():
        return _file_digest(path)
    inside = sorted(item for item in path.rglob("*") if item.is_file())
    return _digest([[item.relative_to(path).as_posix(), _file_digest(item)] for item in inside])


def code_key(*functions: Callable[..., Any]) -> str:
    """A hash of the source of what makes examples: this package's readers, and the modules of these functions."""
    package = Path(__file__).parent
    files = {*(package / "data").glob("*.py"), *(package / "nano").glob("*.py"), package / "batches.py"}
    modules = {function.__module__ for function in functions} | {"comb.documents", "comb.splitting"}
    for module in modules:
        source = getattr(sys.modules.get(module), "__file__", None)
        if source is not None and Path(source).is_file():
            files.add(Path(source))
    return _digest([FORMAT, *sorted([file.name, _file_digest(file)] for file in files)])


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode("utf-8", "surrogatepass")).hexdigest()


def _plain(value: Any) -> Any:
    """As JSON gives it back; other objects (a function in an option) by their repr."""
    return json.loads(json.dumps(value, sort_keys=True, default=repr))
