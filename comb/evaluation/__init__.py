"""Datasets in, one comparable table out: readers, metrics, the evaluation loop, tables and plots."""

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
