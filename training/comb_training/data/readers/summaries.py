"""Summaries: of dialogues (SAMSum, DialogSum), of an article (XSum), of several articles (Multi-News)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from operator import ne

from comb.documents.document import Document, Example
from comb_training.data.records import DatasetRow
from comb_training.data.side import DatasetSide, content_group, draw, reader, row_reader

DIALOGUE = "Dialogue:\n{dialogue}\nSummary:"
ARTICLE = "Summarise the article in one sentence."
ARTICLE_AMONG_OTHERS = 'Summarise in one sentence the article that begins with "{opening}".'
ARTICLES = "Write one summary of all the articles."
OPENING_WORDS = 8


@reader("samsum", hub_id={"dialogsum": "knkarthick/dialogsum", "": "knkarthick/samsum"})
def read_samsum(side: DatasetSide, *, num_documents: int = 4) -> Iterable[Example]:
    """SAMSum (Gliwa et al. 2019) and DialogSum (Chen et al. 2021) as few-shot summarisation.

    Rows ``{id, dialogue, summary}``; DialogSum's test rows have ``summary1`` to ``summary3``. document: another row's
    dialogue with its summary, from the same side of the split and never the dialogue asked about; query: the row's own
    dialogue; answer: its summary.

    Source of the set-up: EPIC sec. 5.1 (SAMSum as few-shot instruction following). `num_documents`: solved examples in
    front of each dialogue.
    """
    rows = side.rows(_samsum_row)
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


def _samsum_row(record: DatasetRow) -> Example | str:
    """The example with the row's own dialogue and summary as document, for others to show."""
    dialogue = record.text("dialogue").replace("\r\n", "\n").strip()
    summaries = [record.text("summary", "summary1").strip()]
    summaries += [record.text(name).strip() for name in ("summary2", "summary3") if name in record.row]
    if not dialogue:
        return "empty dialogue"
    if not summaries[0]:
        return "no summary"
    query = DIALOGUE.format(dialogue=dialogue)
    shot = Document(f"{query} {summaries[0]}")
    # grouped by the dialogue, not the id: the Hub's DialogSum test set has each three times
    return record.example((shot,), query, summaries, id=record.label("id", "fname"), group=content_group(dialogue))


@reader("xsum", hub_id="EdinburghNLP/xsum")
def read_xsum(side: DatasetSide, *, num_documents: int = 1) -> Iterable[Example]:
    """XSum (Narayan et al. 2018): one sentence that says what a BBC article is about.

    Rows ``{document, summary, id}``. document: the article, and articles of other rows as distractors; query: a fixed
    instruction, which among several articles names the right one by its first words; answer: ``summary``.
    `num_documents`: documents per summary: its article, and others of the same side of the split.
    """
    rows = side.rows(_xsum_row)
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
        yield replace(row, documents=tuple(documents), query=ARTICLE_AMONG_OTHERS.format(opening=opening))


def _opening(row: Example) -> str:
    return " ".join(str(row.documents[0].text).split()[:OPENING_WORDS])


def _xsum_row(record: DatasetRow) -> Example | str:
    article, summary = record.text("document").strip(), record.text("summary").strip()
    return record.example(record.documents([(None, article)]), ARTICLE, [summary], group=content_group(article))


@row_reader("multi_news", hub_id="alexfabbri/multi_news")
def read_multi_news(record: DatasetRow) -> Example | str:
    """Multi-News (Fabbri et al. 2019): the example of a row ``{document, summary}``, articles joined by ``|||||``."""
    parts = [part.strip() for part in record.text("document").split("|||||")]
    summary = record.text("summary").strip().removeprefix("–").strip()  # the dash that many begin with
    return record.example(
        record.documents((None, part) for part in parts), ARTICLES, [summary], group=content_group(*parts)
    )
