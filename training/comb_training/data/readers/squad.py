"""SQuAD 1.1/2.0 (Rajpurkar et al. 2018) from the official JSON, or the Hub's rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Literal

from comb.documents.document import Document, Example
from comb_training.data.records import DatasetRow, on_hub, read_object, read_records
from comb_training.data.side import DatasetSide, content_group, pick_distractors, reader

UNANSWERABLE = "unanswerable"
"""The answer to a question that has none in its paragraph."""

Article = tuple[str, list[tuple[Document | None, list[DatasetRow]]]]
"""Its title, or what stands for one, and its paragraphs with their questions; None: a blank paragraph."""


@reader(
    "squad",
    hub_id={"v1": "rajpurkar/squad", "": "rajpurkar/squad_v2"},
    reads="the official SQuAD JSON (train-v2.0.json), or a set on the Hub (hf://rajpurkar/squad_v2?split=train)",
)
def read_squad(
    side: DatasetSide,
    *,
    num_documents: int = 4,
    same_article: int = 1,
    unanswerable: Literal["drop", "keep"] = "drop",
) -> Iterable[Example]:
    """Reads an official SQuAD JSON file or the Hub's rows ``{id, title, context, question, answers: {text: [...]}}``.

    document: a paragraph's ``context`` (title: the article's); answer: the first of ``answers``, all of them accepted.
    A question is asked over its own paragraph and distractors: paragraphs of the same article first, then of other
    articles of the same split side. All questions of a paragraph share the same documents in the same order, so that a
    training batch encodes them once. Held-out examples are whole articles.

    Args:
        num_documents: documents per question, the right paragraph included.
        same_article: how many of the distractors come from the same article (if it has as many).
        unanswerable: what to do with SQuAD 2.0's impossible questions; kept ones have "unanswerable" as answer.
    """
    if unanswerable not in ("drop", "keep"):
        raise ValueError(f"unanswerable is 'drop' or 'keep', not {unanswerable!r}")
    articles = _on_hub(side) if on_hub(side.path) else _official(side)
    here = side.groups(name for name, _ in articles)
    articles = [(name, parts) for name, parts in articles if name in here]
    paragraphs: dict[str, list[Document]] = {}  # articles may share a title
    for name, parts in articles:
        paragraphs.setdefault(name, []).extend(right for right, _ in parts if right is not None)
    everything = list(chain.from_iterable(paragraphs.values()))

    blocks: list[list[Example]] = []  # one per paragraph
    for name, parts in articles:
        for number, (right, questions) in enumerate(parts):
            if right is None:
                side.counts.read += len(questions)
                side.counts.drop("empty paragraph", len(questions))
                continue
            rng = side.rng(name, number)
            pools = [(paragraphs[name], same_article), (everything, num_documents)]
            documents = [right, *pick_distractors(rng, pools, exclude=[right], total=num_documents - 1)]
            rng.shuffle(documents)
            block = []
            for place, question in enumerate(questions):
                found = _example(question, tuple(documents), name, keep=unanswerable == "keep")
                made = side.counted(found, question)
                block += [replace(example, id=example.id or f"{name}-{number}-{place}") for example in made]
            if len(documents) < num_documents:
                side.counts.truncate("fewer documents in the file than num_documents", len(block))
            blocks.append(block)
    if side.limit is not None:
        side.rng("limit").shuffle(blocks)
    return side.first(list(chain.from_iterable(blocks)))


def _example(record: DatasetRow, documents: tuple[Document, ...], name: str, *, keep: bool) -> Example | str:
    """The example of a question; `keep` says whether it may be an unanswerable one."""
    answers: list[str] = []
    given, impossible = record.row.get("answers"), record.flag("is_impossible")
    if isinstance(given, Mapping):
        answers = replace(record, row=given).items("text", str)
    elif given is not None:
        answers = [answer.text("text") for answer in record.parts("answers")]
    # the Hub's rows have no other mark
    if impossible or (impossible is None and given is not None and not answers):
        if not keep:
            return "unanswerable question"
        answers = [UNANSWERABLE]
    return record.example(documents, record.text("question").strip(), answers, group=name)


def _official(side: DatasetSide) -> list[Article]:
    """The articles of the official JSON; what has no questions is dropped and counted."""
    content = read_object(Path(side.path), "squad")
    articles: list[Article] = []
    for article in content.parts("data"):
        title = article.title()
        contexts = [(part.text("context"), part.parts("qas")) for part in article.parts("paragraphs")]
        parts = [(_document(text, title), rows) for text, rows in contexts]
        articles.append((title or content_group(*(text for text, _ in contexts)), parts))
    if not articles:
        raise ValueError(f"{content.where}: 'data' has no article: it is a list of {{title, paragraphs}}")
    for reason, count in (
        ("article without paragraphs", sum(not parts for _, parts in articles)),
        ("paragraph without questions", sum(not rows for _, parts in articles for _, rows in parts)),
    ):
        side.counts.read += count
        side.counts.drop(reason, count)
    return articles


def _on_hub(side: DatasetSide) -> list[Article]:
    """The articles of the Hub's rows, one for each question."""
    articles: dict[str, dict[Document | None, list[DatasetRow]]] = {}
    for record in read_records(side.path, "squad"):
        title, context = record.title(), record.text("context")
        article = articles.setdefault(title or content_group(context), {})
        article.setdefault(_document(context, title), []).append(record)
    return [(name, list(parts.items())) for name, parts in articles.items()]


def _document(context: str, title: str | None) -> Document | None:
    return Document(context, title=title) if context else None
