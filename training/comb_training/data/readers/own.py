"""Your own files: rows with documents and a question (``jsonl``), and plain text made into tasks (``passages``)."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from unicodedata import normalize

from comb.documents.document import Document, Example
from comb_training.data.records import DatasetRow, check_rows_in, has_lines, on_hub, read_alike, read_records
from comb_training.data.side import DatasetSide, Split, content_group, reader

_HELDOUT = re.compile(r"(^|[-_.])(test|dev|val(id(ation)?)?|eval(uation)?|held[-_]?out)([-_.]|\d)", re.IGNORECASE)
_TRAIN = re.compile(r"(^|[-_.])train", re.IGNORECASE)


@reader("jsonl", heldout_share=0.1, reads="a file or folder of rows with documents, query and answer")
def read_jsonl(side: DatasetSide, *, num_documents: int | None = None) -> Iterable[Example]:
    """Reads rows ``{"documents": [...], "query": "...", "answer": "..."}`` of JSONL, or a JSON list, in their order.

    document: a string, or an object with ``text`` and optional ``title`` and ``id``; answer: ``answer``, or the first
    of ``answers`` (all of them are accepted). Optional: ``id``, and ``group`` for what the train/held-out split must
    not cut (default: the documents themselves, so that rows over the same ones stay together).

    Of a folder all such files are read. Where some are called test, dev, validation or heldout, as `a_dev.jsonl` is,
    these are the held-out side of the split, named in the counts, and the others the side to train on. `num_documents`:
    keep only the first so many documents of a row (counted); None keeps all.
    """
    if on_hub(side.path):
        records = read_records(side.path, "jsonl")
    else:
        files = [Path(side.path)]
        if files[0].is_dir():
            files, side.split = _files(side, files[0])
        found = read_alike(files, "jsonl", "documents", "query", lines=True)
        records = found if len(files) == 1 else [replace(record, number=n) for n, record in enumerate(found, 1)]
    return side.limited(side.rows(partial(_example, num_documents=num_documents, groups={}), records))


def _files(side: DatasetSide, path: Path) -> tuple[list[Path], Split]:
    """The files of a folder that are read, and the split of what is in them."""
    check_rows_in(path, "state.json", "dataset_dict.json")
    there = sorted(each for each in path.iterdir() if not each.name.startswith("."))
    found = [each for each in there if each.is_file()]
    files = [file for file in found if has_lines(file)]
    files = files or [file for file in found if file.name.lower().removesuffix(".gz").endswith(".json")]
    if not files:
        raise ValueError(f"no .jsonl or .json file in {path}; a folder of parquet files is named hf://{path.resolve()}")
    others = [file.name for file in found if file not in files], [each.name for each in there if each not in found]
    for what, names in zip(("files of another kind", "folders"), others, strict=True):
        shown = ", ".join([*names[:5], *(["..."] if len(names) > 5 else [])])
        side.counts.note(f"{what} left out: {shown}", len(names))
    heldout = [file for file in files if _HELDOUT.search(file.name) and not _TRAIN.search(file.name)]
    if side.split == "all" or not heldout or len(heldout) == len(files):
        return files, side.split
    side.counts.note(f"files held out by their names: {', '.join(file.name for file in heldout)}", len(heldout))
    return heldout if side.split == "heldout" else [file for file in files if file not in heldout], "all"


def _example(record: DatasetRow, num_documents: int | None, groups: dict[str, str]) -> Example | str:
    """The example of a row, or the reason why it gives none. Raises ValueError for a malformed row.

    Args:
        groups: of the same documents but for white space or how characters are coded, the group of the first.
    """
    if "data" in record.row and "documents" not in record.row:
        raise ValueError(f"{record.where}: there is no 'documents', but 'data' as in SQuAD: data=squad data.path=FILE")
    documents = []
    for item in record.items("documents", str, dict):
        fields = replace(record, row=item if isinstance(item, dict) else {"text": item})
        documents.append((fields.title(), fields.text("text"), fields.label("id")))
    answers = record.items("answers", str) if "answers" in record.row else []
    if record.row.get("answer") is not None or "answers" not in record.row:
        answers = [record.text("answer"), *answers]
    kept = record.documents(documents, num_documents)
    texts = sorted(str(document.text) for document in kept)
    alike = content_group(*sorted(" ".join(normalize("NFKC", text).split()) for text in texts))
    group = record.label("group") or groups.setdefault(alike, content_group(*texts))
    id = record.label("id") or str(record.number)
    return record.example(kept, record.text("query"), answers, id=id, group=group)


TASKS = ("copy", "continue")
COPY = 'Continue word for word from "{quoted}".'
CONTINUE = 'Write what comes next, behind the end of the text that begins with "{quoted}".'
QUOTED_WORDS = 8


@reader("passages", heldout_share=0.1)
def read_passages(
    side: DatasetSide,
    *,
    num_documents: int = 3,
    words: int = 100,
    answer_words: int = 24,
    questions: int = 2,
    tasks: Sequence[str] = TASKS,
    passages: int = 20_000,
) -> Iterable[Example]:
    """Plain text made into tasks that can't be solved without the documents; a text is on one side of the split.

    Rows ``{text}`` (``title`` and ``id`` optional). document: passages of `words` words, some of them from other texts;
    query: to go on word for word from a quoted place in one of them (copy), or where the one ends that begins so
    (continue); answer: the words that follow there. With the backbone's own distribution as the target
    (train.ce_weight 0, train.kl_weight 1) no label is needed: what is learned is to read documents as it reads them.

    Args:
        num_documents: passages per example at most; how many is drawn, from one on.
        words: of a passage; half to all of them are taken.
        answer_words: of an answer.
        questions: over the same passages.
        tasks: which of ``copy`` and ``continue`` are asked, in turn.
        passages: examples at most are made of these many groups of passages.
    """
    if not tasks or not set(tasks) <= set(TASKS):
        raise ValueError(f"tasks are of {', '.join(TASKS)}, not {list(tasks)}")
    if words // 2 < QUOTED_WORDS + answer_words:
        raise ValueError(f"words must be at least {2 * (QUOTED_WORDS + answer_words)} for such answers, not {words}")
    texts: dict[str, list[list[str]]] = {}
    for record in read_records(side.path, side.name):
        split = record.text("text").split()
        if len(split) < words + answer_words:
            side.counts.noted[f"texts of fewer than {words + answer_words} words, left out"] += 1
        else:
            group = record.label("id", "title") or str(record.number)
            texts.setdefault(group, []).append(split)
    if not texts:
        raise ValueError(f"{side.path} has no text of at least {words + answer_words} words")
    here = sorted(side.groups(texts))
    wanted = passages if side.limit is None else min(passages, -(-side.limit // questions))
    made: list[Example] = []
    for number in range(wanted):
        rng, places = side.rng("passages", number), []
        for _ in range(rng.randint(1, num_documents)):
            group = rng.choice(here)
            text = rng.choice(texts[group])  # chapters of a book, say
            length = rng.randint(words // 2, words)
            places.append((group, text, rng.randrange(len(text) - length - answer_words + 1), length))
        documents = tuple(Document(" ".join(text[start : start + length])) for _, text, start, length in places)
        for turn in range(questions):
            _, text, start, length = rng.choice(places)
            if tasks[(number + turn) % len(tasks)] == "copy":
                begin = start + rng.randrange(length - QUOTED_WORDS - answer_words + 1)
                query, answer = COPY, begin + QUOTED_WORDS
            else:
                begin, query, answer = start, CONTINUE, start + length
            query = query.format(quoted=" ".join(text[begin : begin + QUOTED_WORDS]))
            said = " ".join(text[answer : answer + answer_words])
            made.append(Example(documents, query, said, id=f"{number}-{turn}", group=places[0][0]))
    side.counts.read = len(made)
    return side.first(made)
