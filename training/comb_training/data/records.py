"""Rows of a JSON, JSONL or gzipped file or of a set on the Hub, with errors that name file and row."""

from __future__ import annotations

import gzip
import json
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from comb.documents.datasets import HUB, MissingDataError
from comb.documents.document import Document, Example

_GZIP = b"\x1f\x8b"
_HALF = re.compile("[\ud800-\udfff]")  # what JSON can escape, and no tokenizer takes
_FILLERS = "\u115f\u1160\u2800\u3164\uffa0"  # letters to Unicode, and nothing to see


def is_blank(text: str) -> bool:
    """Whether there is nothing to see in a text: white space, control and format characters (as zero-width space)."""
    return all(
        character.isspace() or character in _FILLERS or unicodedata.category(character) in ("Cc", "Cf", "Zs")
        for character in text
    )


@dataclass(frozen=True)
class DatasetRow:
    """One row, where it stands (for errors), and what was left out of it.

    Every reader, of files as of the Hub, takes a row's fields from here. What is null or `is_blank` is "", and a row
    that has nothing else where an example needs something is dropped (`example`); a field that isn't there at all, is
    of another type or holds half of a character is a ValueError that names the row.
    """

    row: Mapping[str, Any]
    where: str
    number: int = 0
    """The line in its file, from 1, or the place in its list, from 0."""
    left_out: Counter[str] = field(default_factory=Counter)

    def text(self, name: str, *others: str) -> str:
        """The first of these fields that isn't null, a text; blank where all that are there are null."""
        there = self._there(name, *others)
        return next((self.check_text(self.row[key], key) for key in there if self.row[key] is not None), "")

    def _there(self, *names: str) -> list[str]:
        there = [key for key in names if key in self.row]
        if not there:
            fields = ", ".join(map(repr, self.row)) or "nothing"
            raise ValueError(f"{self.where}: there is no {' or '.join(map(repr, names))}; there is {fields}"[:300])
        return there

    def items(self, name: str, *kinds: type) -> list[Any]:
        """A list field whose items are all of one of these types; empty where it is null."""
        self._there(name)
        items = [] if self.row[name] is None else self.row[name]
        if not isinstance(items, list) or not all(isinstance(item, kinds) for item in items):
            expected = " or ".join("texts" if kind is str else "objects" for kind in kinds)
            one = ": put it in brackets" if isinstance(items, kinds) else ""
            raise ValueError(f"{self.where}: {name!r} is a list of {expected}, got {str(items)[:80]!r}{one}")
        return [self.check_text(item, name) if isinstance(item, str) else item for item in items]

    def texts(self, name: str) -> list[str]:
        """A field that holds one text or a list of them, stripped."""
        texts = [self.text(name)] if isinstance(self.row.get(name), str) else self.items(name, str)
        return [text.strip() for text in texts]

    def parts(self, name: str) -> list[DatasetRow]:
        """A list field of objects, each of which counts what is left out of it alone."""
        items = enumerate(self.items(name, dict))
        return [DatasetRow(item, f"{self.where}: {name}[{index}]") for index, item in items]

    def title(self) -> str | None:
        """The field ``title``, which may be missing or blank."""
        return (self.text("title") if "title" in self.row else "") or None

    def label(self, *names: str) -> str | None:
        """What a row, a document or a group is called: the first of these fields that isn't blank, text or number."""
        for name in names:
            value = self.row.get(name)
            if isinstance(value, bool) or not isinstance(value, str | int | float | None):
                raise ValueError(f"{self.where}: {name!r} is a text or a number, got {str(value)[:80]!r}")
            # tables have NaN where a number is missing
            if value is not None and value == value and (text := self.check_text(str(value), name).strip()):
                return text
        return None

    def flag(self, name: str) -> bool | None:
        """A field that is true or false; None where it is missing or null."""
        value = self.row.get(name)
        if not isinstance(value, bool | None):
            raise ValueError(f"{self.where}: {name!r} is true or false, got {str(value)[:80]!r}")
        return value

    def documents(
        self, texts: Iterable[tuple[str | None, str, *tuple[str | None, ...]]], num_documents: int | None = None
    ) -> tuple[Document, ...]:
        """A document of each (title, text) or (title, text, id), or of the first `num_documents`; blank ones are left
        out and counted."""
        documents = []
        for title, text, *id in texts:
            if not is_blank(text):
                documents.append(Document(text, title=title, id=id[0] if id else None))
            else:
                self.left_out["empty document left out"] += 1
        if num_documents is not None and len(documents) > num_documents:
            self.left_out["row with more documents than num_documents"] += 1
        return tuple(documents[:num_documents])

    def example(
        self, documents: tuple[Document, ...], query: str, answers: Sequence[str], *, group: str, id: str | None = None
    ) -> Example | str:
        """The example of this row (its id is the field ``id`` by default), or the reason why there is none.

        Blank answers beside others are left out and counted.
        """
        accepted = [answer for answer in answers if not is_blank(answer)]
        if is_blank(query):
            return "empty query"
        if not documents:
            return "no documents"
        if not accepted:
            return "no answer"
        if len(accepted) < len(answers):
            self.left_out["empty answer left out"] += len(answers) - len(accepted)
        different = tuple(dict.fromkeys(accepted))
        return Example(documents, query, accepted[0], different, id=id or self.label("id"), group=group.strip())

    def check_text(self, value: Any, name: str) -> str:
        """`value` if it is a text that can be written, "" if nothing in it can be seen. Raises ValueError otherwise."""
        if not isinstance(value, str):
            raise ValueError(f"{self.where}: {name!r} is a text, got {str(value)[:80]!r}")
        if not value.isascii() and _HALF.search(value):
            raise ValueError(f"{self.where} holds half of a character, such as \\ud83d alone, in {name!r}: replace it")
        return "" if is_blank(value) else value


