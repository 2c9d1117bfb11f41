"""Rows of a JSON, JSONL or gzipped file or of a set on the Hub, with errors that name file and row."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comb.documents.document import Document, Example
from comb_training.data.hub import load_hub_rows, on_hub

_HALF = re.compile("[\ud800-\udfff]")
"""What JSON can escape, and no tokenizer takes."""


@dataclass(frozen=True)
class DatasetRow:
    """One row, where it stands (for errors), and what was left out of it."""

    row: Mapping[str, Any]
    where: str
    number: int = 0
    """The line in its file, from 1, or the place in its list, from 0."""
    left_out: Counter[str] = field(default_factory=Counter)
    nulls: frozenset[str] = frozenset()
    """Columns of a table on the Hub that are null in this row: empty, where no other field stands in for them."""

    def text(self, name: str, *others: str) -> str:
        """The first of these fields that is there, a text. Raises ValueError if none is, or it is something else."""
        for key in (name, *others):
            if self.row.get(key) is not None:
                return self.check_text(self.row[key], key)
        if not self.nulls.isdisjoint((name, *others)):
            return ""
        raise ValueError(f"{self.where}: there is no {' or '.join(map(repr, (name, *others)))}")

    def items(self, name: str, kind: type) -> list[Any]:
        """A list field whose items are all of one type. Raises ValueError otherwise."""
        items = [] if name in self.nulls else self.row.get(name)
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise ValueError(f"{self.where}: {name!r} is a list of {kind.__name__}, got {str(items)[:80]!r}")
        return items

    def texts(self, name: str) -> list[str]:
        """A field that holds one text or a list of them, stripped. Raises ValueError otherwise."""
        texts = [self.text(name)] if isinstance(self.row.get(name), str) else self.items(name, str)
        return [text.strip() for text in texts]

    def part(self, row: Mapping[str, Any]) -> DatasetRow:
        """An object inside of this row."""
        return DatasetRow(row, self.where, self.number, self.left_out)

    def inside(self, name: str, key: str) -> DatasetRow:
        """The object in a field, which has a `key`. Raises ValueError if there is something else."""
        value = self.row.get(name)
        if not isinstance(value, Mapping):
            raise ValueError(f"{self.where}: {name!r} is an object with {key!r}, got {str(value)[:80]!r}")
        return self.part(value)

    def title(self) -> str | None:
        """The field ``title``, which may be missing or empty."""
        return None if self.row.get("title") is None else self.text("title") or None

    def documents(
        self, texts: Iterable[tuple[str | None, str]], num_documents: int | None = None
    ) -> tuple[Document, ...]:
        """A document of each (title, text), or of the first `num_documents`; empty ones are left out and counted."""
        documents = []
        for title, text in texts:
            if text.strip():
                documents.append(Document(text, title=title or None))
            else:
                self.left_out["empty document left out"] += 1
        if num_documents is not None and len(documents) > num_documents:
            self.left_out["row with more documents than num_documents"] += 1
        return tuple(documents[:num_documents])

    def example(
        self, documents: tuple[Document, ...], query: str, answers: Iterable[str], *, group: str, id: Any = None
    ) -> Example | str:
        """The example of this row (its id is the field ``id`` by default), or the reason why there is none."""
        accepted = tuple(dict.fromkeys(answer for answer in answers if answer.strip()))
        if not query.strip():
            return "empty query"
        if not documents:
            return "no documents"
        if not accepted:
            return "no answer"
        id = self.row.get("id") if id is None else id
        return Example(documents, query, accepted[0], accepted, id=None if id is None else str(id), group=group.strip())

    def check_text(self, value: Any, name: str) -> str:
        """`value` if it is a text. Raises ValueError otherwise."""
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name!r} is a text, got {str(value)[:80]!r}")
        return value


def read_records(path: str | Path, dataset: str, *, lines: bool = False) -> list[DatasetRow]:
    """All rows of ``.json`` (a list), ``.jsonl``, either with ``.gz``, or of a set on the Hub (``hf://``).

    Args:
        lines: a file of any name has a row in each line, unless it begins as a list.

    Raises:
        ValueError: when something in the file isn't what it should be.
    """
    if on_hub(path):
        return [
            DatasetRow(
                _without_nulls(row), f"{path}[{index}]", index, nulls=frozenset(key for key in row if row[key] is None)
            )
            for index, row in enumerate(load_hub_rows(str(path), dataset))
        ]
    path = Path(path)
    content = read_text(path, dataset)
    lines = lines and not content.lstrip().startswith("[")
    if lines or path.name.removesuffix(".gz").endswith(".jsonl"):
        # not splitlines: JSON strings may hold U+2028 and the like
        places = [(number, f"{path}:{number}", line) for number, line in enumerate(content.split("\n"), start=1)]
        records = [DatasetRow(_parsed(line, where), where, number) for number, where, line in places if line.strip()]
    else:
        rows = _parsed(content, str(path))
        if not isinstance(rows, list):
            raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}")
        records = [DatasetRow(row, f"{path}[{index}]", index) for index, row in enumerate(rows)]
    for record in records:
        if not isinstance(record.row, Mapping):
            raise ValueError(f"{record.where}: expected an object, got {type(record.row).__name__}")
    return records


def read_object(path: Path, dataset: str) -> DatasetRow:
    """A file that holds one JSON object. Raises ValueError if it doesn't."""
    content = _parsed(read_text(path, dataset), str(path))
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: expected an object, got {type(content).__name__}")
    return DatasetRow(content, str(path))


def read_text(path: Path, dataset: str) -> str:
    """A file's text, unpacked if it is gzipped. Raises ValueError if it can't be read."""
    try:
        data = path.read_bytes()
        return (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (EOFError, OSError, UnicodeDecodeError, zlib.error) as error:
        raise ValueError(f"dataset {dataset!r}: {path} can't be read ({type(error).__name__}: {error})") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _without_nulls(item) for key, item in value.items() if item is not None}
    return [_without_nulls(item) for item in value] if isinstance(value, list) else value


def _parsed(text: str, where: str) -> Any:
    try:
        value = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if "\\ud" in text.lower() and _HALF.search(json.dumps(value, ensure_ascii=False)):
        raise ValueError(f"{where} holds half of a character, such as \\ud83d alone: replace it")
    return value
