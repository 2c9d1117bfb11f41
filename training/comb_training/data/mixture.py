"""Several datasets in one epoch, each with a weight, and the way from a configuration's data to examples.

**Weights** are shares of the epoch's examples. A set's size is the number of its examples on the train side, after all
that is dropped. The epoch is the longest in which no set comes more often than `max_repeats` times its size: the set
that runs out first decides; or it is `epoch_examples` long. What a set has beyond its share is left out, what it lacks
is repeated, both counted. Which examples, the seed, the set's name and its size decide, and no other set.

**The held-out side** of a mixture is that of its sets, in the same shares. A set that has less than its share gives all
it has, and the others give more; nothing is repeated. Where two sets read the same file, no row that one of them holds
out is trained on by the other.
"""

from __future__ import annotations

import bisect
import itertools
import logging
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar, overload

import numpy as np

from comb.documents import Document, Example, PromptBuilder
from comb.evaluation.datasets import Counts, datasets, read_dataset
from comb.splitting import Splitter, Whole, create, split_document
from comb_training import token_cache
from comb_training.batches import TrainingExample, fit_documents, tokenize
from comb_training.config import DataConfig
from comb_training.data.grouping import seeded

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass
class DataCounts(Counts):
    """`Counts` that can say more: what was changed without a loss, and for a mixture what each set did.

    Args:
        noted: what else happened, how often.
        repeated: examples that come once more than they were read.
        sets: counts of every set of a mixture, by name; `dropped` and `truncated` here are what happened afterwards.
    """

    noted: Counter[str] = field(default_factory=Counter)
    repeated: int = 0
    sets: dict[str, DataCounts] = field(default_factory=dict)

    @classmethod
    def of(cls, counts: Counts) -> DataCounts:
        """These counts, to be counted on with."""
        if isinstance(counts, cls):
            return counts
        return cls(counts.read, Counter(counts.dropped), Counter(counts.truncated))

    @classmethod
    def of_sets(cls, sets: Mapping[str, DataCounts]) -> DataCounts:
        """The sum of a mixture."""
        return cls(read=sum(counts.read for counts in sets.values()), sets=dict(sets))

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> DataCounts:
        """What `to_dict` gave, for one set."""
        return cls(
            content["read"],
            Counter(content["dropped"]),
            Counter(content["truncated"]),
            Counter(content.get("noted", {})),
            content.get("repeated", 0),
        )

    @property
    def kept(self) -> int:
        """Examples there are now."""
        if self.sets:
            return sum(counts.kept for counts in self.sets.values()) - sum(self.dropped.values())
        return super().kept + self.repeated

    def note(self, what: str, n: int = 1) -> None:
        """Counts `n` of something that is no loss."""
        if n:
            self.noted[what] += n

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        content = super().to_dict()
        for name, counts in self.sets.items():
            for kind in ("dropped", "truncated"):
                content[kind] |= {f"{name}: {reason}": n for reason, n in getattr(counts, kind).items()}
        for name in ("noted", "repeated"):
            if getattr(self, name):
                content[name] = getattr(self, name)
        if self.sets:
            content["sets"] = {name: counts.to_dict() for name, counts in self.sets.items()}
        return content

    def __str__(self) -> str:
        parts = [super().__str__()]
        if self.repeated:
            parts.append(f"{self.repeated} repeated")
        parts += [f"{n} {what}" for what, n in sorted(self.noted.items())]
        own = "; ".join(parts)
        return "\n  ".join([own, *(f"{name}: {counts}" for name, counts in self.sets.items())])


