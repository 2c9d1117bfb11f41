"""SQuAD 1.1/2.0 (Rajpurkar et al. 2018) from the official JSON, or the Hub's rows ``{id, title, context, question,
answers: {text: [...]}}``.

document: a paragraph's ``context`` (title: the article's); query: ``question``; answer: the first of ``answers``,
all of them accepted. A question is asked over its own paragraph and distractors: paragraphs of the same article first,
then of other articles of the same split side. All questions of a paragraph share the same documents in the same order,
so that a training batch encodes them once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from comb.documents.document import Document, Example
from comb_training.data.grouping import pick_distractors
from comb_training.data.hub import on_hub
from comb_training.data.records import DatasetRow, read_records
from comb_training.data.side import DatasetSide, reader

UNANSWERABLE = "unanswerable"
"""The answer to a question that has none in its paragraph."""


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
    """Reads an official SQuAD JSON file or the Hub's rows; held-out examples are whole articles.

    Args:
        num_documents: documents per question, the right paragraph included.
        same_article: how many of the distractors come from the same article (if it has as many).
        unanswerable: what to do with SQuAD 2.0's impossible questions; kept ones have "unanswerable" as answer.
    """
    if unanswerable not in ("drop", "keep"):
        raise ValueError(f"unanswerable is 'drop' or 'keep', not {unanswerable!r}")
    articles = _from_rows(read_records(side.path, "squad")) if on_hub(side.path) else _load(Path(side.path))
    here = side.groups(article["title"] for article in articles)
    articles = [article for article in articles if article["title"] in here]
    paragraphs: dict[str, list[Document]] = {}  # articles may share a title
    for article in articles:
        texts = [paragraph["context"] for paragraph in article["paragraphs"]]
        own = [Document(text, title=article["title"]) for text in texts if text.strip()]
        paragraphs.setdefault(article["title"], []).extend(own)
    everything = list(chain.from_iterable(paragraphs.values()))

    blocks: list[list[Example]] = []  # one per paragraph
    for article in articles:
        title = article["title"]
        for number, paragraph in enumerate(article["paragraphs"]):
            questions = paragraph["qas"]
            side.counts.read += len(questions)
            if not paragraph["context"].strip():
                side.counts.drop("empty paragraph", len(questions))
                continue
            right = Document(paragraph["context"], title=title)
            rng = side.rng(title, number)
            pools = [(paragraphs[title], same_article), (everything, num_documents)]
            documents = [right, *pick_distractors(rng, pools, exclude=[right], total=num_documents - 1)]
            rng.shuffle(documents)
            asked = [question for question in questions if unanswerable == "keep" or _is_answered(question)]
            side.counts.drop("unanswerable question", len(questions) - len(asked))
            block = [_example(question, tuple(documents), title) for question in asked]
            if len(documents) < num_documents:
                side.counts.truncate("fewer documents in the file than num_documents", len(block))
            blocks.append(block)
    if side.limit is not None:
        side.rng("limit").shuffle(blocks)
    return side.first(list(chain.from_iterable(blocks)))


def _example(row: dict[str, Any], documents: tuple[Document, ...], title: str) -> Example:
    texts = [answer["text"] for answer in row["answers"]] if _is_answered(row) else [UNANSWERABLE]
    answers = tuple(dict.fromkeys(texts))
    return Example(documents, row["question"].strip(), answers[0], answers, id=row.get("id"), group=title)


def _is_answered(row: dict[str, Any]) -> bool:
    return bool(row.get("answers")) and not row.get("is_impossible")


def _load(path: Path) -> list[dict[str, Any]]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        articles: list[dict[str, Any]] = content["data"]
        for article in articles:
            for paragraph in article["paragraphs"]:
                _ = article["title"], paragraph["context"].strip()
                for question in paragraph["qas"]:
                    _ = question["question"].strip(), [answer["text"].strip() for answer in question.get("answers", ())]
    except (AttributeError, json.JSONDecodeError, KeyError, TypeError, UnicodeDecodeError) as error:
        raise ValueError(
            f"{path} is not SQuAD JSON ({type(error).__name__}: {error}); expected "
            "{data: [{title, paragraphs: [{context, qas: [{question, answers}]}]}]}"
        ) from error
    return articles


def _from_rows(records: list[DatasetRow]) -> list[dict[str, Any]]:
    """The official form of the Hub's rows, one for each question."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        title, context, question = (record.text(name) for name in ("title", "context", "question"))
        texts = [{"text": text} for text in record.inside("answers", "text").items("text", str)]
        row = {"id": record.row.get("id"), "question": question, "answers": texts}
        articles.setdefault(title, {}).setdefault(context, []).append(row)
    return [
        {"title": title, "paragraphs": [{"context": text, "qas": rows} for text, rows in paragraphs.items()]}
        for title, paragraphs in articles.items()
    ]
