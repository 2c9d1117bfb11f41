"""The sets that a configuration names, how each is read, and what decides the examples it gives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from comb.documents.datasets import Counts, below, locate, read_dataset
from comb.documents.document import Example
from comb_training.config import DataConfig
from comb_training.data.hub import on_hub


@dataclass(frozen=True)
class Source:
    """One set, and how its rows are read and written.

    Args:
        name: of a set of a mixture; None for data that is no mixture.
        options: of the reader; without split and limit.
        limit: different examples at most, on the train side of a mixture.
    """

    name: str | None
    dataset: str
    path: str | None
    options: Mapping[str, Any]
    weight: float | None = None
    limit: int | None = None
    query_template: str = "{query}"

    def read(self, split: str, limit: int | None = None, others: Iterable[Source] = ()) -> tuple[list[Example], Counts]:
        """One side of the set.

        Args:
            others: sets of the same mixture. On the train side, what they hold out of the same file is dropped.

        Raises:
            ValueError: as `read_dataset` does, naming the set.
        """
        options = {"split": split, "limit": self._limit(split, limit), **self.options}
        try:
            dataset = read_dataset(self.dataset, self.path, **options)
        except ValueError as error:
            if self.name is None:
                raise
            raise type(error)(f"data.mixture, set {self.name!r}: {error}") from error
        counts, examples = dataset.counts, list(dataset)
        for rival in self._rivals(others) if split == "train" else ():
            heldout, _ = rival.read("heldout")
            ids = {example.id for example in heldout} - {None}
            groups = {example.group for example in heldout} - {None}
            kept = [example for example in examples if example.id not in ids and example.group not in groups]
            counts.drop(f"held out by set {rival.name}", len(examples) - len(kept))
            examples = kept
        return examples, counts

    def written(self, example: Example) -> Example:
        """The example with its question as the query template writes it."""
        return replace(example, query=self.query_template.replace("{query}", example.query))

    def _limit(self, split: str, limit: int | None) -> int | None:
        return self.limit if split == "train" and self.name is not None else limit

    def _rivals(self, others: Iterable[Source]) -> list[Source]:
        """Sets that read the same file in another way, and may hold out what this one trains on."""
        return [
            other
            for other in others
            if other.name != self.name and self.reads_as(other) and dict(self.options) != dict(other.options)
        ]

    def reads_as(self, other: Source) -> bool:
        """Whether both read the same file, folder or set on the Hub; False for what isn't there."""
        try:
            return self.file is not None and (self.reader, self.file) == (other.reader, other.file)
        except ValueError:
            return False

    @property
    def reader(self) -> str:
        """The registered dataset that reads it."""
        return locate(self.dataset, self.path)[0]

    @property
    def file(self) -> str | None:
        """What is read, by its full path; None for generated data."""
        path = locate(self.dataset, self.path)[1]
        return str(path) if on_hub(path) else None if path is None else str(Path(path).resolve())


def sources(data: DataConfig) -> list[Source]:
    """The sets of a configuration: those of its mixture, or the one there is."""
    common = {"num_documents": data.num_documents, "heldout_share": data.heldout_share}

    def options(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: common[name] if own.get(name) is None else own[name] for name in common}
        return {"seed": data.seed, **more, **{name: value for name, value in given.items() if value is not None}}

    if data.mixture and data.path is not None and Path(data.path).is_file():
        raise ValueError(
            f"data.path={data.path} is a file, but with data.mixture it is the folder of the mixture's files: "
            f"data={data.path} takes it in the place of the mixture"
        )
    if not data.mixture:
        return [Source(None, data.dataset, data.path, options({}, data.options), query_template=data.query_template)]
    found = []
    for entry in data.mixture:
        own = {"num_documents": entry.num_documents, "heldout_share": entry.heldout_share}
        found.append(
            Source(
                entry.name,
                entry.dataset,
                entry.path if data.path is None or entry.path is None else below(data.path, entry.path),
                options(own, entry.options),
                entry.weight,
                entry.limit,
                entry.query_template or data.query_template,
            )
        )
    return found
