"""LongBench (Bai et al. 2024): 21 tasks over long contexts, and LongBench-E, its rows with lengths spread evenly."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import yaml

from comb.documents.document import Example
from comb_training.data.records import DatasetRow, on_hub, read_alike
from comb_training.data.side import DatasetSide, content_group, reader


@dataclass(frozen=True)
class LongBenchTask:
    """One task, as longbench.yaml says; `mark`: the pattern of where a document begins."""

    query: str
    mark: str | None = None
    marks_stay: bool = True


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
TASKS = {name: LongBenchTask(**row) for name, row in _ROWS.items()}


@reader("longbench", hub_id="Xnhyacinth/LongBench")
def read_longbench(
    side: DatasetSide,
    *,
    task: str | None = None,
    num_documents: int | None = None,
    whole: bool = False,
    bare: bool = False,
) -> Iterable[Example]:
    """Reads LongBench from a JSONL file, a folder of them (``hotpotqa.jsonl``, ``hotpotqa_e.jsonl``), or the Hub.

    Rows ``{input, context, answers, dataset, _id}``; ``dataset`` names the task. document: a passage where ``context``
    numbers them ("Passage 1:", "段落1："), an example in the few-shot tasks (trec, triviaqa, samsum, lsht), otherwise
    the whole context; query: a short instruction of the task with ``input``; answer: the first of ``answers``, all of
    them accepted. A passage's number is left out where nothing depends on it, so that the same passage is the same
    document everywhere.

    Args:
        task: one task, such as "hotpotqa", or "hotpotqa_e" of LongBench-E; None takes every row there is.
        num_documents: keep only the first so many documents of a row (counted); None keeps all of them.
        whole: the context as one document, for a splitter to cut (EPIC cuts SAMSum into 512 tokens).
        bare: the row's ``input`` without a word of the reader's, and passages with their numbers, for a prompt that has
            the instruction (``prompts`` of a template in `comb.evaluation.setting`).
    """
    if task is not None and task.removesuffix("_e") not in TASKS:
        raise ValueError(f"LongBench has no task {task!r}; it has: {', '.join(TASKS)}")
    files: Sequence[str | Path] = [side.path]
    if not on_hub(side.path) and Path(side.path).is_dir():
        pattern = f"{task or '*'}.jsonl"
        files = sorted(file for name in (pattern, f"{pattern}.gz") for file in Path(side.path).glob(name))
        if not files:
            raise ValueError(f"dataset 'longbench': there is no {pattern} in {side.path}")
    records = read_alike(files, "longbench", "dataset", "context", "input")
    example = partial(_example, task=task, num_documents=num_documents, whole=whole, bare=bare)
    return side.limited(side.rows(example, records))


def _example(
    record: DatasetRow, *, task: str | None, num_documents: int | None, whole: bool, bare: bool
) -> Example | str:
    name = record.text("dataset").removesuffix("_e")
    if name not in TASKS:
        raise ValueError(f"{record.where}: LongBench has no task {name!r}; it has: {', '.join(TASKS)}")
    if task is not None and name != task.removesuffix("_e"):
        return "row of another task"
    kind, context, asked = TASKS[name], record.text("context"), record.text("input")
    answers = record.items("answers", str)
    if "{input}" in kind.query and not asked.strip():
        return "empty query"
    mark = None if whole or kind.mark is None else re.compile(kind.mark, re.MULTILINE)
    parts = [context] if mark is None else list(_split(context, mark, marks_stay=bare or kind.marks_stay))
    if mark is not None and mark.search(context) is None:
        record.left_out["context without its task's marks, kept as one document"] += 1
    documents = record.documents(((None, part) for part in parts), num_documents)
    # several questions may be asked over one context
    group = content_group(context)
    # a summary's row has no input of its own, and its prompt no place for one
    query = asked if bare and asked.strip() else kind.query.replace("{input}", asked)
    return record.example(documents, query, answers, id=record.label("_id"), group=group)


def _split(context: str, mark: re.Pattern[str], *, marks_stay: bool) -> Iterator[str]:
    """The documents of a context. Numbers must go up from 1: a passage may quote a mark."""
    begin, text_begin, number = 0, 0, 1
    for found in mark.finditer(context):
        if mark.groups and int(found[1]) != number:
            continue
        number += 1
        if context[begin : found.start()].strip():
            yield context[text_begin : found.start()].strip()
        begin, text_begin = found.start(), found.start() if marks_stay else found.end()
    yield context[text_begin:].strip()
