"""Multi-News (Fabbri et al. 2019): one summary of several articles.

Rows ``{document, summary}`` with the articles joined by ``|||||``.

document: one article; query: a fixed instruction; answer: ``summary``, without the dash that many begin with.
"""

from __future__ import annotations

from comb.documents.document import Example
from comb_training.data.grouping import content_group
from comb_training.data.records import DatasetRow
from comb_training.data.side import row_reader

SEPARATOR = "|||||"
QUERY = "Write one summary of all the articles."


@row_reader("multi_news", hub_id="alexfabbri/multi_news")
def read_multi_news(record: DatasetRow) -> Example | str:
    """The example of a row."""
    parts = [part.strip() for part in record.text("document").split(SEPARATOR)]
    documents = record.documents((None, part) for part in parts)
    summary = record.text("summary").strip().removeprefix("–").strip()
    return record.example(documents, QUERY, [summary], group=content_group(*parts))
