"""HotpotQA (Yang et al. 2018): two-hop questions over ten paragraphs.

The official JSON (``context: [[title, [sentence, ...]], ...]``) and the Hub's form (``context: {title: [...],
sentences: [[...], ...]}``).

document: a paragraph's sentences joined, its title as title; query: ``question``; answer: ``answer``.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from comb.documents.document import Example
from comb_training.data.records import DatasetRow
from comb_training.data.side import DatasetSide, reader

ACROSS = (
    "What do {0} and {1} have in common?", "What is {0}, and what is {1}?", "Which of {0} and {1} came first?",
    "How is {0} connected with {1}?",
)  # fmt: skip


@reader("hotpotqa", hub_id="hotpotqa/hotpot_qa")
def read_hotpotqa(side: DatasetSide, *, num_documents: int | None = None, across: int = 0) -> Iterable[Example]:
    """Reads HotpotQA from JSON, JSONL or the Hub.

    Args:
        num_documents: keep only the first so many documents (counted); None keeps all of them.
        across: made questions about two of a row's titles, beside its own and for training alone. They have no answer
            but the backbone's (train.answers=on_policy).
    """
    found: list[Example] = []
    for example in side.rows(functools.partial(_row, num_documents=num_documents)):
        found.append(example)
        titles = [document.title for document in example.documents if document.title]
        rng = side.rng("across", example.id)
        for turn in range(across if side.split == "train" and len(titles) > 1 else 0):
            one, other = rng.sample(titles, 2)
            asked = ACROSS[turn % len(ACROSS)].format(one, other)
            found.append(replace(example, query=asked, answer="", answers=(), id=f"{example.id}-across{turn}"))
            side.counts.read += 1
    return side.limited(found)


def _row(record: DatasetRow, *, num_documents: int | None) -> Example | str:
    documents = record.documents(_paragraphs(record), num_documents)
    question, answer = record.text("question"), record.text("answer")
    return record.example(documents, question, [answer], id=record.label("_id"), group=question)


def _paragraphs(record: DatasetRow) -> list[tuple[str | None, str]]:
    context: Any = record.row.get("context")
    if context is None and "context" in record.row:
        return []
    try:
        rows = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
        pairs = [(title, sentences) for title, sentences in rows]
    except (KeyError, TypeError, ValueError) as error:
        got = str(context)[:80]
        raise ValueError(f"{record.where}: 'context' is a list of [title, [sentence, ...]], got {got!r}") from error
    found = []
    for title, sentences in pairs:
        paragraph = replace(record, row={"title": title, "sentences": sentences})
        # official sentences mostly bring the space before them, but not all do
        stripped = (sentence.strip() for sentence in paragraph.items("sentences", str))
        found.append((paragraph.title(), " ".join(sentence for sentence in stripped if sentence)))
    return found
