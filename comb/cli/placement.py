"""What `comb info --placement` shows: through which layers a backbone reads documents, measured on a dataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from comb.documents.datasets import read_dataset
from comb.documents.document import PromptBuilder
from comb.evaluation.placement import Placement, measure_placement, short_prompts
from comb.evaluation.table import FittedTable

EXAMPLES = 512
BAR = 40


def describe_placement(backbone: Any, tokenizer: Any, dataset: str, path: Path | None, count: int) -> FittedTable:
    """The measured losses as bars, and the layers that `count` cross blocks belong in front of.

    Raises:
        ValueError: as `read_dataset` and `measure_placement` do.
    """
    builder = PromptBuilder(tokenizer)
    examples = read_dataset(dataset, path, split="train", limit=EXAMPLES)
    prompts = [
        (builder.build(example.query, list(map(builder.segment, example.documents))), builder.answer(example.answer))
        for example in examples
        if example.documents
    ]
    chosen = short_prompts(prompts)
    return placement_table(measure_placement(backbone, chosen), count, f"{len(chosen)} questions of {dataset}")


def placement_table(placement: Placement, count: int, measured_on: str) -> FittedTable:
    """Layer, nats per answer token that are lost when documents are hidden there, and a bar."""
    best = placement.best(min(count, len(placement.losses)))
    most = max(max(placement.losses.values()), 1e-9)
    lines = []
    for layer, loss in placement.losses.items():
        bar = "\u2588" * round(BAR * max(loss, 0.0) / most)
        lines.append((f"{layer}", f"{loss:.3f}", f"{bar}{' *' if layer in best else ''}"))
    caption = f"all layers together: {placement.without:.3f}\nmodel.cross_attention_layers={best}"
    title = f"where documents are read ({measured_on})"
    return FittedTable(("layer", "nats lost without", ""), lines, title, caption, left=("",))
