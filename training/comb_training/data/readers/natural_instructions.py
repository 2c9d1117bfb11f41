"""Natural-Instructions (Mishra et al. 2022) and Super-NaturalInstructions (Wang et al. 2022): tasks told in words.

v1, ``subtask*.json``: ``{Title, Prompt, Definition, "Things to Avoid", "Emphasis & Caution", Examples: {"Positive
Examples": [{input, output}]}, Instances: [{input, output: [...]}]}``, with "-" for an empty field. v2, ``task*.json``:
``{Definition: [...], "Positive Examples": [{input, output}], Instances: [{id, input, output: [...]}]}``, or the Hub's
rows ``{task_name, id, definition, inputs, targets}``, which bring no worked examples.

document: a task's instruction, each of its first positive examples, and instructions of other tasks as distractors, the
same ones in the same order for all instances of the task; query: an instance's ``input``, behind the name of its task
if there are other tasks' instructions; answer: the first ``output``, all of them accepted.

Source of the set-up: COMB sec. 5.2 trains on both sets.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from comb.documents.datasets import Counts, Dataset, MissingDataError, datasets
from comb.documents.document import Document, Example
from comb_training.data.distractors import draw
from comb_training.data.grouping import Split, seeded, split_groups
from comb_training.data.records import Record, check_num_documents, limited, on_hub, read_object, read_records

GroupBy = Literal["task", "instance"]
V1_PARTS = ("Prompt", "Definition", "Things to Avoid", "Emphasis & Caution")
SHOT = "Input: {input}\nOutput: {output}"
QUERY_AMONG_OTHERS = "Task: {task}\nInput: {input}"


@dataclass(frozen=True)
class _Task:
    name: str
    instruction: str
    examples: Sequence[Record]
    instances: Sequence[Record]

    @property
    def title(self) -> str:
        """The name in words: ``subtask002_quoref_answer_generation`` is "quoref answer generation"."""
        return re.sub(r"^(sub)?task\d+_", "", self.name).replace("_", " ")

    def document(self) -> Document:
        """The instruction as a document."""
        return Document(self.instruction, title=f"Task: {self.title}")


@dataclass(frozen=True)
class _Row:
    record: Record
    name: str
    group: str


@datasets.register("natural_instructions", hub_id="Muennighoff/natural-instructions")
def read_natural_instructions(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    num_examples: int = 2,
    max_instances_per_task: int | None = None,
    group_by: GroupBy = "task",
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads Super-NaturalInstructions (v2): a task file, a folder of them, or the Hub's rows.

    Args:
        num_documents: documents per instance in all, filled up with other tasks' instructions from the same side of
            the split; None takes the task's own instruction and examples alone.
        num_examples: positive examples shown, each in a document of its own.
        max_instances_per_task: at most so many of a task, drawn with the seed.
        group_by: what the split never cuts: a task, or an instance, with others of the same input.

    Raises:
        ValueError: for a missing path, a malformed file, naming it and the instance, or an option out of range.
    """
    name = "natural_instructions"
    return _read(
        _hub_tasks(path, name) if on_hub(path) else _files(path, name, "task*.json", _task_v2),
        name,
        split=split,
        seed=seed,
        limit=limit,
        num_documents=num_documents,
        num_examples=num_examples,
        max_instances_per_task=max_instances_per_task,
        group_by=group_by,
        heldout_share=heldout_share,
    )


@datasets.register("natural_instructions_v1")
def read_natural_instructions_v1(
    path: str | Path | None = None,
    *,
    split: Split = "all",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    num_examples: int = 2,
    max_instances_per_task: int | None = None,
    group_by: GroupBy = "task",
    heldout_share: float = 0.2,
) -> Dataset:
    """Reads Natural-Instructions (v1): a subtask file, or a folder of them.

    Args and errors as of `read_natural_instructions`.
    """
    name = "natural_instructions_v1"
    return _read(
        _files(path, name, "subtask*.json", _task_v1),
        name,
        split=split,
        seed=seed,
        limit=limit,
        num_documents=num_documents,
        num_examples=num_examples,
        max_instances_per_task=max_instances_per_task,
        group_by=group_by,
        heldout_share=heldout_share,
    )


