"""The batches of an epoch by their length, as a plan shows them."""

from __future__ import annotations

from collections.abc import Sequence

from comb_training.data.batches import TrainingExample
from comb_training.trainer.sampler import BatchSampler, row_length


def bucket_rows(sampler: BatchSampler, examples: Sequence[TrainingExample], buckets: int = 6) -> list[dict[str, str]]:
    """The first epoch's batches by length of the longest row, in rows of a table."""
    batches = [[examples[index] for index in indices] for indices in sampler.batches(0)]
    batches.sort(key=lambda batch: max(map(row_length, batch)))
    size = -(-len(batches) // buckets)
    rows = []
    for part in (batches[start : start + size] for start in range(0, len(batches), size)):
        lengths = [list(map(row_length, batch)) for batch in part]
        padded = sum(len(batch) * max(batch) for batch in lengths)
        documents = [sum(map(len, {s for example in batch for s in example.segments})) for batch in part]
        rows.append(
            {
                "longest row": f"{max(lengths[0])} to {max(lengths[-1])}",
                "batches": str(len(part)),
                "rows": f"{sum(map(len, part)) / len(part):.1f}",
                "document tokens": f"{min(documents)} to {max(documents)}",
                "query tokens": f"{padded / len(part):.0f}",
                "padding": f"{100 - 100 * sum(map(sum, lengths)) / padded:.1f}%",
            }
        )
    return rows
