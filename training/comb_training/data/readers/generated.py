"""Data that is generated on the fly (`comb_training.nano.world`): what the nano backbones can read."""

from __future__ import annotations

import random
from pathlib import Path

from comb.documents.datasets import Counts, Dataset, datasets
from comb.documents.document import Document, Example
from comb_training.data.side import Split
from comb_training.nano.world import LARGEST_LEDGER, World, ledger


@datasets.register("nano")
def read_nano(
    path: str | Path | None = None,
    *,
    split: Split = "heldout",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    scenes: int = 2400,
    questions: int = 8,
) -> Dataset:
    """The closed world of `nano`: people, companies and room stories; the same seed and options give the same examples.

    document: a generated text; query and answer: a generated question and its whole-sentence answer. The held-out side
    has names that the nano backbone never saw in training. All questions of a scene share its documents. Raises
    ValueError if a path is given, or the split is not "train" or "heldout".

    Args:
        num_documents: documents per scene; None takes 4 to 8 in turn.
        scenes: how many scenes to draw (no more than `limit` needs).
        questions: questions asked at most over the documents of one scene.
    """
    if path is not None:
        raise ValueError(f"dataset 'nano' is generated and reads no file; leave out data.path ({str(path)!r})")
    if split not in ("train", "heldout"):
        raise ValueError(f"dataset 'nano' has the splits train and heldout, not {split!r}")
    if num_documents is not None and num_documents < 1:
        raise ValueError(f"num_documents must be at least 1, not {num_documents}")
    world = World(seed, split)
    examples: list[Example] = []
    for index in range(scenes):
        if limit is not None and len(examples) >= limit:
            break
        scene = world.scene(4 + index % 5 if num_documents is None else num_documents, questions)
        documents = tuple(map(Document, scene.documents))
        group = f"{split}:{seed}:{index}"
        for number, question in enumerate(scene.questions):
            examples.append(Example(documents, question.query, question.answer, id=f"{group}:{number}", group=group))
    counts = Counts(read=len(examples))
    if limit is not None:
        counts.drop("over the limit", max(0, len(examples) - limit))
    return Dataset(tuple(examples[:limit]), counts, "nano")


@datasets.register("ledger")
def read_ledger(
    path: str | Path | None = None,
    *,
    split: Split = "heldout",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int = LARGEST_LEDGER[1],
    names: int = LARGEST_LEDGER[0],
    entries: int = LARGEST_LEDGER[2],
    scenes: int = 400,
) -> Dataset:
    """Logs that later documents overwrite, for `nano-ledger`: one question over each of `scenes` sets of them.

    document: a log of entries ("Mary: garden."); query: where somebody is now; answer: the place in the last entry on
    the name, whichever document has it. The sides of the split are drawn from other seeds. Raises ValueError if a path
    is given.
    """
    if path is not None:
        raise ValueError(f"dataset 'ledger' is generated and reads no file; leave out the path ({str(path)!r})")
    rng, examples = random.Random(f"{split}:{seed}"), []
    for number in range(scenes if limit is None else min(limit, scenes)):
        scene = ledger(rng, names, num_documents, entries, 1)
        (asked,) = scene.questions
        name = f"{split}:{seed}:{number}"
        documents = tuple(map(Document, scene.documents))
        examples.append(Example(documents, asked.query, asked.answer.strip(), id=name, group=name))
    return Dataset(tuple(examples), Counts(read=len(examples)), "ledger")
