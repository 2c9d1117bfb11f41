"""MuSiQue (Trivedi et al. 2022): multi-hop questions over retrieved paragraphs.

Two schemas: a list of ``{ctxs: [{title, text}], question, answers}`` with ten retrieved documents each, and the
official ``{id, paragraphs: [{title, paragraph_text}], question, answer, answer_aliases}`` in each line.

document: a context or paragraph, in the file's order; query: ``question``; answer: the first of ``answers``, or
``answer``; aliases are accepted too.
"""

from __future__ import annotations

from comb.documents.document import Example
from comb_training.data.records import DatasetRow
from comb_training.data.side import row_reader


@row_reader("musique", hub_id="dgslibisey/MuSiQue")
def read_musique(record: DatasetRow, *, num_documents: int | None = None) -> Example | str:
    """The example of a row.

    Args:
        num_documents: keep only the first so many documents (counted); None keeps all of them.
    """
    official = record.row.get("paragraphs") is not None
    if official and record.flag("answerable") is False:
        return "unanswerable question"
    parts = record.parts("paragraphs" if official else "ctxs")
    pairs = ((part.title(), part.text("paragraph_text" if official else "text")) for part in parts)
    documents = record.documents(pairs, num_documents)
    if official:
        aliases = record.items("answer_aliases", str) if "answer_aliases" in record.row else []
        answers = [record.text("answer"), *aliases]
    else:
        answers = record.items("answers", str)
    question = record.text("question")
    return record.example(documents, question, answers, group=question)
