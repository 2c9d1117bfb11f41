"""Any file, folder or set on the Hub of your own: rows ``{"documents": [...], "query": "...", "answer": "..."}``.

document: a string, or an object with ``text`` and optional ``title`` and ``id``; query: ``query``; answer: ``answer``,
or the first of ``answers`` (all of them are accepted). Optional: ``id``, and ``group`` for what the
train/held-out split must not cut (default: the documents themselves, so that rows over the same ones stay together).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from comb.documents.document import Document, Example
from comb_training.data.grouping import Split, content_group
from comb_training.data.hub import on_hub
from comb_training.data.records import DatasetRow, read_records
from comb_training.data.side import DatasetSide, reader

_HELDOUT = re.compile(r"(test|dev|val|valid|validation|eval|held[-_]?out)([-_.]|\d)", re.IGNORECASE)


@reader("jsonl", heldout_share=0.1, reads="a file or folder of rows with documents, query and answer")
def read_jsonl(side: DatasetSide, *, num_documents: int | None = None) -> Iterable[Example]:
    """Reads JSONL, or a JSON list; documents stay in the order of the file.

    Of a folder all such files are read. Where some of them are called test, dev, validation or heldout, these are the
    held-out side of the split, and the others the side to train on.

    Args:
        num_documents: keep only the first so many documents of a row (counted); None keeps all.
    """
    if on_hub(side.path):
        records = read_records(side.path, "jsonl")
    else:
        files, side.split = _files(Path(side.path), side.split)
        found = [record for file in files for record in read_records(file, "jsonl", lines=True)]
        records = found if len(files) == 1 else [replace(record, number=n) for n, record in enumerate(found, 1)]
    return side.examples(partial(_example, num_documents=num_documents), records)


def _files(path: Path, split: Split) -> tuple[list[Path], Split]:
    if not path.is_dir():
        return [path], split
    files = [file for pattern in ("*.jsonl", "*.jsonl.gz") for file in path.glob(pattern)] or list(path.glob("*.json"))
    if not files:
        raise ValueError(
            f"no .jsonl or .json file in {path}; a folder of parquet or CSV files is named hf://{path.resolve()}"
        )
    heldout = [file for file in files if _HELDOUT.match(file.name)]
    if split == "all" or not heldout or len(heldout) == len(files):
        return sorted(files), split
    return sorted(heldout if split == "heldout" else set(files) - set(heldout)), "all"


def _example(record: DatasetRow, num_documents: int | None) -> Example | str:
    """The example of a row, or the reason why it gives none. Raises ValueError for a malformed row."""
    row, where = record.row, record.where
    if not isinstance(row.get("documents"), list):
        found = _found(row, "documents")
        raise ValueError(f"{where}: 'documents' must be a list of texts or objects with 'text', {found}")
    if not isinstance(row.get("query"), str):
        raise ValueError(f"{where}: 'query' must be a text, {_found(row, 'query')}")
    answers = _answers(record)
    items = row["documents"][:num_documents]
    if len(items) < len(row["documents"]):
        record.left_out["row with more documents than num_documents"] += 1
    if not row["query"].strip():
        return "empty query"
    if not answers[0].strip():
        return "empty answer"
    if not items:
        return "no documents"
    documents = []
    for item in items:
        fields = {"text": item} if isinstance(item, str) else item
        if not isinstance(fields, dict) or not isinstance(fields.get("text"), str):
            raise ValueError(f"{where}: a document is a text or an object with 'text', not {item!r}"[:300])
        if not fields["text"].strip():
            return "empty document"
        if not all(isinstance(fields.get(name, ""), str) for name in ("id", "title")):
            raise ValueError(f"{where}: a document's 'id' and 'title' are texts, got {item!r}"[:300])
        documents.append(Document(fields["text"], id=fields.get("id"), title=fields.get("title")))
    group = row.get("group", content_group(*sorted(document.text or "" for document in documents)))
    return Example(
        tuple(documents), row["query"], answers[0], answers, id=str(row.get("id", record.number)), group=str(group)
    )


def _answers(record: DatasetRow) -> tuple[str, ...]:
    """``answer``, or the first of ``answers``, and all others that are accepted."""
    accepted = record.row.get("answers") or []
    if not isinstance(accepted, list):
        raise ValueError(f"{record.where}: 'answers' must be a list of texts, {_found(record.row, 'answers')}")
    answers = [*([record.row["answer"]] if "answer" in record.row else []), *accepted]
    if not answers or not all(isinstance(answer, str) for answer in answers):
        raise ValueError(
            f"{record.where}: 'answer' must be a text, or 'answers' a list of texts, {_found(record.row, 'answer')}"
        )
    return tuple(dict.fromkeys(answers))


def _found(row: Mapping[str, Any], name: str) -> str:
    if name in row:
        return f"got {str(row[name])[:80]!r}"
    return f"and the row has {', '.join(map(repr, row)) or 'nothing'}"
