"""NQ-open with its gold passage (Liu et al. 2023, Lost in the Middle), among passages of other questions.

Rows ``{question, answers, ctxs: [{title, text, isgold}]}``.

document: the gold passage, and gold passages of other rows as distractors (random ones, not retrieved, and none
that holds an accepted answer); query: ``question``; answer: the first of ``answers``, all of them accepted. Split by
the title of the gold passage.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from random import Random

from comb.documents.document import Document, Example
from comb_training.data.grouping import draw
from comb_training.data.records import DatasetRow
from comb_training.data.side import DatasetSide, reader


@reader("nq_open", hub_id="google-research-datasets/nq_open")
def read_nq_open(side: DatasetSide, *, num_documents: int = 10, gold_position: int | None = None) -> Iterable[Example]:
    """Reads NQ-open with gold passages from JSONL, gzipped or not.

    Args:
        num_documents: documents per question, the gold one among them.
        gold_position: where the gold passage stands, from 0; None draws it with the seed.
    """
    if gold_position is not None and not 0 <= gold_position < num_documents:
        raise ValueError(f"expected 0 <= gold_position < num_documents, got {gold_position}, {num_documents}")
    rows = side.rows(_row)
    passages = {row.documents[0]: row.group for row in rows}  # questions may share one
    pool = [(passage, group, str(passage.text).casefold()) for passage, group in passages.items()]
    for row in side.limited(rows):
        rng = side.rng("nq", row.id)
        drawn = _distractors(row, pool, num_documents - 1, rng)
        if len(drawn) < num_documents - 1:
            side.counts.truncate("fewer passages in the file than num_documents")
        place = rng.randrange(len(drawn) + 1) if gold_position is None else min(gold_position, len(drawn))
        yield replace(row, documents=(*drawn[:place], row.documents[0], *drawn[place:]))


def _distractors(row: Example, pool: list[tuple[Document, str | None, str]], total: int, rng: Random) -> list[Document]:
    # whole words: almost every passage has the letters of an answer like "A"
    answers = re.compile("|".join(rf"(?<!\w){re.escape(answer.casefold())}(?!\w)" for answer in row.answers))

    def fits(item: tuple[Document, str | None, str]) -> bool:
        _, group, text = item
        return group != row.group and answers.search(text) is None

    return [passage for passage, _, _ in draw(rng, pool, total, fits)]


def _row(record: DatasetRow) -> Example | str:
    passages = record.parts("ctxs")
    gold = next((passage for passage in passages if passage.flag("isgold")), None)
    answers = record.items("answers", str)
    if gold is None:
        return "no gold passage"
    if len(passages) > 1:
        record.left_out["retrieved passage that random distractors replace"] += len(passages) - 1
    title, text = gold.title(), gold.text("text")
    documents = record.documents([(title, text)])
    return record.example(documents, record.text("question"), answers, group=title or text)