def _read(
    tasks: Sequence[_Task],
    name: str,
    *,
    split: Split,
    seed: int,
    limit: int | None,
    num_documents: int | None,
    num_examples: int,
    max_instances_per_task: int | None,
    group_by: GroupBy,
    heldout_share: float,
) -> Dataset:
    check_num_documents(num_documents)
    if num_examples < 0 or (max_instances_per_task is not None and max_instances_per_task < 1):
        raise ValueError(
            "expected num_examples >= 0 and max_instances_per_task >= 1, "
            f"got {num_examples} and {max_instances_per_task}"
        )
    if group_by not in ("task", "instance"):
        raise ValueError(f"group_by is 'task' or 'instance', not {group_by!r}")
    groups = {task.name: [_group(task, record, group_by) for record in task.instances] for task in tasks}
    side = split_groups(chain.from_iterable(groups.values()), split, heldout_share=heldout_share, seed=seed)
    here: dict[str, list[_Row]] = {task.name: [] for task in tasks}
    for task in tasks:
        for number, (record, group) in enumerate(zip(task.instances, groups[task.name], strict=True)):
            if group in side:
                here[task.name].append(_Row(record, f"{task.name}-{number}", group))
    tasks = [task for task in tasks if here[task.name]]
    counts = Counts()
    examples: list[Example] = []
    for task in tasks:
        shown = _shown(task, num_examples, num_documents, counts)
        documents = _documents(task, shown, tasks, num_documents, seed, counts)
        found = _examples(task, here[task.name], shown, documents, counts)
        if max_instances_per_task is not None and len(found) > max_instances_per_task:
            counts.drop("over max_instances_per_task", len(found) - max_instances_per_task)
            found = seeded(seed, "instances", task.name).sample(found, max_instances_per_task)
        examples += found
    return Dataset(tuple(limited(examples, limit, seed, counts)), counts, name)


def _group(task: _Task, record: Record, group_by: GroupBy) -> str:
    if group_by == "task":
        return task.name
    # tasks over one source have the same inputs
    return hashlib.sha256(_input(record).encode()).hexdigest()[:16]


def _shown(task: _Task, num_examples: int, num_documents: int | None, counts: Counts) -> list[tuple[str, str]]:
    """Input and output of the worked examples that become documents."""
    pairs = [(_input(record), next(iter(_outputs(record)), "")) for record in task.examples]
    whole = [(given, output) for given, output in pairs if given and output]
    counts.truncate("worked example without input or output left out", len(pairs) - len(whole))
    if len(whole) < num_examples:
        counts.truncate("task with fewer worked examples than num_examples")
    kept = whole[:num_examples]
    if num_documents is not None and len(kept) > num_documents - 1:
        counts.truncate("task with more documents than num_documents")
        kept = kept[: num_documents - 1]
    return kept


def _documents(
    task: _Task,
    shown: Sequence[tuple[str, str]],
    tasks: Sequence[_Task],
    num_documents: int | None,
    seed: int,
    counts: Counts,
) -> tuple[Document, ...]:
    title = f"Example of the task: {task.title}"
    documents = [task.document()]
    documents += [Document(SHOT.format(input=given, output=output), title=title) for given, output in shown]
    if num_documents is None:
        return tuple(documents)
    rng = seeded(seed, "task", task.name)
    # neither the same instruction nor the same name twice: the query names the task
    others = {other.title: other for other in tasks if other.instruction != task.instruction}
    others.pop(task.title, None)
    different = list({other.instruction: other for other in others.values()}.values())
    drawn = draw(rng, different, num_documents - len(documents), lambda _: True)
    documents += [other.document() for other in drawn]
    if len(documents) < num_documents:
        counts.truncate("task with fewer other tasks than num_documents needs")
    rng.shuffle(documents)
    return tuple(documents)


