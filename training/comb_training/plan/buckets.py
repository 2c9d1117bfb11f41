"""The batches of an epoch by their length, as a plan shows them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comb_training.data.batches import TrainingExample
from comb_training.trainer.sampler import BatchSampler, row_length


def bucket_rows(sampler: BatchSampler, examples: Sequence[TrainingExample], buckets: int = 6) -> list[dict[str, Any]]:
    """The first epoch's batches by length of the longest row, for a table: batches, rows, tokens and padding."""
    batches = sorted(sampler.batches(0), key=lambda batch: max(row_length(examples[index]) for index in batch))
    size = -(-len(batches) // buckets)
    rows = []
    for start in range(0, len(batches), size):
        part = batches[start : start + size]
        lengths = [[row_length(examples[index]) for index in batch] for batch in part]
        padded = sum(len(batch) * max(batch) for batch in lengths)
        documents = [
            sum(map(len, {segment for index in batch for segment in examples[index].segments})) for batch in part
        ]
        rows.append(
            {
                "longest_row": (max(lengths[0]), max(lengths[-1])),
                "batches": len(part),
                "rows": sum(map(len, part)) / len(part),
                "document_tokens": (min(documents), max(documents)),
                "query_tokens": padded / len(part),
                "padding": 1 - sum(map(sum, lengths)) / padded,
            }
        )
    return rows
