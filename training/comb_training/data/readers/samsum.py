"""SAMSum (Gliwa et al. 2019) and DialogSum (Chen et al. 2021) as few-shot summarisation: dialogues and their summaries.

Rows ``{id, dialogue, summary}``; DialogSum's test rows have ``summary1`` to ``summary3``.

document: another row's dialogue with its summary, as an example of the task; query: the row's own dialogue; answer: its
summary. Examples are drawn from the same side of the split and never show the dialogue that is asked about.

Source of the set-up: EPIC sec. 5.1 (SAMSum as few-shot instruction following).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from operator import ne

from comb.documents.document import Document, Example
from comb_training.data.grouping import content_group, draw
from comb_training.data.records import DatasetRow
from comb_training.data.side import DatasetSide, reader

SHOT = "Dialogue:\n{dialogue}\nSummary: {summary}"
QUERY = "Dialogue:\n{dialogue}\nSummary:"


@reader("samsum", hub_id={"dialogsum": "knkarthick/dialogsum", "": "knkarthick/samsum"})
def read_samsum(side: DatasetSide, *, num_documents: int = 4) -> Iterable[Example]:
    """Reads SAMSum or DialogSum from JSON, JSONL or the Hub.

    Args:
        num_documents: solved examples in front of each dialogue.
    """
    rows = side.rows(_row)
    shots = {row.group: row.documents[0] for row in rows}
    pool = list(shots)
    for row in side.limited(rows):
        drawn = draw(side.rng("shots", row.id), pool, num_documents, partial(ne, row.group))
        if not drawn:
            side.counts.drop("no other dialogue to show as an example")
            continue
        if len(drawn) < num_documents:
            side.counts.truncate("fewer dialogues in the file than num_documents")
        yield replace(row, documents=tuple(shots[group] for group in drawn))


def _row(record: DatasetRow) -> Example | str:
    """The example with the row's own dialogue and summary as document, for others to show."""
    dialogue = record.text("dialogue").replace("\r\n", "\n").strip()
    summaries = [record.text("summary", "summary1").strip()]
    summaries += [record.text(name).strip() for name in ("summary2", "summary3") if name in record.row]
    if not dialogue:
        return "empty dialogue"
    if not summaries[0]:
        return "no summary"
    shot = Document(SHOT.format(dialogue=dialogue, summary=summaries[0]))
    query = QUERY.format(dialogue=dialogue)
    # grouped by the dialogue, not the id: the Hub's DialogSum test set has each three times
    return record.example((shot,), query, summaries, id=record.label("id", "fname"), group=content_group(dialogue))
