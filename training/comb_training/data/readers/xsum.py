"""XSum (Narayan et al. 2018): one sentence that says what a BBC article is about.

Rows ``{document, summary, id}``.

document: the article, and articles of other rows as distractors; query: a fixed instruction, which among several
articles names the right one by its first words; answer: ``summary``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from operator import ne

from comb.documents.document import Example
from comb_training.data.grouping import content_group, draw
from comb_training.data.records import DatasetRow
from comb_training.data.side import DatasetSide, reader

QUERY = "Summarise the article in one sentence."
QUERY_AMONG_OTHERS = 'Summarise in one sentence the article that begins with "{opening}".'
OPENING_WORDS = 8


@reader("xsum", hub_id="EdinburghNLP/xsum")
def read_xsum(side: DatasetSide, *, num_documents: int = 1) -> Iterable[Example]:
    """Reads XSum from JSON, JSONL or the Hub.

    Args:
        num_documents: documents per summary: its article, and others of the same side of the split.
    """
    rows = side.rows(_row)
    # one article for each opening, so that a query means one of its documents
    articles = {_opening(row): row.documents[0] for row in rows}
    pool = list(articles)
    for row in side.limited(rows):
        if num_documents == 1:
            yield row
            continue
        opening = _opening(row)
        rng = side.rng("articles", row.id)
        drawn = draw(rng, pool, num_documents - 1, partial(ne, opening))
        if len(drawn) < num_documents - 1:
            side.counts.truncate("fewer articles in the file than num_documents")
        documents = [row.documents[0], *(articles[other] for other in drawn)]
        rng.shuffle(documents)
        yield replace(row, documents=tuple(documents), query=QUERY_AMONG_OTHERS.format(opening=opening))


def _opening(row: Example) -> str:
    return " ".join(str(row.documents[0].text).split()[:OPENING_WORDS])


def _row(record: DatasetRow) -> Example | str:
    article = record.text("document").strip()
    summary = record.text("summary").strip()
    return record.example(record.documents([(None, article)]), QUERY, [summary], group=content_group(article))
