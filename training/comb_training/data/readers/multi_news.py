"""Multi-News (Fabbri et al. 2019): one summary of several articles.

Rows ``{document, summary}`` with the articles joined by ``|||||``.

document: one article; query: a fixed instruction; answer: ``summary``, without the dash that many begin with.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

from comb.documents.datasets import Counts, Dataset, datasets
from comb.documents.document import Example
from comb_training.data.grouping import Split
from comb_training.data.records import Record, convert, limited, read_records

SEPARATOR = "|||||"
QUERY = "Write one summary of all the articles."


@datasets.register("multi_news", hub_id="alexfabbri/multi_news")
def read_multi_news(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads Multi-News from JSON, JSONL or the Hub.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    counts = Counts()
    records = read_records(path, "multi_news")
    examples = convert(records, _example, counts, split=split, seed=seed, heldout_share=heldout_share)
    return Dataset(tuple(limited(examples, limit, seed, counts)), counts, "multi_news")


def _example(record: Record) -> Example | str:
    parts = [part.strip() for part in record.text("document").split(SEPARATOR)]
    documents = record.documents((None, part) for part in parts)
    summary = record.text("summary").strip().removeprefix("–").strip()
    group = hashlib.sha256("\x1f".join(parts).encode()).hexdigest()[:16]
    return record.example(documents, QUERY, [summary], id=record.row.get("id"), group=group)
