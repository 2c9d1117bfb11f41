"""Documents as `CombForCausalLM` is given them: checked, and cut into batches for the encoder."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

from torch import Tensor

from comb.cache.picache import CrossPICache

T = TypeVar("T")

Segment = Sequence[int] | Tensor
Documents = Sequence[Sequence[CrossPICache | Segment]]


def checked_rows(documents: Documents | None) -> list[list[CrossPICache | Segment]]:
    """Checks the nesting of `documents`: a list per row, of PICaches or token ids."""
    if documents is None:
        return []
    wanted = "documents takes one list per row, each of PICaches (from model.encode) or of token-id lists"
    if isinstance(documents, CrossPICache | str | Tensor):
        raise ValueError(f"{wanted}; got a single {type(documents).__name__}: write documents=[[...]]")
    for row in documents:
        if not isinstance(row, list | tuple):
            raise ValueError(f"{wanted}; got a row that is a {type(row).__name__}: write documents=[[...]]")
    return [list(row) for row in documents]


def check_rows(documents: Documents | None, *inputs: Tensor | None) -> None:
    """Raises ValueError if there aren't as many lists of documents as rows in the first of `inputs` that is given."""
    given = next((tensor for tensor in inputs if tensor is not None), None)
    if documents is not None and given is not None and len(checked_rows(documents)) != given.shape[0]:
        raise ValueError(
            f"documents has {len(documents)} lists for {given.shape[0]} rows of input_ids: "
            "give one list (possibly empty) per row"
        )


def token_ids_of(segment: Segment) -> tuple[int, ...]:
    """Token ids as a tuple. Raises ValueError for anything but a flat sequence of integers."""
    ids: Any = segment.tolist() if isinstance(segment, Tensor) else segment
    if isinstance(ids, str) or not isinstance(ids, Sequence) or not all(isinstance(token, int) for token in ids):
        raise ValueError(
            f"a segment is a flat list of token ids, not {type(segment).__name__} {str(segment)[:40]!r}: tokenise "
            "text first, or use PICEngine"
        )
    return tuple(ids)


def padded_batches(rows: Sequence[T], budget: int, length: Callable[[T], int] = len) -> Iterator[list[T]]:  # type: ignore[assignment]  # of segments
    """Runs of segments, or other rows with a length (sorted by it), whose padded size stays under `budget` tokens."""
    batch: list[T] = []
    for row in rows:
        if batch and (len(batch) + 1) * length(row) > budget:
            yield batch
            batch = []
        batch.append(row)
    if batch:
        yield batch


def equal_parts(segments: list[tuple[int, ...]], parts: int) -> list[list[tuple[int, ...]]]:
    """Segments (sorted by length) in so many runs of about as many tokens each, none empty."""
    cuts: list[int] = []
    total, done = sum(map(len, segments)), 0
    for place, segment in enumerate(segments):
        left = parts - 1 - len(cuts)
        # cut where a share of the tokens is full, and in time for the rest to be one each
        if place and left and (done >= total * (len(cuts) + 1) / parts or len(segments) - place == left):
            cuts.append(place)
        done += len(segment)
    return [segments[start:end] for start, end in zip([0, *cuts], [*cuts, len(segments)], strict=True)]
