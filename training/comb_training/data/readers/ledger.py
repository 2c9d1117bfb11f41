"""Logs that later documents overwrite, generated on the fly (`comb_training.nano.world`): what `nano-ledger` can do.

document: a log of entries ("Mary: garden."); query: where somebody is now; answer: the place in the last entry on the
name, whichever document has it. The sides of the split are drawn from other seeds.
"""

from __future__ import annotations

import random
from pathlib import Path

from comb.documents.datasets import Counts, Dataset, datasets
from comb.documents.document import Document, Example
from comb_training.data.grouping import Split
from comb_training.nano.world import LARGEST_LEDGER, ledger


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
    """Generates one question over each of `scenes` sets of logs; the same seed gives the same ones.

    Raises:
        ValueError: if a path is given.
    """
    if path is not None:
        raise ValueError(f"dataset 'ledger' is generated and reads no file; leave out the path ({str(path)!r})")
    rng, counts, examples = random.Random(f"{split}:{seed}"), Counts(), []
    for number in range(scenes if limit is None else min(limit, scenes)):
        scene = ledger(rng, names, num_documents, entries, 1)
        (asked,) = scene.questions
        name = f"{split}:{seed}:{number}"
        documents = tuple(map(Document, scene.documents))
        examples.append(Example(documents, asked.query, asked.answer.strip(), id=name, group=name))
    counts.read = len(examples)
    return Dataset(tuple(examples), counts, "ledger")
