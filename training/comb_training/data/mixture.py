"""From a configuration's data to examples: one set, or several in one epoch, each with a weight (docs/training.md).

Which examples a set gives, the seed, its name and its size decide, and no other set. (What
`datasets.interleave_datasets` draws by chance comes near its shares only, and other sets change it.)
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from comb.documents.datasets import Counts
from comb.documents.document import Example, PromptBuilder, until_stop
from comb.documents.splitting import create
from comb_training.config import DataConfig
from comb_training.data.batches import TOGETHER, TrainingExample, by_documents, fit_documents, tokenize
from comb_training.data.side import seeded
from comb_training.data.sources import Source, sources


def prompt_builder(data: DataConfig, tokenizer: Any) -> PromptBuilder:
    """How the configured data is written as prompts."""
    return PromptBuilder(tokenizer, document_template=data.document_template, prefix=data.prefix, stop=data.stop)


Fitting = Callable[[Sequence[TrainingExample], Counts], Sequence[TrainingExample]]
"""Leaves out, and counts, examples that a run can't use."""


@dataclass(frozen=True)
class ConfiguredSide:
    """One side of the configured data, read with what happened to its rows. Raises ValueError as
    `comb.documents.datasets.read_dataset` does, and for shares that can't be had."""

    data: DataConfig
    builder: PromptBuilder
    max_document_tokens: int | None
    split: str
    limit: int | None
    fitting: Fitting | None = None

    def tokenized(self) -> tuple[list[TrainingExample], Counts]:
        """As tokens."""
        if self.data.mixture:
            return self._mixed()
        texts, counts = self._texts(*sources(self.data))
        return self._tokens(texts, counts), counts

    def examples(self) -> tuple[list[Example], Counts]:
        """As text, documents fitted, questions as the query template writes them: of a mixture those of `tokenized`."""
        if self.data.mixture:
            mixed, counts = self._mixed()  # which fit, and hence the shares, is known of tokens only
            return [each.source for each in mixed], counts
        return self._texts(*sources(self.data))

    def _texts(self, source: Source) -> tuple[list[Example], Counts]:
        """Examples of one set, documents fitted, questions written."""
        data = self.data
        examples, counts = source.read(self.split, self.limit, sources(data))
        if source.name is not None:
            examples = _unique(examples)
        if "{title}" not in (data.document_template or "{title}"):
            titled = {document for example in examples for document in example.documents if document.title}
            counts.note("documents without their titles: data.document_template has no {title}", len(titled))
        cut = sum(until_stop(example.answer, data.stop) != example.answer for example in examples)
        counts.note("answers that hold a character of data.stop, which ends an answer", cut)
        limits = [limit for limit in (self.max_document_tokens, data.max_document_tokens) if limit is not None]
        splitter = create(data.splitter) if data.splitter is not None else None
        fitted = fit_documents(examples, self.builder, min(limits, default=None), counts, splitter)
        template = source.query_template
        return [replace(each, query=template.replace("{query}", each.query)) for each in fitted], counts

    def _tokens(self, texts: Sequence[Example], counts: Counts) -> list[TrainingExample]:
        """Those of `texts` that fit, as tokens."""
        found = tokenize(texts, self.builder, counts, max_query_tokens=self.data.max_query_tokens)
        return found if self.fitting is None else list(self.fitting(found, counts))

    def _mixed(self) -> tuple[list[TrainingExample], Counts]:
        """The examples of a mixture in their shares, with ids that name the set: ``name/id``, again ``name@2/id``."""
        data, sets, found, by_set = self.data, sources(self.data), {}, {}
        for source in sets:
            texts, counts = self._texts(source)
            # what doesn't fit is dropped first, so that shares hold exactly
            found[str(source.name)], by_set[str(source.name)] = self._tokens(texts, counts), counts
        sizes = {name: len(examples) for name, examples in found.items()}
        all_of_it = not any(source.weight for source in sets)
        weights = {str(each.name): sizes[str(each.name)] if all_of_it else each.weight or 1.0 for each in sets}
        if self.split == "train":
            numbers = epoch_numbers(
                sizes, weights, max_repeats=data.max_repeats, epoch_examples=data.epoch_examples, limit=self.limit
            )
        else:
            numbers = heldout_numbers(sizes, weights, self.limit)
        mixed = []
        for name, examples in found.items():
            by_set[name].drop("over the share of the mixture", max(0, len(examples) - numbers[name]))
            by_set[name].repeated = max(0, numbers[name] - len(examples))
            drawn = draw(by_documents(examples), numbers[name], seed=data.seed, name=name) if numbers[name] else ()
            for place, turn in drawn:
                example, text = examples[place], examples[place].source
                id = f"{name}{f'@{turn + 1}' if turn else ''}/{example.id}"
                mixed.append(replace(example, id=id, source=replace(text, id=id, group=f"{name}/{text.group}")))
        return mixed, Counts(read=sum(counts.read for counts in by_set.values()), sets=by_set)


def _unique(examples: Sequence[Example]) -> list[Example]:
    """The examples with ids of which no two are the same; files repeat theirs, or have none."""
    given, taken = {example.id for example in examples}, set[str]()
    renamed = []
    for place, example in enumerate(examples):
        id = f"row{place}" if example.id is None else example.id
        if id in taken:
            id = f"{id}#{place}"
        while id in taken or (id != example.id and id in given):
            id += "#"
        taken.add(id)
        renamed.append(replace(example, id=id))
    return renamed


def apportion(weights: Mapping[str, float], total: int) -> dict[str, int]:
    """`total` in whole numbers by weight, none off by one or more (largest remainders; ties go to the first name)."""
    exact = {name: Fraction(weight) for name, weight in weights.items()}
    everything = sum(exact.values())
    shares = {name: total * weight / everything for name, weight in exact.items()}
    numbers = {name: math.floor(share) for name, share in shares.items()}
    # sorting is stable
    rest = sorted(shares, key=lambda name: numbers[name] - shares[name])
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
    """How many examples of each set make an epoch; see `comb_training.data.mixture`. `limit`: examples of the epoch at
    most. Raises ValueError for a set without examples, or an `epoch_examples` for which a set would come too often."""
    empty = [name for name, size in sizes.items() if not size]
    if empty:
        raise ValueError(f"data.mixture, set {empty[0]!r}: no example is left")
    everything = sum(Fraction(weight) for weight in weights.values())
    longest = {
        name: math.floor(math.floor(Fraction(max_repeats) * size) * everything / Fraction(weights[name]))
        for name, size in sizes.items()
    }
    first = min(longest, key=lambda name: longest[name])
    total = longest[first]
    if epoch_examples is not None:
        if epoch_examples > total:
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

    Those over the same documents (a block) are drawn together, `TOGETHER` at a time, so that few documents are encoded
    for one question, and a block of a thousand is not the whole draw.
    """
    size = sum(map(len, blocks))
    rounds, rest = divmod(number, size)
    shuffled = [block[start : start + TOGETHER] for block in blocks for start in range(0, len(block), TOGETHER)]
    seeded(seed, "mixture", name).shuffle(shuffled)
    some = list(itertools.chain.from_iterable(shuffled))[:rest]
    return [(place, turn) for turn in range(rounds) for place in range(size)] + [
        (place, rounds) for place in sorted(some)
    ]
