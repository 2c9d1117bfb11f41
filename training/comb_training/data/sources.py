"""The sets that a configuration names: where each is, and how its rows are read and written. Without torch: what a
command line has wrong is said at once."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comb.documents.datasets import Counts, below, datasets, locate, read_dataset
from comb.documents.document import Example
from comb_training.config import Config, DataConfig, MixtureEntry
from comb_training.data.records import on_hub


@dataclass(frozen=True)
class Source:
    """One set, and how its rows are read and written."""

    name: str | None  # of a set of a mixture; None for data that is no mixture
    dataset: str
    path: str | None
    options: Mapping[str, Any]  # of the reader; without split and limit
    weight: float | None = None
    limit: int | None = None  # different examples at most, on the train side of a mixture
    query_template: str = "{query}"

    def read(self, split: str, limit: int | None = None, others: Iterable[Source] = ()) -> tuple[list[Example], Counts]:
        """One side of the set. `others`: sets of the same mixture. On the train side, what they hold out of the same
        file is dropped. Raises ValueError as `read_dataset` does, naming the set."""
        limit = self.limit if split == "train" and self.name is not None else limit
        try:
            dataset = read_dataset(self.dataset, self.path, **{"split": split, "limit": limit, **self.options})
        except ValueError as error:
            if self.name is None:
                raise
            raise type(error)(f"data.mixture, set {self.name!r}: {error}") from error
        counts, examples = dataset.counts, list(dataset)
        for other in others if split == "train" else ():
            # one that reads the same file in another way may hold out what this one trains on
            if other.name == self.name or not self.reads_as(other) or dict(self.options) == dict(other.options):
                continue
            heldout, _ = other.read("heldout")
            ids = {example.id for example in heldout} - {None}
            groups = {example.group for example in heldout} - {None}
            kept = [example for example in examples if example.id not in ids and example.group not in groups]
            counts.drop(f"held out by set {other.name}", len(examples) - len(kept))
            examples = kept
        return examples, counts

    def reads_as(self, other: Source) -> bool:
        """Whether both read the same file, folder or set on the Hub; False for what isn't there."""
        try:
            (reader, path), (its_reader, its_path) = (locate(each.dataset, each.path) for each in (self, other))
        except ValueError:
            return False
        if path is None or its_path is None or reader != its_reader:
            return False
        if on_hub(path) or on_hub(its_path):
            return str(path) == str(its_path)
        return Path(path).resolve() == Path(its_path).resolve()


def with_whole_paths(config: Config) -> dict[str, Any]:
    """The configuration as JSON, with paths of its rows that lead there from any folder."""
    content = config.to_dict()
    data = content["data"]

    def whole(entry: dict[str, Any], *keys: str) -> dict[str, Any]:
        named = {key: entry[key] for key in keys if entry[key] is not None and entry[key] not in datasets}
        return entry | {key: str(Path(name).absolute()) for key, name in named.items() if Path(name).exists()}

    keys = ("dataset", "path") if data["path"] is None else ("dataset",)  # else theirs are below that one
    mixture = [whole(entry, *keys) for entry in data["mixture"]]
    return content | {"data": whole(data, "dataset", "path") | {"mixture": mixture}}


def file_digests(data: DataConfig) -> list[str]:
    """What tells each file of rows from what it held before; of folders and sets on the Hub nothing does."""
    found = []
    for place in dict.fromkeys(locate(source.dataset, source.path)[1] for source in sources(data)):
        if place is not None and Path(place).is_file():
            with Path(place).open("rb") as file:
                found.append(hashlib.file_digest(file, "sha256").hexdigest()[:16])
    return found


def sources(data: DataConfig) -> list[Source]:
    """The sets of a configuration: those of its mixture, or the one there is."""
    if data.mixture and data.path is not None and Path(data.path).is_file():
        raise ValueError(
            f"data.path={data.path} is a file, but with data.mixture it is the folder of the mixture's files: "
            f"data={data.path} takes it in the place of the mixture"
        )

    def options(entry: DataConfig | MixtureEntry) -> dict[str, Any]:
        given = {"seed": data.seed, **entry.options}
        for name in ("num_documents", "heldout_share"):
            value = getattr(data, name) if getattr(entry, name) is None else getattr(entry, name)
            given |= {} if value is None else {name: value}
        return given

    if not data.mixture:
        return [Source(None, data.dataset, data.path, options(data), query_template=data.query_template)]
    return [
        Source(
            entry.name,
            entry.dataset,
            entry.path if data.path is None or entry.path is None else below(data.path, entry.path),
            options(entry),
            entry.weight,
            entry.limit,
            entry.query_template or data.query_template,
        )
        for entry in data.mixture
    ]
