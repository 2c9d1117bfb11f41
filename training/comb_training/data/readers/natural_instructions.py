"""Super-NaturalInstructions (Wang et al. 2022), which holds the tasks of Natural-Instructions: told in words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from comb.documents.document import Document, Example
from comb_training.data.records import DatasetRow, on_hub, read_object, read_records
from comb_training.data.side import DatasetSide, content_group, draw, reader

SHOT = "Input: {input}\nOutput: {output}"
QUERY_AMONG_OTHERS = "Task: {task}\nInput: {input}"


@dataclass(frozen=True)
class InstructionTask:
    """A task: its name in the files, the instruction, worked examples and instances."""

    name: str
    instruction: str
    examples: Sequence[DatasetRow]
    instances: list[DatasetRow]

    @property
    def title(self) -> str:
        """The name in words: ``task002_quoref_answer_generation`` is "quoref answer generation"."""
        return re.sub(r"^task\d+_", "", self.name).replace("_", " ")

    def document(self) -> Document:
        return Document(self.instruction, title=f"Task: {self.title}")


@reader(
    "natural_instructions", hub_id="Muennighoff/natural-instructions", reads="a task file, or a folder of task*.json"
)
def read_natural_instructions(
    side: DatasetSide,
    *,
    num_documents: int | None = None,
    num_examples: int = 2,
    max_instances_per_task: int | None = None,
    group_by: Literal["task", "instance"] = "task",
) -> Iterable[Example]:
    """Reads a task file, a folder of them, or the Hub's rows. COMB sec. 5.2 trains on these tasks.

    ``task*.json``: ``{Definition: [...], "Positive Examples": [...], Instances: [{id, input, output: [...]}]}``, or the
    Hub's rows ``{task_name, id, definition, inputs, targets}``, which bring no worked examples.

    document: a task's instruction, each of its first positive examples, and instructions of other tasks as distractors,
    the same ones in the same order for all instances of the task; query: an instance's ``input``, behind the name of
    its task if there are other tasks' instructions; answer: the first ``output``, all of them accepted.

    Args:
        num_documents: documents per instance in all, filled up with other tasks' instructions from the same side of
            the split; None takes the task's own instruction and examples alone.
        num_examples: positive examples shown, each in a document of its own.
        max_instances_per_task: at most so many of a task, drawn with the seed.
        group_by: what the split never cuts: a task, or an instance, with others of the same input.
    """
    if num_examples < 0 or (max_instances_per_task is not None and max_instances_per_task < 1):
        raise ValueError(
            "expected num_examples >= 0 and max_instances_per_task >= 1, "
            f"got {num_examples} and {max_instances_per_task}"
        )
    if group_by not in ("task", "instance"):
        raise ValueError(f"group_by is 'task' or 'instance', not {group_by!r}")
    tasks = _tasks(side)
    empty = sum(not task.instances for task in tasks)
    side.counts.read += empty
    side.counts.drop("task without instances", empty)
    # tasks over one source have the same inputs
    groups = {
        task.name: [task.name if group_by == "task" else content_group(_input(record)) for record in task.instances]
        for task in tasks
    }
    here = side.groups(chain.from_iterable(groups.values()))
    tasks = [task for task in tasks if not here.isdisjoint(groups[task.name])]
    examples: list[Example] = []
    for task in tasks:
        documents, shown = _documents(task, tasks, side, num_examples, num_documents)
        found = []
        for number, (record, group) in enumerate(zip(task.instances, groups[task.name], strict=True)):
            if group not in here:
                continue
            given = _input(record)
            among_others = len(documents) > 1 + len(shown)
            query = QUERY_AMONG_OTHERS.format(task=task.title, input=given) if among_others and given else given
            id = record.label("id") or f"{task.name}-{number}"
            example = record.example(documents, query, _outputs(record), id=id, group=group)
            if given in shown:
                example = "instance that is one of its task's worked examples"
            found += side.counted(example, record)
        if max_instances_per_task is not None and len(found) > max_instances_per_task:
            side.counts.drop("over max_instances_per_task", len(found) - max_instances_per_task)
            found = side.rng("instances", task.name).sample(found, max_instances_per_task)
        examples += found
    return side.limited(examples)


def _documents(
    task: InstructionTask,
    tasks: Sequence[InstructionTask],
    side: DatasetSide,
    num_examples: int,
    num_documents: int | None,
) -> tuple[tuple[Document, ...], list[str]]:
    """The task's instruction, worked examples and other tasks' instructions; and the inputs of the worked examples."""
    counts, title = side.counts, f"Example of the task: {task.title}"
    pairs = [(_input(record), next(iter(_outputs(record)), "")) for record in task.examples]
    whole = [pair for pair in pairs if all(pair)]
    counts.truncate("worked example without input or output left out", len(pairs) - len(whole))
    if len(whole) < num_examples:
        counts.truncate("task with fewer worked examples than num_examples")
    shown = whole[:num_examples]
    if num_documents is not None and len(shown) > num_documents - 1:
        counts.truncate("task with more documents than num_documents")
        shown = shown[: num_documents - 1]
    documents = [task.document()]
    documents += [Document(SHOT.format(input=given, output=output), title=title) for given, output in shown]
    if num_documents is not None:
        rng = side.rng("task", task.name)
        # neither the same instruction nor the same name twice: the query names the task
        others = {other.title: other for other in tasks if other.instruction != task.instruction}
        others.pop(task.title, None)
        different = list({other.instruction: other for other in others.values()}.values())
        drawn = draw(rng, different, num_documents - len(documents), lambda _: True)
        documents += [other.document() for other in drawn]
        if len(documents) < num_documents:
            counts.truncate("task with fewer other tasks than num_documents needs")
        rng.shuffle(documents)
    return tuple(documents), [given for given, _ in shown]


def _input(record: DatasetRow) -> str:
    return record.text("input", "inputs").strip()


def _outputs(record: DatasetRow) -> list[str]:
    """The accepted outputs: a list, or a text in the Hub's rows and in worked examples."""
    return record.texts("targets" if record.row.get("output") is None and "targets" in record.row else "output")


def _tasks(side: DatasetSide) -> list[InstructionTask]:
    if on_hub(side.path):
        tasks: dict[str, InstructionTask] = {}
        for record in read_records(side.path, side.name):
            name, instruction = record.label("task_name"), _instruction(record, [record.text("definition").strip()])
            if name is None:
                raise ValueError(f"{record.where}: the task has no name")
            tasks.setdefault(name, InstructionTask(name, instruction, (), [])).instances.append(record)
        return list(tasks.values())
    path, patterns = Path(side.path), ("task*.json", "task*.json.gz")
    files = sorted(file for name in patterns for file in path.glob(name)) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"dataset {side.name!r}: there is no {patterns[0]} in {path}")
    found = []
    for file in files:
        record = read_object(file, side.name)
        shown, instances = record.parts("Positive Examples"), record.parts("Instances")
        name = file.name.removesuffix(".gz").removesuffix(".json")
        found.append(InstructionTask(name, _instruction(record, record.texts("Definition")), shown, instances))
    return found


def _instruction(record: DatasetRow, texts: Iterable[str]) -> str:
    instruction = "\n".join(texts)
    if not instruction.strip():
        raise ValueError(f"{record.where}: the task has no instruction")
    return instruction
