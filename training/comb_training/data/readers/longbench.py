"""LongBench (Bai et al. 2024): 21 tasks over long contexts, and LongBench-E, the same rows with lengths spread evenly.

Rows ``{input, context, answers, length, dataset, language, all_classes, _id}``; ``dataset`` names the task.

document: a passage where ``context`` numbers its passages ("Passage 1:", "Paragraph 1:", "段落1：", "文章1"), an
example in the few-shot tasks (trec, triviaqa, samsum, lsht), otherwise the whole context; query: a short instruction of
the task with ``input``; answer: the first of ``answers``, all of them accepted. A passage's number is left out where
nothing depends on it, so that the same passage is the same document everywhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from comb.documents.document import Example
from comb_training.data.grouping import content_group
from comb_training.data.hub import on_hub
from comb_training.data.records import DatasetRow, read_records
from comb_training.data.side import DatasetSide, reader

_PASSAGE = re.compile(r"^Passage (\d+):[ \t]*\n?", re.MULTILINE)
_PARAGRAPH = re.compile(r"^Paragraph (\d+):", re.MULTILINE)
_PARAGRAPH_ZH = re.compile(r"^段落\s*(\d+)\s*[:：]", re.MULTILINE)
_ARTICLE_ZH = re.compile(r"^文章\s*(\d+)[ \t]*\n", re.MULTILINE)


@dataclass(frozen=True)
class LongBenchTask:
    query: str
    mark: re.Pattern[str] | None = None
    """Where a document begins; with a group if the documents are numbered."""
    marks_stay: bool = True


_ANSWER = "Give only the answer, nothing else.\nQuestion: {input}\nAnswer:"
_PASSAGES = LongBenchTask(f"Answer the question from the passages. {_ANSWER}", _PASSAGE, marks_stay=False)
_CODE = "Write the next line of the code.\n"

TASKS = {
    "narrativeqa": LongBenchTask(f"Answer the question about the story with a short phrase. {_ANSWER}"),
    "qasper": LongBenchTask(
        'Answer the question about the article with a phrase or a sentence, with "yes" or "no", or with "unanswerable" '
        f"if the article doesn't say. {_ANSWER}"
    ),
    "multifieldqa_en": LongBenchTask(f"Answer the question about the text briefly. {_ANSWER}"),
    "multifieldqa_zh": LongBenchTask("请根据文章简短地回答问题，只给出答案。\n问题：{input}\n回答："),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
    "dureader": LongBenchTask("请根据文章回答问题。\n问题：{input}\n回答：", _ARTICLE_ZH, marks_stay=False),
    "gov_report": LongBenchTask("Write a one-page summary of the report.\nSummary:"),
    "qmsum": LongBenchTask("Answer the query about the meeting in one or more sentences.\nQuery: {input}\nAnswer:"),
    "multi_news": LongBenchTask("Write a one-page summary of all the news.\nSummary:", _PASSAGE, marks_stay=False),
    "vcsum": LongBenchTask("请总结这次会议的内容。\n总结："),
    "trec": LongBenchTask(
        "Name the type of the question, as in the examples.\n{input}", re.compile(r"^Question:", re.MULTILINE)
    ),
    "triviaqa": LongBenchTask(
        "Answer the question about the passage, as in the examples. Give only the answer, nothing else.\n{input}",
        re.compile(r"^Passage:", re.MULTILINE),
    ),
    "samsum": LongBenchTask(
        "Summarise the dialogue in a few short sentences, as in the examples.\n{input}",
        re.compile(r"^Dialogue:", re.MULTILINE),
    ),
    "lsht": LongBenchTask("请按照例子判断新闻的类别。\n{input}", re.compile(r"^新闻内容[:：]", re.MULTILINE)),
    "passage_count": LongBenchTask(
        "Some of the paragraphs are the same. How many different ones are there? Give only the number.\nNumber:",
        _PARAGRAPH,
    ),
    "passage_retrieval_en": LongBenchTask(
        'Which paragraph is this abstract of? Answer like "Paragraph 1".\nAbstract: {input}\nAnswer:', _PARAGRAPH
    ),
    "passage_retrieval_zh": LongBenchTask(
        "这段摘要属于哪个段落？请按“段落1”的格式回答。\n摘要：{input}\n答案：", _PARAGRAPH_ZH
    ),
    "lcc": LongBenchTask(_CODE),
    "repobench-p": LongBenchTask(_CODE + "{input}"),
}
"""The tasks by LongBench's names, in its order."""


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

    Args:
        task: one task, such as "hotpotqa", or "hotpotqa_e" of LongBench-E; None takes every row there is.
        num_documents: keep only the first so many documents of a row (counted); None keeps all of them.
        whole: the context as one document, for a splitter to cut (EPIC cuts SAMSum into 512 tokens).
        bare: the row's ``input`` without a word of the reader's, and passages with their numbers, for a prompt that has
            the instruction (``prompts`` of a template in `comb.evaluation.sets`).

    Raises:
        ValueError: for a missing path, an unknown task, or a malformed row, naming it.
    """
    if task is not None and task.removesuffix("_e") not in TASKS:
        raise ValueError(f"LongBench has no task {task!r}; it has: {', '.join(TASKS)}")
    records = [record for file in _files(side.path, task) for record in read_records(file, "longbench")]
    return side.examples(partial(_example, task=task, num_documents=num_documents, whole=whole, bare=bare), records)


def _files(path: str | Path | None, task: str | None) -> Sequence[str | Path | None]:
    if path is None or on_hub(path) or not Path(path).is_dir():
        return [path]
    pattern = f"{task or '*'}.jsonl"
    files = sorted(Path(path).glob(pattern))
    if not files:
        raise ValueError(f"dataset 'longbench': there is no {pattern} in {path}")
    return files


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
    mark = None if whole else kind.mark
    parts = [context] if mark is None else list(_split(context, mark, marks_stay=bare or kind.marks_stay))
    if mark is not None and mark.search(context) is None:
        record.left_out["context without its task's marks, kept as one document"] += 1
    documents = record.documents(((None, part) for part in parts), num_documents)
    # several questions may be asked over one context
    group = content_group(context)
    # a summary's row has no input of its own, and its prompt no place for one
    query = asked if bare and asked.strip() else kind.query.replace("{input}", asked)
    return record.example(documents, query, answers, id=record.row.get("_id"), group=group)


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
