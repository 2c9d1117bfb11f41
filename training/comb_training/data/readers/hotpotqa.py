"""HotpotQA (Yang et al. 2018): two-hop questions over ten paragraphs.

The official JSON (``context: [[title, [sentence, ...]], ...]``) and the Hub's form (``context: {title: [...],
sentences: [[...], ...]}``).

document: a paragraph's sentences joined, its title as title; query: ``question``; answer: ``answer``.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from comb.documents.document import Example
from comb_training.data.records import DatasetRow
from comb_training.data.side import row_reader


@row_reader("hotpotqa", hub_id="hotpotqa/hotpot_qa")
def read_hotpotqa(record: DatasetRow, *, num_documents: int | None = None) -> Example | str:
    """The example of a row.

    Args:
        num_documents: keep only the first so many documents (counted); None keeps all of them.
    """
    documents = record.documents(_paragraphs(record), num_documents)
    question, answer = record.text("question"), record.text("answer")
    return record.example(documents, question, [answer], id=record.label("_id"), group=question)


def _paragraphs(record: DatasetRow) -> list[tuple[str | None, str]]:
    context: Any = record.row.get("context")
    if context is None and "context" in record.row:
        return []
    try:
        rows = zip(context["title"], context["sentences"], strict=True) if isinstance(context, dict) else context
        pairs = [(title, sentences) for title, sentences in rows]
    except (KeyError, TypeError, ValueError) as error:
        got = str(context)[:80]
        raise ValueError(f"{record.where}: 'context' is a list of [title, [sentence, ...]], got {got!r}") from error
    found = []
    for title, sentences in pairs:
        paragraph = replace(record, row={"title": title, "sentences": sentences})
        # official sentences mostly bring the space before them, but not all do
        stripped = (sentence.strip() for sentence in paragraph.items("sentences", str))
        found.append((paragraph.title(), " ".join(sentence for sentence in stripped if sentence)))
    return found
