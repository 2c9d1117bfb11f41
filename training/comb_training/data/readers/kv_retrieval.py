"""Key-value retrieval (Liu et al. 2023, Lost in the Middle): find the value of one UUID among many.

Rows ``{ordered_kv_records: [[key, value], ...], key, value}``.

document: a run of records, one ``"key": "value"`` per line; query: which value the key has; answer: ``value``.
"""

from __future__ import annotations

from comb.documents.document import Document, Example
from comb_training.data.records import DatasetRow
from comb_training.data.side import row_reader

QUERY = 'Which value belongs to the key "{key}"?'


@row_reader("kv_retrieval")
def read_kv_retrieval(record: DatasetRow, *, records_per_document: int = 15) -> Example | str:
    """The example of a row. Raises ValueError for a malformed one, or fewer than one record per document."""
    if records_per_document < 1:
        raise ValueError(f"records_per_document must be at least 1, not {records_per_document}")
    pairs = record.items("ordered_kv_records", list)
    if not all(len(pair) == 2 for pair in pairs):
        raise ValueError(f"{record.where}: 'ordered_kv_records' is a list of [key, value] texts")
    pairs = [[record.check_text(part, "ordered_kv_records") for part in pair] for pair in pairs]
    key, value = record.text("key"), record.text("value")
    if not key.strip():
        return "empty query"
    if not pairs:
        return "no documents"
    if {held for name, held in pairs if name == key} != {value}:
        return "records that don't give the value for the key"
    lines = [f'"{name}": "{held}"' for name, held in pairs]
    documents = tuple(
        Document("\n".join(lines[first : first + records_per_document]))
        for first in range(0, len(lines), records_per_document)
    )
    return record.example(documents, QUERY.format(key=key), [value], id=key, group=key)
