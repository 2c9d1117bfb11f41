"""HotpotQA (Yang et al. 2018): two-hop questions over ten paragraphs.

The official JSON (``context: [[title, [sentence, ...]], ...]``) and the Hub's form (``context: {title: [...],
sentences: [[...], ...]}``).

document: a paragraph's sentences joined, its title as title; query: ``question``; answer: ``answer``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from comb.documents import Document, Example
from comb.evaluation.datasets import Counts, Dataset, datasets
from comb_training.data.grouping import Split
from comb_training.data.records import Record, convert, finish, first_documents, read_records


@datasets.register("hotpotqa")
def read_hotpotqa(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads HotpotQA from JSON or JSONL.

    Args:
        num_documents: keep only the first so many documents of a row (counted); None keeps all ten.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    counts = Counts()
    example = partial(_example, counts=counts, num_documents=num_documents)
    examples = convert(read_records(path, "hotpotqa"), example, counts)
    return finish("hotpotqa", examples, counts, split=split, seed=seed, limit=limit, heldout_share=heldout_share)


def _example(record: Record, counts: Counts, num_documents: int | None) -> Example | str:
    documents = [Document(text, title=title) for title, text in _paragraphs(record) if text.strip()]
    question, answer = record.text("question"), record.text("answer")
    documents = first_documents(documents, num_documents, counts)
    if not documents:
        return "no documents"
    if not answer.strip():
        return "no answer"
    name = record.row.get("_id", record.row.get("id"))
    return Example(tuple(documents), question, answer, (answer,), id=name, group=question)


def _paragraphs(record: Record) -> list[tuple[str, str]]:
    context: Any = record.row.get("context")
    if isinstance(context, dict):
        titles, sentences = context.get("title"), context.get("sentences")
        pairs = (
            list(zip(titles, sentences, strict=False))
            if isinstance(titles, list) and isinstance(sentences, list)
            else None
        )
    else:
        pairs = context if isinstance(context, list) else None
    if pairs is None or not all(isinstance(pair, list | tuple) and len(pair) == 2 for pair in pairs):
        raise ValueError(f"{record.where}: 'context' is a list of [title, [sentence, ...]], got {str(context)[:80]!r}")
    found = []
    for title, sentences in pairs:
        if not isinstance(sentences, list) or not all(isinstance(sentence, str) for sentence in sentences):
            raise ValueError(f"{record.where}: a paragraph holds a list of sentences, got {str(sentences)[:80]!r}")
        found.append((record.check_text(title, "title"), "".join(sentences).strip()))
    return found