def read_records(path: str | Path, dataset: str, *, lines: bool = False) -> list[DatasetRow]:
    """All rows of ``.json`` (a list), ``.jsonl`` or ``.ndjson``, with ``.gz`` or not, or of a set on the Hub
    (``hf://``). `lines`: a file of any name has a row in each line, unless it begins as a list. Raises ValueError when
    something in the file isn't what it should be."""
    if on_hub(path):
        records: list[DatasetRow] = []
        try:
            for row in load_hub_rows(str(path), dataset):
                records.append(DatasetRow(row, f"{path}[{len(records)}]", len(records)))
        except ValueError:
            raise
        except Exception as error:  # of whatever decodes a cell
            raise ValueError(
                f"{path}[{len(records)}] can't be read ({type(error).__name__}: {error}): download the set again"
            ) from error
        return _checked(path, records)
    path = Path(path)
    content = read_text(path, dataset)
    lines = lines and not content.lstrip().startswith("[")
    if lines or has_lines(path):
        # not splitlines: JSON strings may hold U+2028 and the like
        places = [(number, f"{path}:{number}", line) for number, line in enumerate(content.split("\n"), start=1)]
        records = [DatasetRow(_parsed(line, where), where, number) for number, where, line in places if line.strip()]
    else:
        rows = _parsed(content, str(path))
        if not isinstance(rows, list):
            raise ValueError(f"{path}: expected a list of rows, got {type(rows).__name__}")
        records = [DatasetRow(row, f"{path}[{index}]", index) for index, row in enumerate(rows)]
    return _checked(path, records)


def has_lines(path: Path) -> bool:
    """Whether a file has a row in each line, by its name."""
    return path.name.lower().removesuffix(".gz").endswith((".jsonl", ".ndjson"))


def check_rows_in(folder: Path, *marks: str) -> None:
    """Raises ValueError for a folder with one of the files that `save_to_disk` of datasets leaves (`marks`)."""
    if any((folder / mark).is_file() for mark in marks):
        raise ValueError(
            f"{folder} was written by save_to_disk of the package datasets, in a form of its own: write it with "
            ".to_json('rows.jsonl'), of each split, and name that file"
        )


def read_object(path: Path, dataset: str) -> DatasetRow:
    """A file that holds one JSON object. Raises ValueError if it doesn't."""
    content = _parsed(read_text(path, dataset), str(path))
    if not isinstance(content, Mapping):
        raise ValueError(f"{path}: expected an object, got {type(content).__name__}")
    return DatasetRow(content, str(path))


def read_text(path: Path, dataset: str) -> str:
    """A file's text, unpacked if it is gzipped. Raises ValueError if it can't be read."""
    what = f"dataset {dataset!r}: {path}"
    if path.is_dir():
        raise ValueError(f"{what} is a folder: name a file in it")
    packed = path.suffix.lower() == ".gz"
    try:
        data = path.read_bytes()
        if not packed and data.startswith(_GZIP):
            raise ValueError(f"{what} is packed by gzip: let its name end in .gz, or unpack it")
        text = (gzip.decompress(data) if packed else data).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        instead = _instead(path) or f"save it as UTF-8 (tables such as parquet are read as {HUB}FOLDER)"
        raise ValueError(f"{what} is not UTF-8 text ({error}): {instead}") from error
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{what} is not gzipped, or cut off ({error}): download or pack it again") from error
    except OSError as error:
        raise ValueError(f"{what} can't be read ({error.strerror}): see who may read it (ls -l)") from error
    if instead := _instead(path):
        raise ValueError(f"{what} is not JSON: {instead}")
    return text


