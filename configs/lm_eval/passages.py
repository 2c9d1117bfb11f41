"""Sets of `configs/evaluation.yaml` as rows of lm-evaluation-harness, and how their answers are scored."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from datasets import Dataset

from comb.documents.datasets import DATA
from comb.documents.document import Document
from comb.evaluation.metrics import exact_match, f1
from comb.evaluation.setting import read_sets

SETS = Path(__file__).parents[1] / "evaluation.yaml"


def rows(of: str, data: str = DATA, sets: str = str(SETS), **_: Any) -> dict[str, Dataset]:
    """The questions of a set that are scored, in the order of `comb bench methods`.

    Args:
        of: the set, from the task's file.
        data: folder of all sets' data, sets: the file that names them, both from ``--metadata``, with which the harness
            also gives what the model was made with.
    """
    there = read_sets(Path(sets))
    if of not in there:
        raise ValueError(f"{sets} has no set {of!r}; it has {', '.join(there)}")
    found = there[of].read(Path(data))
    made = [
        {"context": passages(each.documents), "question": each.query, "answers": list(each.references)}
        for each in found
    ]  # fmt: skip
    return {"test": Dataset.from_list(made)}


def passages(documents: tuple[Document, ...]) -> str:
    """Documents as LongBench writes them."""
    written = (f"{each.title}\n{each.text}" if each.title else each.text for each in documents)
    return "\n\n".join(f"Passage {number}:\n{text}" for number, text in enumerate(written, 1))


def scores(row: dict[str, Any], answers: list[str]) -> dict[str, float]:
    """Exact match and F1, each of the best of all accepted answers."""
    return {"em": exact_match(answers[0], row["answers"]), "f1": f1(answers[0], row["answers"])}
