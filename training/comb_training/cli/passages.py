"""The questions of `comb demo` over passages.yaml."""

from __future__ import annotations

from pathlib import Path

import yaml

from comb.documents.document import Document, Example

DOCUMENTS = 4
_OTHERS = (3, 5, 8)  # how many places further on the passages stand that a question gets beside its own


def demo_questions() -> list[Example]:
    """A question about each passage, over it and three others; the right one stands at each place in turn."""
    rows = yaml.safe_load(Path(__file__).with_name("passages.yaml").read_text(encoding="utf-8"))
    passages = [Document(row["text"], id=f"passage-{number}") for number, row in enumerate(rows)]
    questions = []
    for number, row in enumerate(rows):
        documents = [passages[(number + further) % len(passages)] for further in _OTHERS]
        documents.insert(number % DOCUMENTS, passages[number])
        questions.append(Example(tuple(documents), row["question"], row["answer"], id=f"passage-{number}"))
    return questions
