"""Needle in a haystack: the one document that answers a question, at every depth among other questions' documents.

The needle is the document of an example that holds every content word of question and answer which any of its
documents holds; examples without one are left out (two documents are needed, or none answers). Documents that hold a
word of the question which the needle holds too are no filler.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from comb.documents.datasets import Counts, Dataset, datasets, read_dataset
from comb.documents.document import Document, Example
from comb.evaluation.metrics import normalize_answer
from comb_training.data.grouping import Split

DEPTHS = (0, 25, 50, 75, 100)
# no content words
_COMMON = frozenset({"and", "are", "did", "does", "for", "from", "has", "have", "her", "his", "how", "its", "the",
                     "was", "what", "where", "which", "who", "with"})  # fmt: skip


@datasets.register("needle")
def read_needle(
    path: str | Path | None = None,
    *,
    split: Split = "heldout",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = 16,
    of: str = "nano",
    **options: Any,
) -> Dataset:
    """Examples of another data set, each with `num_documents` documents, its needle at one depth after the other.

    Args:
        of: the data set, which `path`, `split`, `seed` and further options are for.

    Raises:
        ValueError: for fewer than two documents, or a data set that has too few without the question's words.
    """
    if num_documents is None or num_documents < 2:
        raise ValueError(f"num_documents of a haystack are 2 or more, got {num_documents}")
    # questions share documents: of each some are needed for every haystack
    most = None if limit is None else 8 * (limit + num_documents)
    examples = read_dataset(of, path, split=split, seed=seed, limit=most, **options).examples
    counts, found = Counts(read=len(examples)), list[Example]()
    for index, example in enumerate(examples):
        if len(found) == limit:
            counts.drop("over the limit", len(examples) - index)
            break
        needle = supporting(example)
        if needle is None:
            counts.drop("no document answers alone")
            continue
        filler = list(islice(_fillers(examples, index, needle), num_documents - 1))
        if len(filler) < num_documents - 1:
            raise ValueError(
                f"{of!r} gives {len(filler)} documents beside a needle, not {num_documents - 1}: read more"
            )
        place = round((num_documents - 1) * DEPTHS[len(found) % len(DEPTHS)] / 100)
        found.append(replace(example, documents=(*filler[:place], needle, *filler[place:])))
    return Dataset(tuple(found), counts, "needle")


def supporting(example: Example) -> Document | None:
    """The one document with every content word of question and answer that any document has; None without one."""
    words = [_words(document.text or "") for document in example.documents]
    wanted = _words(f"{example.query} {example.answer}") & set().union(*words)
    holding = [document for document, own in zip(example.documents, words, strict=True) if wanted <= own]
    return holding[0] if wanted and len(holding) == 1 else None


def _fillers(examples: Sequence[Example], index: int, needle: Document) -> Iterator[Document]:
    example, seen = examples[index], {needle}
    asked = _words(example.query) & _words(needle.text or "")
    for other in (*examples[index:], *examples[:index]):
        if other is example or (other.group is not None and other.group == example.group):
            continue
        for document in other.documents:
            if document not in seen and not asked & _words(document.text or ""):
                seen.add(document)
                yield document


def _words(text: str) -> set[str]:
    """Content words in normal form, without an apostrophe's s."""
    plain = re.sub(r"['’]s\b", "", text)
    return {word for word in normalize_answer(plain).split() if len(word) > 2 and word not in _COMMON}
