"""Questions with right answers and methods in, one comparable table out.

`run.evaluate` answers in batches and scores, which training and the demo do. `compare.compare` asks several methods
question by question and holds them against full recompute, on the sets that `sets.read_sets` finds in a file, with a
`journal` to go on from and a `summary` at the end. `metrics` are functions of texts. `table`, `plot` and `record`
(JSON) know rows by the names of their columns, and are all that benchmarks of other things need.
"""

from __future__ import annotations

from comb.documents.datasets import Counts, Dataset, DatasetReader, datasets, read_dataset
from comb.evaluation.metrics import Scores, exact_match, f1, normalize_answer, rouge_l, score

__all__ = [
    "Counts",
    "Dataset",
    "DatasetReader",
    "Scores",
    "datasets",
    "exact_match",
    "f1",
    "normalize_answer",
    "read_dataset",
    "rouge_l",
    "score",
]
