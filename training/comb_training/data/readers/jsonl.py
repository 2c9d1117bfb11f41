"""Any file, folder or set on the Hub of your own: rows ``{"documents": [...], "query": "...", "answer": "..."}``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from pathlib import Path

from comb.documents.document import Example
from comb_training.data.records import DatasetRow, on_hub, read_alike, read_records
from comb_training.data.side import DatasetSide, Split, content_group, reader

_HELDOUT = re.compile(r"(test|dev|val|valid|validation|eval|held[-_]?out)([-_.]|\d)", re.IGNORECASE)


@reader("jsonl", heldout_share=0.1, reads="a file or folder of rows with documents, query and answer")
def read_jsonl(side: DatasetSide, *, num_documents: int | None = None) -> Iterable[Example]:
    """Reads JSONL, or a JSON list; documents stay in the order of the file.

    document: a string, or an object with ``text`` and optional ``title`` and ``id``; answer: ``answer``, or the first
    of ``answers`` (all of them are accepted). Optional: ``id``, and ``group`` for what the train/held-out split must
    not cut (default: the documents themselves, so that rows over the same ones stay together).

    Of a folder all such files are read. Where some of them are called test, dev, validation or heldout, these are the
    held-out side of the split, and the others the side to train on. `num_documents`: keep only the first so many
    documents of a row (counted); None keeps all.
    """
    if on_hub(side.path):
        records = read_records(side.path, "jsonl")
    else:
        files = [Path(side.path)]
        if files[0].is_dir():
            files, side.split = _files(side, files[0])
        found = read_alike(files, "jsonl", "documents", "query", lines=True)
        records = found if len(files) == 1 else [replace(record, number=n) for n, record in enumerate(found, 1)]
    return side.limited(side.rows(partial(_example, num_documents=num_documents), records))


def _files(side: DatasetSide, path: Path) -> tuple[list[Path], Split]:
    """The files of a folder that are read, and the split of what is in them."""
    found = [[file for pattern in (f"*.{kind}", f"*.{kind}.gz") for file in path.glob(pattern)]
             for kind in ("jsonl", "json", "csv", "parquet")]  # fmt: skip
    files = found[0] or found[1]
    if not files:
        raise ValueError(
            f"no .jsonl or .json file in {path}; a folder of parquet or CSV files is named hf://{path.resolve()}"
        )
    for file in chain.from_iterable(found):
        if file not in files:
            side.counts.note(f"file of another kind left out: {file.name}")
    heldout = [file for file in files if _HELDOUT.match(file.name)]
    if side.split == "all" or not heldout or len(heldout) == len(files):
        return sorted(files), side.split
    return sorted(heldout if side.split == "heldout" else set(files) - set(heldout)), "all"


def _example(record: DatasetRow, num_documents: int | None) -> Example | str:
    """The example of a row, or the reason why it gives none. Raises ValueError for a malformed row."""
    documents = []
    for item in record.items("documents", str, dict):
        fields = replace(record, row=item if isinstance(item, dict) else {"text": item})
        documents.append((fields.title(), fields.text("text"), fields.label("id")))
    answers = record.items("answers", str) if "answers" in record.row else []
    if record.row.get("answer") is not None or "answers" not in record.row:
        answers = [record.text("answer"), *answers]
    kept = record.documents(documents, num_documents)
    group = record.label("group") or content_group(*sorted(str(document.text) for document in kept))
    id = record.label("id") or str(record.number)
    return record.example(kept, record.text("query"), answers, id=id, group=group)
