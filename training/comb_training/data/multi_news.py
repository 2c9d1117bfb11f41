"""Multi-News (Fabbri et al. 2019): one summary of several articles.

Rows ``{document, summary}`` with the articles joined by ``|||||``.

document: one article; query: a fixed instruction; answer: ``summary``, without the dash that many begin with.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from comb.documents import Document, Example
from comb.evaluation.datasets import Counts, Dataset, datasets
from comb_training.data.grouping import Split
from comb_training.data.records import Record, convert, finish, read_records

SEPARATOR = "|||||"
QUERY = "Write one summary of all the articles."


@datasets.register("multi_news")
def read_multi_news(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads Multi-News from JSON or JSONL.

    Raises:
        ValueError: for a missing path or a malformed row, naming it.
    """
    counts = Counts()
    examples = convert(read_records(path, "multi_news"), partial(_example, counts=counts), counts)
    return finish("multi_news", examples, counts, split=split, seed=seed, limit=limit, heldout_share=heldout_share)


def _example(record: Record, counts: Counts) -> Example | str:
    parts = [part.strip() for part in record.text("document").split(SEPARATOR)]
    counts.truncate("empty article left out", parts.count(""))
    documents = tuple(Document(part) for part in parts if part)
    summary = record.text("summary").strip().removeprefix("–").strip()
    if not documents:
        return "no documents"
    if not summary:
        return "no summary"
    return Example(documents, QUERY, summary, (summary,), id=record.row.get("id"), group=parts[0][:200])
