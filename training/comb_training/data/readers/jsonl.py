"""Any JSONL file or set on the Hub of your own: rows ``{"documents": [...], "query": "...", "answer": "..."}``.

document: a string, or an object with ``text`` and optional ``title`` and ``id``; query: ``query``; answer: ``answer``,
or the first of ``answers`` (all of them are accepted). Optional: ``id``, and ``group`` for what the
train/held-out split must not cut (default: the documents themselves, so that rows over the same ones stay together).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial

from comb.documents.document import Example
from comb_training.data.grouping import content_group
from comb_training.data.records import DatasetRow, read_records
from comb_training.data.side import DatasetSide, reader


@reader("jsonl", heldout_share=0.1, reads="a file with documents, query and answer in each line")
def read_jsonl(side: DatasetSide, *, num_documents: int | None = None) -> Iterable[Example]:
    """Reads a JSONL file; documents stay in the order of the file.

    Args:
        num_documents: keep only the first so many documents of a row (counted); None keeps all.
    """
    records = read_records(side.path, "jsonl", lines=True)
    return side.examples(partial(_example, num_documents=num_documents), records)


def _example(record: DatasetRow, num_documents: int | None) -> Example | str:
    """The example of a row, or the reason why it gives none. Raises ValueError for a malformed row."""
    documents = record.documents(_documents(record), num_documents)
    answers = record.items("answers", str) if "answers" in record.row else []
    if record.row.get("answer") is not None or "answers" not in record.row:
        answers = [record.text("answer"), *answers]
    group = record.label("group") or content_group(*sorted(str(document.text) for document in documents))
    id = record.label("id") or str(record.number)
    return record.example(documents, record.text("query"), answers, id=id, group=group)


def _documents(record: DatasetRow) -> Iterator[tuple[str | None, str, str | None]]:
    for item in record.items("documents", str, dict):
        fields = replace(record, row=item if isinstance(item, dict) else {"text": item})
        yield fields.title(), fields.text("text"), fields.label("id")
