"""Which blocks of the pool are free."""

from __future__ import annotations

from collections.abc import Sequence


class BlockAllocator:
    """Blocks 0 to num_blocks - 1. Any free block serves any document, so there is no fragmentation."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._taken: set[int] = set()

    @property
    def free(self) -> int:
        """How many blocks are free."""
        return len(self._free)

    @property
    def taken(self) -> frozenset[int]:
        """Blocks that have been allocated."""
        return frozenset(self._taken)

    def allocate(self, count: int) -> tuple[int, ...]:
        """So many free blocks. Raises ValueError if there are fewer: look at `free` first."""
        if count > len(self._free):
            raise ValueError(f"{count} blocks wanted, {len(self._free)} of {self.num_blocks} are free")
        blocks = tuple(self._free.pop() for _ in range(count))
        self._taken.update(blocks)
        return blocks

    def release(self, blocks: Sequence[int]) -> None:
        """Gives blocks back. Raises ValueError for one that isn't taken."""
        for block in blocks:
            if block not in self._taken:
                raise ValueError(f"block {block} is given back, but nobody has it")
            self._taken.remove(block)
            self._free.append(block)
