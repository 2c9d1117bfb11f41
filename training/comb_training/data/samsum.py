"""SAMSum (Gliwa et al. 2019) and DialogSum (Chen et al. 2021) as few-shot summarisation: dialogues and their summaries.

Rows ``{id, dialogue, summary}``; DialogSum's test rows have ``summary1`` to ``summary3``.

document: another row's dialogue with its summary, as an example of the task; query: the row's own dialogue; answer: its
summary. Examples are drawn from the same side of the split.

Source of the set-up: EPIC sec. 5.1 (SAMSum as few-shot instruction following).
"""

from __future__ import annotations

from pathlib import Path

from comb.documents import Document, Example
from comb.evaluation.datasets import Counts, Dataset, datasets
from comb_training.data.grouping import Split, pick_distractors, seeded, split_groups
from comb_training.data.records import Record, convert, finish, read_records

SHOT = "Dialogue:\n{dialogue}\nSummary: {summary}"
QUERY = "Dialogue:\n{dialogue}\nSummary:"


@datasets.register("samsum")
def read_samsum(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int = 4,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads SAMSum or DialogSum from JSON or JSONL.

    Args:
        num_documents: solved examples in front of each dialogue.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    if num_documents < 1:
        raise ValueError(f"num_documents must be at least 1, not {num_documents}")
    counts = Counts()
    rows = convert(read_records(path, "samsum"), _row, counts)
    side = split_groups((str(row.group) for row in rows), split, heldout_share=heldout_share, seed=seed)
    shots = {str(row.group): Document(SHOT.format(dialogue=row.query, summary=row.answer)) for row in rows}
    pool = [name for name in shots if name in side]
    examples = []
    for row in rows:
        if row.group not in side:
            counts.read -= 1
            continue
        rng = seeded(seed, "shots", row.group)
        drawn = pick_distractors(rng, [(pool, num_documents)], exclude=[str(row.group)], total=num_documents)
        if not drawn:
            counts.drop("no other dialogue to show as an example")
            continue
        if len(drawn) < num_documents:
            counts.truncate("fewer dialogues in the file than num_documents")
        documents = tuple(shots[name] for name in drawn)
        query = QUERY.format(dialogue=row.query)
        examples.append(Example(documents, query, row.answer, row.answers, id=row.id, group=row.group))
    return finish("samsum", examples, counts, split="all", seed=seed, limit=limit, heldout_share=heldout_share)


def _row(record: Record) -> Example | str:
    dialogue = record.text("dialogue").replace("\r\n", "\n").strip()
    summaries = [record.text("summary", "summary1").strip()]
    summaries += [record.text(name).strip() for name in ("summary2", "summary3") if name in record.row]
    if not dialogue:
        return "empty dialogue"
    if not summaries[0]:
        return "no summary"
    name = record.row.get("id", record.row.get("fname"))
    # the dialogue stands in for documents until its examples are drawn
    return Example((), dialogue, summaries[0], tuple(summaries), id=name, group=str(name or dialogue[:200]))
