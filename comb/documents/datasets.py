"""The dataset registry: a reader turns a file (or nothing, for generated data) into examples and an account of them."""

from __future__ import annotations

import inspect
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comb.documents.document import Example
from comb.registry import Registry

HUB = "hf://"
"""How a path to a set on the Hugging Face Hub begins: ``hf://org/name?config=...&split=...``."""
DATA = "data"
"""Folder of the public sets that `scripts/fetch-data` gets, where none is named."""
_ON_HUB = r"([\w.-]+/[\w.-]+)(\?.*)?"


@dataclass
class Counts:
    """What happened to the rows of a dataset: read, and per reason dropped or changed. Nothing disappears silently."""

    read: int = 0
    dropped: Counter[str] = field(default_factory=Counter)  # rows that gave no example
    truncated: Counter[str] = field(default_factory=Counter)  # things that were shortened, by what they are
    noted: Counter[str] = field(default_factory=Counter)  # what else happened, without a loss
    repeated: int = 0  # examples that come once more than they were read
    sets: dict[str, Counts] = field(default_factory=dict)
    """Of a mixture, the counts of each set; `dropped` and `truncated` here are what happened afterwards."""

    @property
    def kept(self) -> int:
        """Examples there are now."""
        given = sum(counts.kept for counts in self.sets.values()) if self.sets else self.read + self.repeated
        return given - sum(self.dropped.values())

    def drop(self, reason: str, n: int = 1) -> None:
        """Counts `n` rows that gave no example."""
        if n:
            self.dropped[reason] += n

    def truncate(self, reason: str, n: int = 1) -> None:
        """Counts `n` things that were shortened (the reason says which)."""
        if n:
            self.truncated[reason] += n

    def note(self, what: str, n: int = 1) -> None:
        """Counts `n` things that happened without a loss of rows."""
        if n:
            self.noted[what] += n

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        content: dict[str, Any] = {"read": self.read, "kept": self.kept}
        for kind in ("dropped", "truncated"):
            of_sets = [(f"{name}: ", getattr(counts, kind)) for name, counts in self.sets.items()]
            found = [("", getattr(self, kind)), *of_sets]
            content[kind] = {prefix + reason: n for prefix, counted in found for reason, n in counted.items()}
        sets = {name: counts.to_dict() for name, counts in self.sets.items()}
        more = {"noted": dict(self.noted), "repeated": self.repeated, "sets": sets}
        return content | {name: value for name, value in more.items() if value}

    def __str__(self) -> str:
        dropped = sorted(self.dropped.items())
        if self.sets:
            lines = [f"{self.kept} examples of {self.read} rows"]
            lines += [f"{name}: {own}" for name, own in self.sets.items()]
            return "\n  ".join([*lines, *(f"dropped: {n} {reason}" for reason, n in dropped)])
        parts = [f"{self.kept - self.repeated} of {self.read} rows kept"]
        parts += [f"{n} dropped: {reason}" for reason, n in dropped]
        parts += [f"{n} truncated: {reason}" for reason, n in sorted(self.truncated.items())]
        parts += [f"{n} {what}" for what, n in sorted(self.noted.items())]
        return "; ".join([*parts, f"{self.repeated} repeated"] if self.repeated else parts)


@dataclass(frozen=True)
class Dataset:
    """Examples in a fixed order, with the account of how they came about."""

    examples: tuple[Example, ...]
    counts: Counts = field(default_factory=Counts)
    name: str = ""

    def __len__(self) -> int:
        return len(self.examples)

    def __getitem__(self, index: int) -> Example:
        return self.examples[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.examples)


DatasetReader = Callable[..., Dataset]
"""``reader(path=None, *, split, seed, limit, ...) -> Dataset``; readers of generated data take no path.

Every reader has the options ``split`` ("train", "heldout" or "all"), ``seed`` and ``limit`` (examples at most); those
that put documents together have ``num_documents``.
"""


class MissingDataError(ValueError):
    """What a dataset is read from was not named, or is not there."""


class DatasetRegistry(Registry[DatasetReader]):
    """Readers by name, and where their datasets are on the Hub."""

    def __init__(self) -> None:
        super().__init__("dataset")
        self.hub_ids: dict[str, Mapping[str, str]] = {}

    def register(
        self, name: str, *, hub_id: str | Mapping[str, str] | None = None
    ) -> Callable[[DatasetReader], DatasetReader]:
        """Decorator of a reader.

        Args:
            hub_id: what model cards link to; or such ids by a part of the path that was read, the first that fits.
        """
        if hub_id is not None:
            self.hub_ids[name] = {"": hub_id} if isinstance(hub_id, str) else hub_id
        return super().register(name)


