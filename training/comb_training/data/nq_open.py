"""NQ-open with its gold passage (Liu et al. 2023, Lost in the Middle), among passages of other questions.

Rows ``{question, answers, ctxs: [{title, text, isgold}]}``.

document: the gold passage, and gold passages of other rows as distractors (random ones, not retrieved); query:
``question``; answer: the first of ``answers``, all of them accepted. Split by the title of the gold passage.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from comb.documents import Document, Example
from comb.evaluation.datasets import Counts, Dataset, datasets
from comb_training.data.grouping import Split, pick_distractors, seeded, split_groups
from comb_training.data.records import Record, convert, finish, read_records


@datasets.register("nq_open")
def read_nq_open(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int = 10,
    gold_position: int | None = None,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads NQ-open with gold passages from JSONL, gzipped or not.

    Args:
        num_documents: documents per question, the gold one among them.
        gold_position: where the gold passage stands, from 0; None draws it with the seed.

    Raises:
        ValueError: for a missing path, a malformed row, naming it, or a position that isn't there.
    """
    if num_documents < 1 or (gold_position is not None and not 0 <= gold_position < num_documents):
        raise ValueError(
            f"expected num_documents >= 1 and 0 <= gold_position < num_documents, got {num_documents}, {gold_position}"
        )
    counts = Counts()
    rows = convert(read_records(path, "nq_open"), _row, counts)
    side = split_groups((str(row.group) for row in rows), split, heldout_share=heldout_share, seed=seed)
    pool = [row.documents[0] for row in rows if row.group in side]
    examples = []
    for number, row in enumerate(rows):
        if row.group not in side:
            counts.read -= 1
            continue
        rng = seeded(seed, "nq", number)
        same = [document for document in pool if document.title == row.group]
        drawn = pick_distractors(rng, [(pool, num_documents)], exclude=same, total=num_documents - 1)
        if len(drawn) < num_documents - 1:
            counts.truncate("fewer passages in the file than num_documents")
        place = rng.randrange(len(drawn) + 1) if gold_position is None else min(gold_position, len(drawn))
        documents = (*drawn[:place], row.documents[0], *drawn[place:])
        examples.append(replace(row, documents=documents))
    return finish("nq_open", examples, counts, split="all", seed=seed, limit=limit, heldout_share=heldout_share)


def _row(record: Record) -> Example | str:
    gold = next((item for item in record.items("ctxs", dict) if item.get("isgold")), None)
    answers = record.items("answers", str)
    if gold is None:
        return "no gold passage"
    if not answers or not answers[0].strip():
        return "no answer"
    passage = Record(gold, record.where)
    document = Document(passage.text("text"), title=passage.text("title"))
    return Example((document,), record.text("question"), answers[0], tuple(answers), group=document.title)
