"""NQ-open with its gold passage (Liu et al. 2023, Lost in the Middle), among passages of other questions.

Rows ``{question, answers, ctxs: [{title, text, isgold}]}``.

document: the gold passage, and gold passages of other rows as distractors (random ones, not retrieved, and none
that holds an accepted answer); query: ``question``; answer: the first of ``answers``, all of them accepted. Split by
the title of the gold passage.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace
from pathlib import Path

from comb.documents.datasets import Counts, Dataset, datasets
from comb.documents.document import Document, Example
from comb_training.data.distractors import draw
from comb_training.data.grouping import Split, seeded
from comb_training.data.records import Record, convert, limited, read_records


@datasets.register("nq_open", hub_id="google-research-datasets/nq_open")
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
    records = read_records(path, "nq_open")
    rows = convert(records, _row, counts, split=split, seed=seed, heldout_share=heldout_share)
    passages = {row.documents[0]: row.group for row in rows}  # questions may share one
    pool = [(passage, group, str(passage.text).casefold()) for passage, group in passages.items()]
    examples = []
    for row in limited(rows, limit, seed, counts):
        rng = seeded(seed, "nq", row.id)
        drawn = _distractors(row, pool, num_documents - 1, rng)
        if len(drawn) < num_documents - 1:
            counts.truncate("fewer passages in the file than num_documents")
        place = rng.randrange(len(drawn) + 1) if gold_position is None else min(gold_position, len(drawn))
        documents = (*drawn[:place], row.documents[0], *drawn[place:])
        examples.append(replace(row, documents=documents))
    return Dataset(tuple(examples), counts, "nq_open")


def _distractors(
    row: Example, pool: list[tuple[Document, str | None, str]], total: int, rng: random.Random
) -> list[Document]:
    # whole words: almost every passage has the letters of an answer like "A"
    answers = re.compile("|".join(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)" for answer in row.answers))

    def fits(item: tuple[Document, str | None, str]) -> bool:
        _, group, text = item
        return group != row.group and answers.search(text) is None

    return [passage for passage, _, _ in draw(rng, pool, total, fits)]


def _row(record: Record) -> Example | str:
    passages = record.items("ctxs", dict)
    gold = next((record.part(item) for item in passages if item.get("isgold")), None)
    answers = record.items("answers", str)
    if gold is None:
        return "no gold passage"
    if len(passages) > 1:
        record.left_out["retrieved passage that random distractors replace"] += len(passages) - 1
    title, text = gold.title(), gold.text("text")
    documents = record.documents([(title, text)])
    return record.example(documents, record.text("question"), answers, id=record.row.get("id"), group=title or text)
