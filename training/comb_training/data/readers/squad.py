"""SQuAD 1.1/2.0 (Rajpurkar et al. 2018) from the official JSON, or the Hub's rows ``{id, title, context, question,
answers: {text: [...]}}``.

document: a paragraph's ``context`` (title: the article's); query: ``question``; answer: the first of ``answers``,
all of them accepted. A question is asked over its own paragraph and distractors: paragraphs of the same article first,
then of other articles of the same split side. All questions of a paragraph share the same documents in the same order,
so that a training batch encodes them once.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from comb.documents.datasets import Counts, Dataset, MissingDataError, datasets
from comb.documents.document import Document, Example
from comb_training.data.grouping import Split, pick_distractors, seeded, split_groups
from comb_training.data.records import Record, on_hub, read_records


@dataclass(frozen=True)
class _Paragraph:
    title: str
    text: str

    def document(self) -> Document:
        return Document(self.text, title=self.title)


@datasets.register("squad", hub_id={"v1": "rajpurkar/squad", "": "rajpurkar/squad_v2"})
def read_squad(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int = 4,
    same_article: int = 1,
    unanswerable: Literal["drop", "keep"] = "drop",
    unanswerable_answer: str = "unanswerable",
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads an official SQuAD JSON file or the Hub's rows; held-out examples are whole articles.

    Args:
        num_documents: documents per question, the right paragraph included.
        same_article: how many of the distractors come from the same article (if it has as many).
        unanswerable: what to do with SQuAD 2.0's impossible questions; kept ones have `unanswerable_answer` as answer.
        limit: at most so many examples, from paragraphs drawn at random with the seed.

    Raises:
        ValueError: if the path is missing, the file is not SQuAD JSON, or an option is out of range.
    """
    if path is None:
        raise MissingDataError(
            "dataset 'squad' needs a path: the official SQuAD JSON (data.path=train-v2.0.json), or "
            "a set on the Hub (data.path=hf://rajpurkar/squad_v2?split=train)"
        )
    if num_documents < 1:
        raise ValueError(f"num_documents must be at least 1, not {num_documents}")
    if unanswerable not in ("drop", "keep"):
        raise ValueError(f"unanswerable is 'drop' or 'keep', not {unanswerable!r}")
    articles = _from_rows(read_records(path, "squad")) if on_hub(path) else _load(Path(path))
    side = split_groups((article["title"] for article in articles), split, heldout_share=heldout_share, seed=seed)
    articles = [article for article in articles if article["title"] in side]
    texts: dict[str, list[_Paragraph]] = {}  # articles may share a title
    for article in articles:
        here = [_Paragraph(article["title"], p["context"]) for p in article["paragraphs"] if p["context"].strip()]
        texts.setdefault(article["title"], []).extend(here)
    everything = [paragraph for paragraphs in texts.values() for paragraph in paragraphs]

    counts = Counts()
    blocks: list[list[Example]] = []  # one per paragraph
    for article in articles:
        for number, row in enumerate(article["paragraphs"]):
            if not row["context"].strip():
                counts.read += len(row["qas"])
                counts.drop("empty paragraph", len(row["qas"]))
                continue
            right = _Paragraph(article["title"], row["context"])
            rng = seeded(seed, article["title"], number)
            pools = [(texts[article["title"]], same_article), (everything, num_documents)]
            distractors = pick_distractors(rng, pools, exclude=[right], total=num_documents - 1)
            documents = [paragraph.document() for paragraph in [right, *distractors]]
            rng.shuffle(documents)
            block = []
            for question in row["qas"]:
                counts.read += 1
                example = _example(question, tuple(documents), article["title"], unanswerable, unanswerable_answer)
                if example is None:
                    counts.drop("unanswerable question")
                    continue
                if len(documents) < num_documents:
                    counts.truncate("fewer documents in the file than num_documents")
                block.append(example)
            blocks.append(block)
    return Dataset(_limited(blocks, limit, seed, counts), counts, "squad")


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


def _from_rows(records: list[Record]) -> list[dict[str, Any]]:
    """The official form of the Hub's rows, one for each question."""
    articles: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in records:
        title, context, question = (record.text(name) for name in ("title", "context", "question"))
        answers = record.row.get("answers")
        if not isinstance(answers, dict):
            raise ValueError(f"{record.where}: 'answers' is an object with 'text', got {str(answers)[:80]!r}")
        texts = [{"text": text} for text in record.part(answers).items("text", str)]
        row = {"id": record.row.get("id"), "question": question, "answers": texts}
        articles.setdefault(title, {}).setdefault(context, []).append(row)
    return [
        {"title": title, "paragraphs": [{"context": text, "qas": rows} for text, rows in paragraphs.items()]}
        for title, paragraphs in articles.items()
    ]


def _example(
    row: dict[str, Any], documents: tuple[Document, ...], title: str, unanswerable: str, substitute: str
) -> Example | None:
    answers = tuple(dict.fromkeys(answer["text"] for answer in row.get("answers", ())))
    if row.get("is_impossible") or not answers:
        if unanswerable == "drop":
            return None
        answers = (substitute,)
    return Example(documents, row["question"].strip(), answers[0], answers, id=row.get("id"), group=title)


def _limited(blocks: list[list[Example]], limit: int | None, seed: int, counts: Counts) -> tuple[Example, ...]:
    if limit is not None:
        seeded(seed, "limit").shuffle(blocks)
    examples = [example for block in blocks for example in block]
    if limit is not None and len(examples) > limit:
        counts.drop("over the limit", len(examples) - limit)
        examples = examples[:limit]
    return tuple(examples)