datasets = DatasetRegistry()


def hub_id(name: str, path: str | Path | None = None) -> str | None:
    """The id on the Hub of a registered dataset, or of the one that `path` names; None if the Hub doesn't have it."""
    try:
        name, path = locate(name, path)
    except ValueError:  # a file that isn't here any more
        return None
    text = str(path or "")
    if named := re.fullmatch(f"{HUB}{_ON_HUB}", text):
        return named[1]
    ids = datasets.hub_ids.get(name, {}) if name in datasets else {}
    return next((found for part, found in ids.items() if part in text.lower()), None)


def locate(name: str, path: str | Path | None = None) -> tuple[str, str | Path | None]:
    """The reader and the path of data that one text names.

    That is a registered name; a file or folder of rows with documents, query and answer, for the reader `jsonl`; or a
    set on the Hub, ``hf://org/name?split=...`` or plainly ``org/name`` where no such folder is here, for the reader
    whose set it is, or `jsonl` as well.

    Raises:
        ValueError: for a text that is none of them.
    """
    if path is not None or name in datasets:
        return name, path if path is None else _at_home(str(path))
    name = _at_home(name)
    if not name.startswith(HUB):
        if (name and Path(name).exists()) or name.removesuffix(".gz").endswith((".json", ".jsonl", ".ndjson")):
            return "jsonl", name
        if re.fullmatch(_ON_HUB, name):
            name = f"{HUB}{name}"
    if name.startswith(HUB):
        on_hub = hub_id("", name)
        return next((reader for reader, ids in datasets.hub_ids.items() if on_hub in ids.values()), "jsonl"), name
    raise ValueError(
        f"unknown dataset {name!r}; known: {', '.join(datasets.names()) or 'none'}; or give a file or folder of rows "
        f"with documents, query and answer (there is none of this name), or {HUB}org/name"
    )


def below(folder: str | Path, path: str) -> str:
    """Where a set is that a file of sets names: a path below the folder of all sets' data, unless it is a whole one.

    A set on the Hub is read from ``FOLDER/org/name``, a copy of its repository, where there is one.
    """
    if not path.startswith(HUB):
        return str(Path(folder, path))
    name, mark, query = path.removeprefix(HUB).partition("?")
    copy = Path(folder, name)
    return f"{HUB}{copy.resolve()}{mark}{query}" if not name.startswith("/") and copy.is_dir() else path


def _at_home(path: str) -> str:
    # shells leave the ~ in data=~/mine.jsonl
    return str(Path(path).expanduser()) if path.startswith("~") else path


def read_dataset(name: str, path: str | Path | None = None, **options: Any) -> Dataset:
    """Reads the dataset that `name` names (`locate`), or the registered `name` from `path`.

    Raises:
        ValueError: for an unknown name, an option the reader doesn't have, a missing or malformed file, or when
            no example is left.
    """
    given = name
    name, path = locate(name, path)
    reader = datasets.get(name)
    parameters = inspect.signature(reader).parameters
    known = parameters.keys() - {"path"}
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    if not takes_any and (unknown := sorted(options.keys() - known)):
        raise ValueError(f"dataset {name!r} has no option {unknown[0]!r}; it knows: {', '.join(sorted(known))}")
    if path is not None and not str(path).startswith(HUB) and not os.path.exists(path):  # noqa: PTH110  which a name too long for one, or with a NUL, isn't an error of
        elsewhere = (
            f". scripts/fetch-data gets public sets into {DATA}/ (--list shows which); what lies elsewhere is named by "
            "data.path=..., in comb bench by --data FOLDER"
        )
        # rows of one's own, of `jsonl`, are nowhere else
        raise MissingDataError(
            f"dataset {name!r}: there is no file or folder {str(path)!r}{'' if name == 'jsonl' else elsewhere}"
        )
    try:
        dataset = reader(path, **options)
    except ValueError as error:
        if path == f"{HUB}{given}":  # as likely a folder that was mistyped
            raise type(error)(f"there is no file or folder {given!r} here, and on the Hub: {error}") from error
        raise
    if not dataset.examples:
        raise ValueError(f"dataset {name!r} gives no example ({dataset.counts})")
    return dataset