@dataclass(frozen=True)
class Source:
    """One set, and how its rows are read and written.

    Args:
        name: None for data that is no mixture.
        options: of the reader; without split and limit.
        limit: different examples at most, on the train side.
    """

    name: str | None
    dataset: str
    path: str | None
    options: Mapping[str, Any]
    weight: float = 1.0
    limit: int | None = None
    query_template: str = "{query}"

    def read(
        self, split: str, limit: int | None = None, others: Iterable[Source] = ()
    ) -> tuple[list[Example], DataCounts]:
        """One side of the set.

        Args:
            others: sets of the same mixture. On the train side, what they hold out of the same file is dropped.

        Raises:
            ValueError: as `read_dataset` does, naming the set.
        """
        if split == "train" and self.name is not None:
            limit = self.limit
        try:
            dataset = read_dataset(self.dataset, self.path, **{"split": split, "limit": limit, **self.options})
        except ValueError as error:
            if self.name is None:
                raise
            raise ValueError(f"data.mixture, set {self.name!r}: {error}") from error
        counts = DataCounts.of(dataset.counts)
        examples = list(dataset)
        for other in self.rivals(others) if split == "train" else ():
            heldout, _ = other.read("heldout")
            ids = {example.id for example in heldout} - {None}
            groups = {example.group for example in heldout} - {None}
            kept = [example for example in examples if example.id not in ids and example.group not in groups]
            counts.drop(f"held out by set {other.name}", len(examples) - len(kept))
            examples = kept
        return examples, counts

    def rivals(self, others: Iterable[Source]) -> list[Source]:
        """Sets that read the same file in another way, and may hold out what this one trains on."""
        return [
            other
            for other in others
            if other.name != self.name
            and self.file is not None
            and (self.reader, self.file) == (other.reader, other.file)
            and dict(self.options) != dict(other.options)
        ]

    @property
    def reader(self) -> str:
        """The name of its reader; a .jsonl file may stand where the dataset's name does."""
        return "jsonl" if self.dataset not in datasets and self.dataset.endswith(".jsonl") else self.dataset

    @property
    def file(self) -> str | None:
        """What it reads, if it reads something."""
        path = self.dataset if self.path is None and self.reader != self.dataset else self.path
        return None if path is None else str(Path(path).resolve())

    def key(self, others: Iterable[Source], split: str, limit: int | None) -> dict[str, Any]:
        """What decides its examples, for `token_cache`."""
        rivals = self.rivals(others) if split == "train" else []
        # an option may name a second file
        named = [value for value in self.options.values() if isinstance(value, str) and _is_file(value)]
        return {
            "dataset": self.reader,
            "content": [token_cache.file_key(path) for path in (self.file, *sorted(named))],
            "code": token_cache.code_key(datasets.get(self.reader)),
            "options": dict(self.options),
            "split": split,
            "limit": self.limit if split == "train" and self.name is not None else limit,
            "query_template": self.query_template,
            "rivals": [[rival.name, dict(rival.options)] for rival in rivals],
            "mixture": self.name is not None,
        }


def _is_file(text: str) -> bool:
    try:
        return Path(text).is_file()
    except OSError:  # too long for a name, say
        return False


