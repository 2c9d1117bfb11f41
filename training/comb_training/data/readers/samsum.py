"""SAMSum (Gliwa et al. 2019) and DialogSum (Chen et al. 2021) as few-shot summarisation: dialogues and their summaries.

Rows ``{id, dialogue, summary}``; DialogSum's test rows have ``summary1`` to ``summary3``.

document: another row's dialogue with its summary, as an example of the task; query: the row's own dialogue; answer: its
summary. Examples are drawn from the same side of the split and never show the dialogue that is asked about.

Source of the set-up: EPIC sec. 5.1 (SAMSum as few-shot instruction following).
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from operator import ne
from pathlib import Path

from comb.documents.datasets import Counts, Dataset, datasets
from comb.documents.document import Document, Example
from comb_training.data.distractors import draw
from comb_training.data.grouping import Split, seeded
from comb_training.data.records import Record, convert, limited, read_records

SHOT = "Dialogue:\n{dialogue}\nSummary: {summary}"
QUERY = "Dialogue:\n{dialogue}\nSummary:"


@datasets.register("samsum", hub_id={"dialogsum": "knkarthick/dialogsum", "": "knkarthick/samsum"})
def read_samsum(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int = 4,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads SAMSum or DialogSum from JSON, JSONL or the Hub.

    Args:
        num_documents: solved examples in front of each dialogue.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    if num_documents < 1:
        raise ValueError(f"num_documents must be at least 1, not {num_documents}")
    counts = Counts()
    records = read_records(path, "samsum")
    rows = convert(records, _row, counts, split=split, seed=seed, heldout_share=heldout_share)
    shots = {row.group: row.documents[0] for row in rows}
    pool = list(shots)
    examples = []
    for row in limited(rows, limit, seed, counts):
        rng = seeded(seed, "shots", row.id)
        drawn = draw(rng, pool, num_documents, partial(ne, row.group))
        if not drawn:
            counts.drop("no other dialogue to show as an example")
            continue
        if len(drawn) < num_documents:
            counts.truncate("fewer dialogues in the file than num_documents")
        examples.append(replace(row, documents=tuple(shots[group] for group in drawn)))
    return Dataset(tuple(examples), counts, "samsum")


def _row(record: Record) -> Example | str:
    """The example with the row's own dialogue and summary as document, for others to show."""
    dialogue = record.text("dialogue").replace("\r\n", "\n").strip()
    summaries = [record.text("summary", "summary1").strip()]
    summaries += [record.text(name).strip() for name in ("summary2", "summary3") if name in record.row]
    if not dialogue:
        return "empty dialogue"
    if not summaries[0]:
        return "no summary"
    shot = Document(SHOT.format(dialogue=dialogue, summary=summaries[0]))
    name = record.row.get("id", record.row.get("fname"))
    # not the id: the Hub's DialogSum test set has each dialogue three times
    group = hashlib.sha256(dialogue.encode()).hexdigest()[:16]
    return record.example((shot,), QUERY.format(dialogue=dialogue), summaries, id=name, group=group)
