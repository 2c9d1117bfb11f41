"""What a reader is asked for, the decorators that make one of a function (CONTRIBUTING.md), splits and draws."""

from __future__ import annotations

import functools
import hashlib
import inspect
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any, Literal, TypeVar, get_args

from comb.documents.datasets import HUB, Counts, Dataset, MissingDataError, datasets
from comb.documents.document import Example
from comb_training.data.records import DatasetRow, read_records

T = TypeVar("T")
H = TypeVar("H", bound=Hashable)

Split = Literal["train", "heldout", "all"]
SideReader = Callable[..., Iterable[Example]]
RowReader = Callable[..., Example | str]


@dataclass
class DatasetSide:
    """One side of a dataset, from where it is read, and the account of what happens to its rows."""

    name: str
    path: str | Path
    split: Split
    seed: int
    limit: int | None  # examples at most, drawn with the seed
    heldout_share: float  # of the groups
    counts: Counts = field(default_factory=Counts)

    def groups(self, groups: Iterable[str]) -> set[str]:
        """Those of all groups (articles, stories) that are on this side.

        Groups are ordered by a hash of seed and name and the first ``ceil(share * n)`` are held out, so that the same
        file, share and seed always give the same two sides. Raises ValueError if the split is unknown, the share is not
        in 0..1, or one group can't be on two sides.
        """
        names = sorted(set(groups))
        if self.split not in get_args(Split):
            raise ValueError(f"split is one of {', '.join(get_args(Split))}, not {self.split!r}")
        if self.split == "all":
            return set(names)
        if not 0 < self.heldout_share < 1:
            raise ValueError(f"heldout_share must be between 0 and 1, not {self.heldout_share}")
        if len(names) < 2:
            raise ValueError(
                f"can't hold out part of {len(names)} group(s): rows over the same documents (an article, a story) "
                "stay on one side of the split, so that the data needs two at least; split=all (--split all) takes all "
                "rows"
            )
        ranked = sorted(names, key=lambda name: hashlib.sha256(f"{self.seed}\x1f{name}".encode()).digest())
        cut = min(math.ceil(self.heldout_share * len(names)), len(names) - 1)
        return set(ranked[:cut] if self.split == "heldout" else ranked[cut:])

    def rng(self, *keys: object) -> Random:
        """A generator for one row."""
        return seeded(self.seed, *keys)

    def rows(
        self, example: Callable[[DatasetRow], Example | str], records: Iterable[DatasetRow] | None = None
    ) -> list[Example]:
        """Examples of the rows on this side, whole groups.

        A row for which `example` gives a reason instead is dropped and counted (on both sides: it has no group); what
        was left out of a row counts on its own side. `records`: all rows of the file at `path` by default.
        """
        made: list[tuple[Example, DatasetRow]] = []
        for number, record in enumerate(read_records(self.path, self.name) if records is None else records, start=1):
            found = example(record)
            if isinstance(found, str):
                self.counted(found, record)
            else:
                made.append((replace(found, id=found.id or str(number)), record))
        # where all rows are dropped, the counts say why, and there is nothing to split
        here = self.groups(str(found.group) for found, _ in made) if made else set()
        return [one for found, record in made if found.group in here for one in self.counted(found, record)]

    def counted(self, found: Example | str, record: DatasetRow) -> list[Example]:
        """The example of a row on this side, or none where there is a reason instead; either is counted."""
        self.counts.read += 1
        if isinstance(found, str):
            self.counts.drop(found)
            return []
        self.counts.truncated.update(record.left_out)
        return [found]

    def limited(self, examples: list[Example]) -> list[Example]:
        """At most `limit` of the examples, drawn with the seed."""
        if self.limit is None or len(examples) <= self.limit:
            return examples
        drawn = list(examples)
        self.rng("limit").shuffle(drawn)
        return self.first(drawn)

    def first(self, examples: list[Example]) -> list[Example]:
        """The first `limit` of the examples, which came in random order."""
        if self.limit is not None:
            self.counts.drop("over the limit", max(0, len(examples) - self.limit))
        return examples[: self.limit]


