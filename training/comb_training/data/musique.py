"""MuSiQue (Trivedi et al. 2022): multi-hop questions over retrieved paragraphs.

Two schemas: a list of ``{ctxs: [{title, text}], question, answers}`` with ten retrieved documents each, and the
official ``{id, paragraphs: [{title, paragraph_text}], question, answer, answer_aliases}`` in each line.

document: a context or paragraph, in the file's order; query: ``question``; answer: the first of ``answers``, or
``answer``; aliases are accepted too.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from comb.documents import Document, Example
from comb.evaluation.datasets import Counts, Dataset, datasets
from comb_training.data.grouping import Split
from comb_training.data.records import Record, convert, finish, first_documents, read_records


@datasets.register("musique")
def read_musique(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads MuSiQue from JSON or JSONL.

    Args:
        num_documents: keep only the first so many documents of a row (counted); None keeps all ten.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    counts = Counts()
    example = partial(_example, counts=counts, num_documents=num_documents)
    examples = convert(read_records(path, "musique"), example, counts)
    return finish("musique", examples, counts, split=split, seed=seed, limit=limit, heldout_share=heldout_share)


def _example(record: Record, counts: Counts, num_documents: int | None) -> Example | str:
    official = "paragraphs" in record.row
    if official and record.row.get("answerable") is False:
        return "unanswerable question"
    documents = []
    for item in record.items("paragraphs" if official else "ctxs", dict):
        part = Record(item, record.where)
        text = part.text("paragraph_text" if official else "text")
        if text.strip():
            documents.append(Document(text, title=part.row.get("title") or None))
    if official:
        answers = [record.text("answer"), *record.row.get("answer_aliases", ())]
    else:
        answers = record.items("answers", str)
    documents = first_documents(documents, num_documents, counts)
    if not documents:
        return "no documents"
    if not answers or not answers[0].strip():
        return "no answer"
    question = record.text("question")
    accepted = tuple(dict.fromkeys(answers))
    return Example(tuple(documents), question, answers[0], accepted, id=record.row.get("id"), group=question)
