"""Where documents lie in the pool, and how a request's `Capability` writes that down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PoolHandle:
    """One document in the pool: its length, and the blocks that hold it, the last one perhaps in part."""

    tokens: int
    blocks: tuple[int, ...]


def pack(handles: Sequence[PoolHandle]) -> list[int]:
    """``[tokens, blocks, block, block, ..., tokens, ...]``."""
    return [number for handle in handles for number in (handle.tokens, len(handle.blocks), *handle.blocks)]


def token_counts(numbers: Sequence[int]) -> list[int]:
    """How many tokens each document of `pack` has; of numbers that `unpack` takes."""
    counts, at = [], 0
    while at < len(numbers):
        counts.append(numbers[at])
        at += 2 + numbers[at + 1]
    return counts


def unpack(numbers: Sequence[int], *, num_blocks: int, block_size: int, more: int = 0) -> list[PoolHandle]:
    """The handles of `pack`.

    Args:
        more: what is kept of every document behind its tokens takes as much room as so many tokens.

    Raises:
        ValueError: for anything that isn't such a list, or names blocks or lengths that don't fit the pool.
    """
    handles, at = [], 0
    while at < len(numbers):
        tokens, count = [*numbers[at : at + 2], -1][:2]
        blocks = tuple(numbers[at + 2 : at + 2 + count]) if count > 0 else ()
        if tokens < 1 or count != -(-(tokens + more) // block_size) or len(blocks) != count:
            raise ValueError(
                f"documents: {tokens} tokens in {count} blocks of {block_size} at place {at} of {len(numbers)}"
            )
        if not all(0 <= block < num_blocks for block in blocks):
            raise ValueError(f"documents: blocks {blocks[:4]} at place {at}, but the pool has {num_blocks}")
        handles.append(PoolHandle(tokens, blocks))
        at += 2 + count
    return handles
