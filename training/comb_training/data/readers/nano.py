"""The project's own closed world, generated on the fly: people, companies and room stories (`comb_training.nano`).

document: a generated text; query and answer: a generated question and its whole-sentence answer. The held-out side has
names that the nano backbone never saw in training. All questions of a scene share its documents.
"""

from __future__ import annotations

from pathlib import Path

from comb.documents.datasets import Counts, Dataset, datasets
from comb.documents.document import Document, Example
from comb_training.data.grouping import Split

SCENES = 2400
QUESTIONS_PER_SCENE = 8


@datasets.register("nano")
def read_nano(
    path: str | Path | None = None,
    *,
    split: Split = "heldout",
    seed: int = 0,
    limit: int | None = None,
    num_documents: int | None = None,
    fewest_documents: int = 4,
    most_documents: int = 8,
    scenes: int = SCENES,
    questions: int = QUESTIONS_PER_SCENE,
) -> Dataset:
    """Generates scenes; the same seed and options always give the same examples.

    Args:
        num_documents: documents per scene; None takes `fewest_documents` to `most_documents` in turn.
        scenes: how many scenes to draw (no more than `limit` needs).
        questions: questions asked at most over the documents of one scene.

    Raises:
        ValueError: if a path is given, or the split is not "train" or "heldout".
    """
    from comb_training.nano import World

    if path is not None:
        raise ValueError(f"dataset 'nano' is generated and reads no file; leave out data.path ({str(path)!r})")
    if split not in ("train", "heldout"):
        raise ValueError(f"dataset 'nano' has the splits train and heldout, not {split!r}")
    if num_documents is not None:
        fewest_documents = most_documents = num_documents
    if not 1 <= fewest_documents <= most_documents:
        raise ValueError(f"expected 1 <= fewest_documents <= most_documents, got {fewest_documents}, {most_documents}")
    world = World(seed, split)
    counts = Counts()
    examples: list[Example] = []
    for index in range(scenes):
        if limit is not None and len(examples) >= limit:
            break
        scene = world.scene(fewest_documents + index % (most_documents - fewest_documents + 1), questions)
        documents = tuple(Document(text) for text in scene.documents)
        group = f"{split}:{seed}:{index}"
        for number, question in enumerate(scene.questions):
            examples.append(Example(documents, question.query, question.answer, id=f"{group}:{number}", group=group))
    counts.read = len(examples)
    if limit is not None and len(examples) > limit:
        counts.drop("over the limit", len(examples) - limit)
        examples = examples[:limit]
    return Dataset(tuple(examples), counts, "nano")