def sources(data: DataConfig) -> list[Source]:
    """The sets of a configuration: those of its mixture, or the one there is."""
    common = {"num_documents": data.num_documents, "heldout_share": data.heldout_share}

    def options(own: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
        given = {name: own[name] if own.get(name) is not None else common[name] for name in common}
        return {"seed": data.seed, **more, **{name: value for name, value in given.items() if value is not None}}

    if not data.mixture:
        return [Source(None, data.dataset, data.path, options({}, data.options), query_template=data.query_template)]
    return [
        Source(
            entry.name,
            entry.dataset,
            entry.path,
            options({"num_documents": entry.num_documents, "heldout_share": entry.heldout_share}, entry.options),
            entry.weight,
            entry.limit,
            entry.query_template or data.query_template,
        )
        for entry in data.mixture
    ]


# ---- shares ----


def apportion(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` in whole numbers by weight, none off by one or more (largest remainders; ties go to the first name)."""
    exact = {name: Fraction(weight) for name, weight in weights.items()}
    everything = sum(exact.values())
    shares = {name: total * weight / everything for name, weight in exact.items()}
    numbers = {name: math.floor(share) for name, share in shares.items()}
    rest = sorted(shares, key=lambda name: (numbers[name] - shares[name], list(shares).index(name)))
    for name in rest[: total - sum(numbers.values())]:
        numbers[name] += 1
    return numbers


def epoch_numbers(
    sizes: Mapping[str, int],
    weights: Mapping[str, float],
    *,
    max_repeats: float = 1.0,
    epoch_examples: int | None = None,
    limit: int | None = None,
) -> dict[str, int]:
    """How many examples of each set make an epoch; see the module's text.

    Args:
        limit: examples of the epoch at most.

    Raises:
        ValueError: for a set without examples, or an `epoch_examples` for which a set would come too often.
    """
    empty = [name for name, size in sizes.items() if not size]
    if empty:
        raise ValueError(f"data.mixture, set {empty[0]!r}: no example is left")
    most = {name: math.floor(Fraction(max_repeats) * size) for name, size in sizes.items()}
    everything = sum(Fraction(weight) for weight in weights.values())
    longest = {name: math.floor(most[name] * everything / Fraction(weights[name])) for name in sizes}
    total = min(longest.values())
    if epoch_examples is not None:
        if epoch_examples > total:
            first = min(longest, key=lambda name: longest[name])
            wanted = apportion(weights, epoch_examples)[first]
            raise ValueError(
                f"data.epoch_examples={epoch_examples} takes {wanted} of set {first!r}, which has {sizes[first]} "
                f"examples; data.max_repeats={max_repeats:g} allows epochs of {total}: lower data.epoch_examples or "
                f"the set's weight, or set data.max_repeats={math.ceil(wanted / sizes[first])}"
            )
        total = epoch_examples
    return apportion(weights, total if limit is None else min(total, limit))


def heldout_numbers(sizes: Mapping[str, int], weights: Mapping[str, float], limit: int | None) -> dict[str, int]:
    """How many held-out examples each set gives: its share of `limit`, or all it has and the others more."""
    if limit is None or limit >= sum(sizes.values()):
        return dict(sizes)
    numbers: dict[str, int] = {}
    while True:
        free = {name: weights[name] for name in sizes if name not in numbers}
        shares = apportion(free, limit - sum(numbers.values()))
        short = {name: sizes[name] for name, share in shares.items() if share > sizes[name]}
        if not short:
            return {name: (numbers | shares)[name] for name in sizes}
        numbers |= short


def draw(blocks: Sequence[Sequence[int]], number: int, *, seed: int, name: str) -> list[tuple[int, int]]:
    """`number` of a set's examples as (place, round), in the set's order: all of them as often as possible, and some.

    Those over the same documents (a block) are drawn together, so that what is left out leaves no documents behind
    that are encoded for one question.
    """
    size = sum(map(len, blocks))
    rounds, rest = divmod(number, size)
    shuffled = list(blocks)
    seeded(seed, "mixture", name).shuffle(shuffled)
    some = list(itertools.islice(itertools.chain.from_iterable(shuffled), rest))
    return [(place, turn) for turn in range(rounds) for place in range(size)] + [
        (place, rounds) for place in sorted(some)
    ]


def _blocks(items: Sequence[T], documents: Callable[[T], Hashable]) -> list[list[int]]:
    found: dict[Hashable, list[int]] = {}
    for index, item in enumerate(items):
        found.setdefault(documents(item), []).append(index)
    return list(found.values())


def mixed_id(name: str, turn: int, id: str | None, place: int) -> str:
    """An example's id in a mixture: the set's name, which round it is (from the second on), and its id there."""
    return f"{name}{f'@{turn + 1}' if turn else ''}/{place if id is None else id}"


class MixedExamples(Sequence[TrainingExample]):
    """Examples of several sets, each looked up when it is asked for.

    Args:
        parts: per set its name, its examples, and which of them as (place, round).
    """

    def __init__(self, parts: Sequence[tuple[str, Sequence[TrainingExample], Sequence[tuple[int, int]]]]) -> None:
        self._parts = [(name, examples, np.array(drawn).reshape(-1, 2)) for name, examples, drawn in parts]
        self._ends = list(itertools.accumulate(len(drawn) for _, _, drawn in self._parts))

    def __len__(self) -> int:
        return self._ends[-1]

    @overload
    def __getitem__(self, index: int) -> TrainingExample: ...
    @overload
    def __getitem__(self, index: slice) -> list[TrainingExample]: ...
    def __getitem__(self, index: int | slice) -> TrainingExample | list[TrainingExample]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        index = range(len(self))[index]
        part = bisect.bisect_right(self._ends, index)
        name, examples, drawn = self._parts[part]
        place, turn = map(int, drawn[index - self._ends[part]])  # counted from the part's end
        example = examples[place]
        return replace(example, id=mixed_id(name, turn, example.id, place))


# ---- from a configuration to examples ----


def fit(
    examples: Iterable[Example],
    builder: PromptBuilder,
    max_document_tokens: int | None,
    counts: DataCounts,
    splitter: Splitter | None = None,
) -> list[Example]:
    """Documents as long as the encoder takes them: cut off (`fit_documents`), or cut into several by `splitter`.

    The documents that one is cut into stand in its place, in order, and are its tokens, all of them; each different
    document that is cut is counted once.

    Raises:
        ValueError: if the splitter's segments can be longer than `max_document_tokens`.
    """
    if splitter is None or isinstance(splitter, Whole):
        return fit_documents(examples, builder, max_document_tokens, counts)
    if max_document_tokens is not None and splitter.max_tokens > max_document_tokens:
        raise ValueError(
            f"data.splitter makes segments of up to {splitter.max_tokens} tokens, but documents may have "
            f"{max_document_tokens} here (the encoder, or data.max_document_tokens): give it a smaller budget, as in "
            f"paragraphs:{max_document_tokens}"
        )
    parts: dict[Document, tuple[Document, ...]] = {}

    def split(document: Document) -> tuple[Document, ...]:
        if document not in parts:
            ids = builder.segment(document)
            parts[document] = (document,)
            if len(ids) > splitter.max_tokens:
                segments = split_document(builder.tokenizer, ids, splitter)
                parts[document] = tuple(Document(token_ids=ids, id=document.id) for ids in segments)
                counts.note(f"documents of more than {splitter.max_tokens} tokens, split without loss")
                counts.note("segments made of them", len(segments))
        return parts[document]

    return [
        replace(example, documents=tuple(part for document in example.documents for part in split(document)))
        for example in examples
    ]


def read_examples(
    data: DataConfig, builder: PromptBuilder, max_document_tokens: int | None, *, split: str, limit: int | None
) -> tuple[list[Example], DataCounts]:
    """One side of the configured data as text, documents fitted, and what happened to the rows.

    In a mixture, questions are written by the query template of their set already: use "{query}" for the rest.

    Raises:
        ValueError: as `comb.evaluation.datasets.read_dataset` does, and for shares that can't be had.
    """
    longest, splitter = _lengths(data, max_document_tokens)
    sets = sources(data)
    if not data.mixture:
        examples, counts = sets[0].read(split, limit)
        return fit(examples, builder, longest, counts, splitter), counts
    found: dict[str, list[Example]] = {}
    accounts: dict[str, DataCounts] = {}
    for source in sets:
        name = str(source.name)
        examples, counts = source.read(split, limit, sets)
        examples = _unique(examples)
        found[name], accounts[name] = fit(examples, builder, longest, counts, splitter), counts
    numbers = _numbers(data, sets, {name: len(examples) for name, examples in found.items()}, split, limit)
    mixed: list[Example] = []
    for source in sets:
        name = str(source.name)
        examples = found[name]
        blocks = _blocks(examples, lambda example: example.documents)
        drawn = draw(blocks, numbers[name], seed=data.seed, name=name)
        _account(accounts[name], len(examples), numbers[name])
        mixed += [
            replace(
                examples[place],
                id=mixed_id(name, turn, examples[place].id, place),
                group=f"{name}/{examples[place].group}",
                query=source.query_template.replace("{query}", examples[place].query),
            )
            for place, turn in drawn
        ]
    return mixed, DataCounts.of_sets(accounts)


def read_tokenized(
    data: DataConfig, builder: PromptBuilder, max_document_tokens: int | None, *, split: str, limit: int | None
) -> tuple[Sequence[TrainingExample], DataCounts]:
    """One side of the configured data as tokens, from the cache where it has them; as `read_examples` else.

    Each set is cached on its own and whole, so that other weights need no tokenising. Shares hold exactly: examples
    that are too long are dropped first.
    """
    longest, splitter = _lengths(data, max_document_tokens)
    sets = sources(data)
    writing = {
        "tokenizer": token_cache.builder_key(builder),
        "max_document_tokens": longest,
        "splitter": data.splitter if splitter is not None else None,
        "max_query_tokens": data.max_query_tokens,
    }

    def tokens(source: Source) -> tuple[Sequence[TrainingExample], DataCounts]:
        def build() -> tuple[list[TrainingExample], dict[str, Any]]:
            examples, counts = source.read(split, limit, sets)
            if source.name is not None:
                examples = _unique(examples)
            tokenized = tokenize(
                fit(examples, builder, longest, counts, splitter),
                builder,
                counts,
                query_template=source.query_template,
                max_query_tokens=data.max_query_tokens,
            )
            return tokenized, counts.to_dict()

        if not data.cache:
            examples, counts = build()
            return examples, DataCounts.from_dict(counts)
        name = f"{source.name or Path(source.dataset).stem}-{split}"
        key = source.key(sets, split, limit) | writing
        found, counts = token_cache.cached(data.cache_dir, name, key, build)
        return found, DataCounts.from_dict(counts)

    if not data.mixture:
        return tokens(sets[0])
    found = {str(source.name): tokens(source) for source in sets}
    numbers = _numbers(data, sets, {name: len(examples) for name, (examples, _) in found.items()}, split, limit)
    parts = []
    for name, (examples, counts) in found.items():
        if isinstance(examples, token_cache.TrainingExamples):
            blocks = examples.blocks()
        else:
            blocks = _blocks(examples, lambda example: example.segments)
        _account(counts, len(examples), numbers[name])
        parts.append((name, examples, draw(blocks, numbers[name], seed=data.seed, name=name)))
    return MixedExamples(parts), DataCounts.of_sets({name: counts for name, (_, counts) in found.items()})


def _numbers(
    data: DataConfig, sets: Sequence[Source], sizes: Mapping[str, int], split: str, limit: int | None
) -> dict[str, int]:
    weights = {str(source.name): source.weight for source in sets}
    if split != "train":
        return heldout_numbers(sizes, weights, limit)
    return epoch_numbers(sizes, weights, max_repeats=data.max_repeats, epoch_examples=data.epoch_examples, limit=limit)


def _account(counts: DataCounts, size: int, number: int) -> None:
    """Counts what the shares leave out of a set, or repeat."""
    counts.drop("over the share of the mixture", max(0, size - number))
    counts.repeated += max(0, number - size)


def _unique(examples: Sequence[Example]) -> list[Example]:
    """The examples with ids of which no two are the same; files repeat theirs, or have none."""
    taken = {example.id for example in examples}
    seen: set[str] = set()
    renamed = []
    for place, example in enumerate(examples):
        id = example.id if example.id is not None else f"row{place}"
        if id in seen or (example.id is None and id in taken):
            id = next(name for number in itertools.count(2) if (name := f"{id}#{number}") not in seen | taken)
        seen.add(id)
        renamed.append(example if id == example.id else replace(example, id=id))
    return renamed


def _lengths(data: DataConfig, max_document_tokens: int | None) -> tuple[int | None, Splitter | None]:
    """Tokens a document may have, and what cuts longer ones."""
    longest = [limit for limit in (max_document_tokens, data.max_document_tokens) if limit is not None]
    return min(longest, default=None), create(data.splitter) if data.splitter is not None else None
