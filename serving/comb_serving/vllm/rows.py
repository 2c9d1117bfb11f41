"""Which rows of a step's batch belong to which request, and where that request's documents lie in the pool."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from comb_serving.handles import KEY, unpack
from comb_serving.pool import SharedPool


@dataclass(frozen=True)
class Row:
    """One request's tokens in this step's batch, ``start .. stop - 1``, and its documents' slots [tokens] int64."""

    start: int
    stop: int
    slots: Tensor


@dataclass(frozen=True)
class Step:
    """The rows of one forward pass that have documents; without any, cross blocks do nothing."""

    rows: tuple[Row, ...] = ()

    @cached_property
    def tokens(self) -> Tensor:
        """Places in the batch of all tokens that have documents, row behind row. [tokens] int64"""
        return torch.cat([torch.arange(row.start, row.stop) for row in self.rows])


@dataclass
class Documents:
    """Documents of the requests that this worker knows, by request id: batch positions are reused, ids are not.

    Shared by all cross blocks of a model. Whoever knows the batch (`worker.RunnerRows`, `state.CombModelState`)
    calls `begin` in front of each forward pass.

    Attributes:
        pool: where documents lie; None when the instance has none, and then no request has documents.
        step: the forward pass that is running.
    """

    pool: SharedPool | None = None
    step: Step = field(default_factory=Step)
    _slots: dict[str, Tensor] = field(default_factory=dict)
    _numbers: dict[str, Sequence[int]] = field(default_factory=dict)

    def add(self, request_id: str, extra_args: Mapping[str, Any] | None) -> None:
        """Looks up a request's documents; the same list under the same id again costs nothing.

        Raises:
            ValueError: for handles that `admission` would have refused.
        """
        numbers = (extra_args or {}).get(KEY)
        if not numbers:
            self.remove(request_id)
            return
        if self._numbers.get(request_id) is numbers:
            return
        if self.pool is None:
            raise ValueError(f"request {request_id} has documents, but this instance has no pool for them")
        layout = self.pool.layout
        handles = unpack(numbers, num_blocks=layout.num_blocks, block_size=layout.block_size)
        self._slots[request_id] = torch.cat([self.pool.slots(handle) for handle in handles])
        self._numbers[request_id] = numbers

    def remove(self, request_id: str) -> None:
        """Forgets a request; one that isn't known is no error."""
        self._slots.pop(request_id, None)
        self._numbers.pop(request_id, None)

    def keep(self, request_ids: Sequence[str]) -> None:
        """Forgets all other requests."""
        for gone in self._slots.keys() - set(request_ids):
            self.remove(gone)

    def begin(self, request_ids: Sequence[str], starts: Sequence[int]) -> None:
        """Sets the step: request i's tokens are ``starts[i] .. starts[i + 1] - 1`` of the batch."""
        self.step = Step(
            tuple(
                Row(int(starts[index]), int(starts[index + 1]), self._slots[name])
                for index, name in enumerate(request_ids)
                if name in self._slots and starts[index + 1] > starts[index]
            )
        )

    def begin_without(self) -> None:
        """Sets a step without documents: profiling, warm-up, graph capture."""
        self.step = Step()