def _instead(path: Path) -> str:
    """What to do with a file of another kind, by its name."""
    kind = path.name.lower().removesuffix(".gz").rpartition(".")[2]
    if kind in ("parquet", "arrow"):
        return f"name its folder, {HUB}{path.parent.resolve()}"
    if kind in ("zst", "xz", "bz2", "zip"):
        return "unpack it, or pack it by gzip"
    if kind in ("csv", "tsv", "xlsx", "xls", "ods"):
        row = '{"documents": ["..."], "query": "...", "answer": "..."}'
        return f"save its rows as JSONL, a line for each: {row}, or what docs/training.md names for another data set"
    return ""


def read_alike(files: Sequence[str | Path], dataset: str, *names: str, lines: bool = False) -> list[DatasetRow]:
    """`read_records` of several files, whose rows all have the fields `names`. Raises ValueError as `read_records`
    does; for files of other rows, by their first ones, before any row is used."""
    read = [read_records(file, dataset, lines=lines) for file in files]
    other = [Path(file).name for file, rows in zip(files, read, strict=True) if not set(names) <= set(rows[0].row)]
    if other and len(other) < len(files):
        raise ValueError(
            f"dataset {dataset!r}: {Path(files[0]).parent} has {len(other)} of {len(files)} files with other rows than "
            f"{', '.join(names)} ({', '.join(other[:5])}): move them away, or name one file"
        )
    return list(chain.from_iterable(read))


def _checked(path: str | Path, records: list[DatasetRow]) -> list[DatasetRow]:
    if not records:
        raise ValueError(f"{path} has no row")
    for record in records:
        if not isinstance(record.row, Mapping):
            raise ValueError(f"{record.where}: expected an object, got {type(record.row).__name__}")
    return records


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{where} is not JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        twice = next(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
        raise ValueError(f"one object has {twice!r} twice")
    return found


_ADVICE = (
    ", and that the Hub can be reached (HF_HUB_OFFLINE not set; HF_TOKEN for sets that ask for it). Without network, "
    "download it elsewhere (hf download {name} --repo-type dataset --local-dir FOLDER/{name}): a mixture takes it by "
    f"data.path=FOLDER, comb bench by --data FOLDER, and anything by {HUB}FOLDER/{{name}} with the full path"
)


def on_hub(path: str | Path | None) -> bool:
    """Whether the path names a set on the Hugging Face Hub."""
    return str(path).startswith(HUB)


def load_hub_rows(path: str, dataset: str) -> Any:
    """The rows of ``hf://org/name?config=...&split=...&revision=...`` (all three optional), as mappings.

    What follows ``hf://`` may also be a folder here (``hf:///data/name``). Raises ValueError for a name that is none,
    without the package datasets, or when it can't load the set (`MissingDataError` where the Hub can't be reached).
    """
    name, _, query = path.removeprefix(HUB).partition("?")
    parts = [part.partition("=") for part in query.split("&")] if query else []
    wrong = ["".join(part) for part in parts if part[0] not in ("config", "split", "revision") or not part[2]]
    if wrong or not name.strip("/"):
        what = f"has {wrong[0]!r}" if wrong else "names no set"
        raise ValueError(f"dataset {dataset!r}: {path} {what}; expected {HUB}org/name?config=...&split=...")
    options = {key: unquote(value) for key, _, value in parts}
    try:
        from datasets import load_dataset  # type: ignore[import-untyped]
    except ImportError as error:
        raise ValueError(
            f"dataset {dataset!r}: {path} needs the package datasets: pip install 'comb-pic[train]' (or datasets)"
        ) from error
    check_rows_in(Path(name), "state.json")  # the folder of a DatasetDict is read
    try:
        loaded: Any = load_dataset(
            name, options.get("config"), revision=options.get("revision"), split=options.get("split")
        )
    except Exception as error:  # the network, rights, a script in the repository, the files: each has its own type
        told = error.__cause__ if type(error).__name__ == "DatasetGenerationError" and error.__cause__ else error
        reason = next(iter(str(told).strip().splitlines()), "")
        advice = "" if name.startswith("/") else _ADVICE.format(name=name)
        kind = MissingDataError if isinstance(told, ConnectionError) else ValueError  # a dry run goes on without it
        raise kind(
            f"dataset {dataset!r}: {path} can't be loaded ({type(told).__name__}: {reason}). Check name, config and "
            f"split{advice}"
        ) from error
    if isinstance(loaded, Mapping):
        if len(loaded) != 1:
            raise ValueError(
                f"dataset {dataset!r}: {path} has the splits {', '.join(loaded)}: add split=... to the path"
            )
        loaded = next(iter(loaded.values()))
    return loaded
