"""Rows of a JSON, JSONL or gzipped file, with errors that name file and row, and one side of the split of them."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from comb.documents import Example
from comb.evaluation.datasets import Counts, Dataset
from comb_training.data.grouping import Split, seeded, split_groups

T = TypeVar("T")


@dataclass(frozen=True)
class Record:
    """One row and where it stands, for errors."""

    row: Mapping[str, Any]
    where: str

    def text(self, name: str, *others: str) -> str:
        """The first of these fields that is there, a text. Raises ValueError if none is, or it is something else."""
        for field in (name, *others):
            if self.row.get(field) is not None:
                return self.check_text(self.row[field], field)
        raise ValueError(f"{self.where}: there is no {' or '.join(map(repr, (name, *others)))}")

    def items(self, name: str, kind: type) -> list[Any]:
        """A list field whose items are all of one type. Raises ValueError otherwise."""
        items = self.row.get(name)
        if not isinstance(items, list) or not all(isinstance(item, kind) for item in items):
            raise ValueError(f"{self.where}: {name!r} is a list of {kind.__name__}, got {str(items)[:80]!r}")
        return items

    def check_text(self, value: Any, name: str) -> str:
        """`value` if it is a text. Raises ValueError otherwise."""
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name!r} is a text, got {str(value)[:80]!r}")
        return value


def read_records(path: str | Path | None, dataset: str) -> list[Record]:
    """All rows of ``.json`` (a list), ``.jsonl``, or either with ``.gz``.

    Raises:
        ValueError: when there is no path, or something in the file isn't what it should be.
    """
    if path is None:
        raise ValueError(f"dataset {dataset!r} needs a path: its JSON or JSONL file (data.path=FILE, or --path FILE)")
    path = Path(path)
    try:
        data = path.read_bytes()
        content = (gzip.decompress(data) if path.suffix == ".gz" else data).decode("utf-8-sig")
    except (EOFError, OSError, UnicodeDecodeError) as error:
        raise ValueError(f"dataset {dataset!r}: {path} can't be read ({type(error).__name__}: {error})") from error
    name = path.name.removesuffix(".gz")
    records = list(_lines(content, path) if name.endswith(".jsonl") else _list(content, path))
    for record in records:
        if not isinstance(record.row, Mapping):
            raise ValueError(f"{record.where}: expected an object, got {type(record.row).__name__}")
    return records


def _lines(content: str, path: Path) -> Iterator[Record]:
    # not splitlines: JSON strings may hold U+2028 and the like
    for number, line in enumerate(content.split("\n"), start=1):
        if line.strip():
            yield Record(_parsed(line, f"{path}:{number}"), f"{path}:{number}")


def _list(content: str, path: Path) -> Iterator[Record]:
    rows = _parsed(content, str(path))
    if not isinstance(rows, list):
        raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}")
    for index, row in enumerate(rows):
        yield Record(row, f"{path}[{index}]")


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def convert(records: Iterable[Record], example: Callable[[Record], Example | str], counts: Counts) -> list[Example]:
    """Examples of all rows; a row for which `example` gives a reason instead is dropped and counted."""
    examples = []
    for record in records:
        counts.read += 1
        made = example(record)
        if isinstance(made, str):
            counts.drop(made)
        else:
            examples.append(made)
    return examples


def first_documents(items: list[T], num_documents: int | None, counts: Counts) -> list[T]:
    """The first `num_documents` items, or all; a row that loses some is counted."""
    if num_documents is None or len(items) <= num_documents:
        return items
    counts.truncate("row with more documents than num_documents")
    return items[:num_documents]


def finish(
    name: str,
    examples: list[Example],
    counts: Counts,
    *,
    split: Split,
    seed: int,
    limit: int | None,
    heldout_share: float,
) -> Dataset:
    """One side of the split, whole groups, and at most `limit` examples drawn with the seed."""
    side = split_groups((str(example.group) for example in examples), split, heldout_share=heldout_share, seed=seed)
    kept = [example for example in examples if example.group in side]
    counts.read -= len(examples) - len(kept)  # the other side's rows aren't read
    if limit is not None and len(kept) > limit:
        counts.drop("over the limit", len(kept) - limit)
        seeded(seed, "limit").shuffle(kept)
        kept = kept[:limit]
    return Dataset(tuple(kept), counts, name)
