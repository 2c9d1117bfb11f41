"""WikiHop (QAngaroo, Welbl et al. 2018): which entity stands in a relation to a subject, over many short documents.

Rows ``{id, query, answer, candidates, supports}``.

document: one of ``supports``; query: ``query`` with the underscores of its relation as spaces ("participant_of juan
rossell" is asked as "participant of juan rossell"), and the candidates behind it if wanted; answer: ``answer``.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from comb.documents import Document, Example
from comb.evaluation.datasets import Counts, Dataset, datasets
from comb_training.data.grouping import Split
from comb_training.data.records import Record, convert, finish, first_documents, read_records


@datasets.register("wikihop")
def read_wikihop(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    with_candidates: bool = False,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads WikiHop from JSON or JSONL.

    Args:
        num_documents: keep only the first so many documents of a row (counted); None keeps all, up to some sixty.
        with_candidates: name the candidates in the query.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    counts = Counts()
    example = partial(_example, counts=counts, num_documents=num_documents, with_candidates=with_candidates)
    examples = convert(read_records(path, "wikihop"), example, counts)
    return finish("wikihop", examples, counts, split=split, seed=seed, limit=limit, heldout_share=heldout_share)


def _example(record: Record, counts: Counts, num_documents: int | None, with_candidates: bool) -> Example | str:
    texts = first_documents([text for text in record.items("supports", str) if text.strip()], num_documents, counts)
    if not texts:
        return "no documents"
    relation, _, subject = record.text("query", "question").partition(" ")
    query = f"{relation.replace('_', ' ')} {subject}".strip()
    if with_candidates:
        query += f"? One of: {', '.join(record.items('candidates', str))}"
    answer = record.text("answer")
    if not answer.strip():
        return "no answer"
    documents = tuple(Document(text) for text in texts)
    return Example(documents, query, answer, (answer,), id=record.row.get("id"), group=query)
