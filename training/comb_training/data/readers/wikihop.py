"""WikiHop (QAngaroo, Welbl et al. 2018): which entity stands in a relation to a subject, over many short documents.

Rows ``{id, query, answer, candidates, supports}``.

document: one of ``supports``; query: ``query`` with the underscores of its relation as spaces ("participant_of juan
rossell" is asked as "participant of juan rossell"); answer: ``answer``.
"""

from __future__ import annotations

from comb.documents.document import Example
from comb_training.data.records import DatasetRow
from comb_training.data.side import row_reader


@row_reader("wikihop")
def read_wikihop(record: DatasetRow, *, num_documents: int | None = None) -> Example | str:
    """The example of a row.

    Args:
        num_documents: keep only the first so many documents (counted); None keeps all, up to some sixty.
    """
    documents = record.documents(((None, text) for text in record.items("supports", str)), num_documents)
    relation, _, subject = record.text("query", "question").strip().partition(" ")
    query = f"{relation.replace('_', ' ')} {subject}".strip()
    # questions about one subject share supports
    return record.example(documents, query, [record.text("answer")], group=subject or query)
