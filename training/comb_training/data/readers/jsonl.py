"""Any JSONL file or set on the Hub of your own: rows ``{"documents": [...], "query": "...", "answer": "..."}``.

document: a string, or an object with ``text`` and optional ``title`` and ``id``; query: ``query``; answer: ``answer``,
or the first of ``answers`` (all of them are accepted). Optional: ``id``, and ``group`` for what the
train/held-out split must not cut (default: the documents themselves, so that rows over the same ones stay together).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from comb.documents.datasets import Counts, Dataset, MissingDataError, datasets
from comb.documents.document import Document, Example
from comb_training.data.grouping import Split, seeded, split_groups
from comb_training.data.records import on_hub, read_records


@datasets.register("jsonl")
def read_jsonl(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    heldout_share: float = 0.1,
) -> Dataset:
    """Reads a JSONL file; documents stay in the order of the file.

    Args:
        num_documents: keep only the first so many documents of a row (counted); None keeps all.

    Raises:
        ValueError: naming the line, if a line is not JSON or lacks a field; rows with an empty query, answer or
            document are dropped and counted.
    """
    if path is None:
        raise MissingDataError("dataset 'jsonl' needs a path: a file with documents, query and answer in each line")
    counts = Counts()
    examples: list[Example] = []
    for number, where, row in _rows(path):
        counts.read += 1
        _check(row, where)
        if num_documents is not None and len(row["documents"]) > num_documents:
            counts.truncate("row with more documents than num_documents")
            row["documents"] = row["documents"][:num_documents]
        example = _example(row, number, where)
        if isinstance(example, str):
            counts.drop(example)
        else:
            examples.append(example)
    side = split_groups((str(example.group) for example in examples), split, heldout_share=heldout_share, seed=seed)
    counts.read -= sum(example.group not in side for example in examples)
    kept = [example for example in examples if example.group in side]
    if limit is not None and len(kept) > limit:
        counts.drop("over the limit", len(kept) - limit)
        seeded(seed, "limit").shuffle(kept)
        kept = kept[:limit]
    return Dataset(tuple(kept), counts, "jsonl")


def _rows(path: str | Path) -> Iterator[tuple[int, str, Any]]:
    if on_hub(path):
        for number, record in enumerate(read_records(path, "jsonl")):
            yield number, record.where, dict(record.row)
        return
    # not splitlines: JSON strings may hold U+2028 and the like
    for number, line in enumerate(Path(path).read_text(encoding="utf-8-sig").split("\n"), start=1):
        where = f"{path}:{number}"
        if line.strip():
            try:
                yield number, where, json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{where} is not JSON: {error}") from error


def _check(row: Any, where: str) -> None:
    """Raises ValueError for a malformed row; puts its answers into ``answer`` and ``answers``."""
    if not isinstance(row, dict):
        raise ValueError(f"{where}: expected an object, got {type(row).__name__}")
    if not isinstance(row.get("documents"), list):
        raise ValueError(f"{where}: 'documents' must be a list of texts or objects with 'text'")
    if not isinstance(row.get("query"), str):
        raise ValueError(f"{where}: 'query' must be a text")
    accepted = row.get("answers") or []
    if not isinstance(accepted, list):
        raise ValueError(f"{where}: 'answers' must be a list of texts")
    answers = [*([row["answer"]] if "answer" in row else []), *accepted]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(f"{where}: 'answer' must be a text, or 'answers' a list of texts")
    row["answer"], row["answers"] = answers[0], list(dict.fromkeys(answers))


def _example(row: dict[str, Any], number: int, where: str) -> Example | str:
    """The example of a row, or the reason why it gives none."""
    if not row["query"].strip():
        return "empty query"
    if not row["answer"].strip():
        return "empty answer"
    if not row["documents"]:
        return "no documents"
    documents = []
    for item in row["documents"]:
        fields = {"text": item} if isinstance(item, str) else item
        if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
            raise ValueError(f"{where}: a document is a text or an object with 'text', not {item!r}"[:300])
        if not fields["text"].strip():
            return "empty document"
        if not all(isinstance(fields.get(name, ""), str) for name in ("id", "title")):
            raise ValueError(f"{where}: a document's 'id' and 'title' are texts, got {item!r}"[:300])
        documents.append(Document(fields["text"], id=fields.get("id"), title=fields.get("title")))
    texts = "\x1f".join(sorted(document.text or "" for document in documents))
    group = row.get("group", hashlib.sha256(texts.encode()).hexdigest()[:16])
    return Example(
        tuple(documents),
        row["query"],
        row["answer"],
        tuple(row["answers"]),
        id=str(row.get("id", number)),
        group=str(group),
    )
