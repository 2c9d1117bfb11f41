"""XSum (Narayan et al. 2018): one sentence that says what a BBC article is about.

Rows ``{document, summary, id}``.

document: the article, and articles of other rows as distractors; query: a fixed instruction, which among several
articles names the right one by its first words; answer: ``summary``.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace
from functools import partial
from operator import ne
from pathlib import Path

from comb.documents.datasets import Counts, Dataset, datasets
from comb.documents.document import Example
from comb_training.data.distractors import draw
from comb_training.data.grouping import Split, seeded
from comb_training.data.records import Record, check_num_documents, convert, limited, read_records

QUERY = "Summarise the article in one sentence."
QUERY_AMONG_OTHERS = 'Summarise in one sentence the article that begins with "{opening}".'
OPENING_WORDS = 8


@datasets.register("xsum", hub_id="EdinburghNLP/xsum")
def read_xsum(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int = 1,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads XSum from JSON, JSONL or the Hub.

    Args:
        num_documents: documents per summary: its article, and others of the same side of the split.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    check_num_documents(num_documents)
    counts = Counts()
    records = read_records(path, "xsum")
    rows = convert(records, _row, counts, split=split, seed=seed, heldout_share=heldout_share)
    # one article for each opening, so that a query means one of its documents
    articles = {_opening(row): row.documents[0] for row in rows}
    pool = list(articles)
    examples = []
    for row in limited(rows, limit, seed, counts):
        opening = _opening(row)
        if num_documents > 1:
            rng = seeded(seed, "articles", row.id)
            drawn = draw(rng, pool, num_documents - 1, partial(ne, opening))
            if len(drawn) < num_documents - 1:
                counts.truncate("fewer articles in the file than num_documents")
            documents = [row.documents[0], *(articles[other] for other in drawn)]
            rng.shuffle(documents)
            query = QUERY_AMONG_OTHERS.format(opening=opening)
            row = replace(row, documents=tuple(documents), query=query)
        examples.append(row)
    return Dataset(tuple(examples), counts, "xsum")


def _opening(row: Example) -> str:
    return " ".join(str(row.documents[0].text).split()[:OPENING_WORDS])


def _row(record: Record) -> Example | str:
    article = record.text("document").strip()
    summary = record.text("summary").strip()
    group = hashlib.sha256(article.encode()).hexdigest()[:16]
    documents = record.documents([(None, article)])
    return record.example(documents, QUERY, [summary], id=record.row.get("id"), group=group)