def reader(
    name: str,
    *,
    hub_id: str | Mapping[str, str] | None = None,
    heldout_share: float = 0.2,
    reads: str = f"its file, or a set on the Hub ({HUB}org/name?split=train)",
) -> Callable[[SideReader], SideReader]:
    """Decorator: registers a function from a `DatasetSide`, and options of its own, to examples as a dataset's reader.

    It has the options split, seed, limit and heldout_share beside its own. Readers raise ValueError for a missing path,
    a malformed file or row, naming it, and options out of range.

    Args:
        hub_id: as for `datasets.register`.
        heldout_share: the default.
        reads: what a path leads to, for who gives none.
    """

    def add(examples: SideReader) -> SideReader:
        @functools.wraps(examples)
        def read(
            path: str | Path | None = None,
            *,
            split: Split = "all",
            seed: int = 0,
            limit: int | None = None,
            heldout_share: float = heldout_share,
            **options: Any,
        ) -> Dataset:
            if path is None:
                raise MissingDataError(f"dataset {name!r} needs a path (data.path=PATH, or --path PATH): {reads}")
            num_documents = options.get("num_documents")
            if num_documents is not None and num_documents < 1:
                raise ValueError(f"num_documents must be at least 1, not {num_documents}")
            side = DatasetSide(name, path, split, seed, limit, heldout_share)
            return Dataset(tuple(examples(side, **options)), side.counts, name)

        own: Sequence[inspect.Parameter] = list(inspect.signature(examples).parameters.values())[1:]
        common = list(inspect.signature(read, follow_wrapped=False).parameters.values())[:-1]
        read.__signature__ = inspect.Signature([*common, *own])  # type: ignore[attr-defined]  # what inspect looks at
        datasets.register(name, hub_id=hub_id)(read)
        return examples

    return add


def row_reader(name: str, *, hub_id: str | Mapping[str, str] | None = None) -> Callable[[RowReader], RowReader]:
    """Decorator: `reader` of a function from one `DatasetRow`, and options, to its example or why there is none.

    The rows are those of JSON, JSONL or a set on the Hub (`read_records`).
    """

    def add(example: RowReader) -> RowReader:
        @functools.wraps(example)  # whose options and module are the reader's, too
        def read(side: DatasetSide, **options: Any) -> list[Example]:
            return side.limited(side.rows(functools.partial(example, **options)))

        reader(name, hub_id=hub_id)(read)
        return example

    return add


def seeded(seed: int, *keys: object) -> Random:
    """A generator that depends on the seed and the keys alone, so that no row's draw depends on another row."""
    digest = hashlib.sha256("\x1f".join(map(str, (seed, *keys))).encode()).digest()
    return Random(digest)


def content_group(*texts: str) -> str:
    """The group of rows that are about the same texts."""
    return hashlib.sha256("\x1f".join(texts).encode()).hexdigest()[:16]


def pick_distractors(
    rng: Random, pools: Sequence[tuple[Sequence[H], int]], *, exclude: Collection[H], total: int
) -> list[H]:
    """Up to `total` different items from pools in order of preference.

    Args:
        pools: (items, how many at most from this pool); what one pool can't give, the later ones do.
        exclude: items that must not be picked (the document that holds the answer).
        total: how many to pick; fewer come back when the pools run dry (the caller counts that).
    """
    taken: dict[H, None] = dict.fromkeys(exclude)
    picked: list[H] = []
    for items, at_most in pools:
        free = list(dict.fromkeys(item for item in items if item not in taken))
        wanted = min(at_most, total - len(picked), len(free))
        chosen = rng.sample(free, wanted)
        picked += chosen
        taken.update(dict.fromkeys(chosen))
    return picked


def draw(rng: Random, items: Sequence[T], total: int, fits: Callable[[T], bool]) -> list[T]:
    """Up to `total` items that fit, from different places and in random order.

    Looks at no more items than it needs, so that drawing for every row of a long file stays linear; fewer come back
    when the items run out (the caller counts that).
    """
    drawn: list[T] = []
    moved: dict[int, int] = {}  # the part of a Fisher-Yates shuffle that was made so far
    for place in range(len(items)):
        if len(drawn) >= total:
            break
        other = rng.randrange(place, len(items))
        item = items[moved.get(other, other)]
        moved[other] = moved.get(place, place)
        if fits(item):
            drawn.append(item)
    return drawn