def _examples(
    task: _Task,
    rows: Sequence[_Row],
    shown: Sequence[tuple[str, str]],
    documents: tuple[Document, ...],
    counts: Counts,
) -> list[Example]:
    known = {given for given, _ in shown}
    among_others = len(documents) > 1 + len(shown)
    examples = []
    for row in rows:
        counts.read += 1
        given = _input(row.record)
        query = QUERY_AMONG_OTHERS.format(task=task.title, input=given) if among_others and given else given
        name = row.record.row.get("id") or row.name
        found = row.record.example(documents, query, _outputs(row.record), id=name, group=row.group)
        if given in known:
            counts.drop("instance that is one of its task's worked examples")
        elif isinstance(found, str):
            counts.drop(found)
        else:
            examples.append(found)
    return examples


def _input(record: Record) -> str:
    return record.text("input", "inputs").strip()


def _outputs(record: Record) -> list[str]:
    """The accepted outputs: a list, or a text in the Hub's rows and in worked examples."""
    name = next((name for name in ("output", "targets") if record.row.get(name) is not None), "output")
    outputs = [record.text(name)] if isinstance(record.row.get(name), str) else record.items(name, str)
    return [output.strip() for output in outputs]


def _files(path: str | Path | None, dataset: str, pattern: str, task: Callable[[Record], _Task]) -> list[_Task]:
    if path is None:
        raise MissingDataError(
            f"dataset {dataset!r} needs a path: a task file, or a folder of {pattern} (data.path=FOLDER)"
        )
    if on_hub(path):
        raise ValueError(f"dataset {dataset!r} is read from its task files, not from the Hub ({path})")
    path = Path(path)
    files = sorted(path.glob(pattern)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"dataset {dataset!r}: there is no {pattern} in {path}")
    return [task(read_object(file, dataset)) for file in files]


def _task_v1(record: Record) -> _Task:
    parts = [(name, record.text(name).strip()) for name in V1_PARTS if record.row.get(name) is not None]
    instruction = "\n".join(f"{name}: {text}" for name, text in parts if text not in ("", "-"))
    examples = record.row.get("Examples")
    if not isinstance(examples, dict):
        raise ValueError(
            f"{record.where}: 'Examples' is an object with 'Positive Examples', got {str(examples)[:80]!r}"
        )
    return _task(record, instruction, record.part(examples))


def _task_v2(record: Record) -> _Task:
    definition = record.row.get("Definition")
    texts = [definition] if isinstance(definition, str) else record.items("Definition", str)
    return _task(record, "\n".join(text.strip() for text in texts), record)


def _task(record: Record, instruction: str, examples: Record) -> _Task:
    name = Path(record.where).name.removesuffix(".gz").removesuffix(".json")
    _check_instruction(record, instruction)
    return _Task(name, instruction, _parts(examples, "Positive Examples"), _parts(record, "Instances"))


def _check_instruction(record: Record, instruction: str) -> None:
    if not instruction.strip():
        raise ValueError(f"{record.where}: the task has no instruction")


def _parts(record: Record, name: str) -> list[Record]:
    if record.row.get(name) == "-":  # v1's empty field
        return []
    return [Record(item, f"{record.where}: {name}[{index}]") for index, item in enumerate(record.items(name, dict))]


def _hub_tasks(path: Any, dataset: str) -> list[_Task]:
    tasks: dict[str, tuple[str, list[Record]]] = {}
    for record in read_records(path, dataset):
        definition = record.text("definition").strip()
        _check_instruction(record, definition)
        tasks.setdefault(record.text("task_name"), (definition, []))[1].append(record)
    return [_Task(name, definition, (), records) for name, (definition, records) in tasks.items()]
