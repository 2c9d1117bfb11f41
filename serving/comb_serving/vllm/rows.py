"""Which rows of a step's batch belong to which request, and where that request's documents lie in the pool."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from comb.kernels.paged.attention import BlockTable, PagedBatch
from comb.kernels.paged.plan import to_device
from comb.waits import on_device
from comb_serving.pool.capability import Capability, unpack
from comb_serving.pool.shared_pool import SharedPool


@dataclass(frozen=True)
class RequestRows:
    """One request's tokens in this step's batch, ``start .. stop - 1``, and the blocks of its documents."""

    start: int
    stop: int
    table: BlockTable


@dataclass(frozen=True)
class StepDocuments:
    """The rows of one forward pass that have documents; without any, cross blocks do nothing.

    Attributes:
        dummy: a pass of vLLM's own, such as one that graphs are captured in.
    """

    rows: tuple[RequestRows, ...] = ()
    dummy: bool = False
    _tokens: dict[torch.device, Tensor] = field(default_factory=dict, compare=False, repr=False)

    @cached_property
    def batch(self) -> PagedBatch:
        """The same as attention takes it; what it works out from that is kept for all cross layers."""
        return PagedBatch(tuple(row.stop - row.start for row in self.rows), tuple(row.table for row in self.rows))

    def tokens(self, device: torch.device) -> Tensor:
        """Places in the batch of all tokens that have documents, row behind row; copied once. [tokens] int64"""
        if device not in self._tokens:
            places = np.concatenate([np.arange(row.start, row.stop, dtype=np.int32) for row in self.rows])
            self._tokens[device] = to_device([places], device)[0].long()
        return self._tokens[device]


@dataclass
class RequestDocuments:
    """Documents of the requests that this worker knows, by request id: batch positions are reused, ids are not.

    Shared by all cross blocks of a model. Whoever knows the batch (`gpu_worker`) calls `begin` in front of each forward
    pass.

    Attributes:
        pool: where documents lie; None when the instance has none, and then no request has documents.
        verified: what a request's token says. Raises ValueError unless this instance has signed it.
        step: the forward pass that is running. blocks: of the model; mixed: those that have run in this step.
        room: [tokens, 1] bool on the model's device, where captured graphs look which tokens have documents.
        full_graphs: whether steps with documents are kept out of graphs that hold a whole step (`gpu_worker`).
    """

    verified: Callable[[object], Capability]
    pool: SharedPool | None = None
    step: StepDocuments = field(default_factory=StepDocuments)
    blocks: int = 0
    mixed: int = 0
    room: Tensor | None = None
    full_graphs: bool = False
    _written: StepDocuments | None = None
    _tables: dict[str, tuple[BlockTable, int]] = field(default_factory=dict)  # and how many first tokens read nothing
    _tokens: dict[str, object] = field(default_factory=dict)

    def add(self, request_id: str, token: object, prompt: Sequence[int] | None = None) -> None:
        """Looks up a request's documents; the same token under the same id again costs nothing.

        Args:
            token: its signed capability; None without documents.
            prompt: its token ids.

        Raises:
            ValueError: for what front and `scheduler` would have refused.
        """
        if token is None:
            self.remove(request_id)
            return
        if self._tokens.get(request_id) is token:
            return
        self.remove(request_id)
        capability = self.verified(token)
        if capability.request_id not in request_id:
            raise ValueError(f"request {request_id} brings the documents of request {capability.request_id}")
        self._tokens[request_id] = token
        if not capability.documents:
            return
        if self.pool is None:
            raise ValueError(f"request {request_id} has documents, but this instance has no pool for them")
        table = self.pool.layout.table(unpack(capability.documents, self.pool.layout))
        self._tables[request_id] = table, capability.prefix_of(prompt)

    def remove(self, request_id: str) -> None:
        """Forgets a request; one that isn't known is no error."""
        self._tables.pop(request_id, None)
        self._tokens.pop(request_id, None)

    def keep(self, request_ids: Sequence[str]) -> None:
        """Forgets all other requests."""
        for gone in self._tokens.keys() - set(request_ids):
            self.remove(gone)

    def begin(self, request_ids: Sequence[str], starts: Sequence[int], computed: Sequence[int]) -> None:
        """Sets the step: request i's tokens are ``starts[i] .. starts[i + 1] - 1`` of the batch.

        Args:
            computed: tokens of each request that are in vLLM's cache already.
        """
        self.end()
        rows = []
        for index, name in enumerate(request_ids):
            if name not in self._tables:
                continue
            table, prefix = self._tables[name]
            start, stop = int(starts[index]) + max(0, prefix - int(computed[index])), int(starts[index + 1])
            if stop > start:
                rows.append(RequestRows(start, stop, table))
        self.step = StepDocuments(tuple(rows))

    def begin_without(self) -> None:
        """Sets a step without documents: profiling, warm-up, graph capture."""
        self.end()
        self.step = StepDocuments(dummy=True)

    @property
    def known(self) -> bool:
        """Whether any request that this worker knows has documents, scheduled in this step or not."""
        return bool(self._tables)

    def readers(self, count: int) -> Tensor:
        """Which of a batch's first `count` tokens have documents, at the same address in each step. [count, 1] bool"""
        assert self.room is not None, "graphs were captured without room"
        if self._written is not self.step:
            mask = torch.zeros(self.room.shape, dtype=torch.bool)
            for row in self.step.rows:
                mask[row.start : row.stop] = True
            self.room.copy_(on_device(mask, self.room.device))
            self._written = self.step
        return self.room[:count]

    def end(self) -> None:
        """Ends the step. Raises RuntimeError if a cross block was left out, as in a graph that isn't cut there."""
        missed = self.blocks - self.mixed if self.step.rows else 0
        self.step, self.mixed = StepDocuments(), 0
        if missed:
            raise RuntimeError(
                f"{missed} of {self.blocks} cross blocks were not run: answers would lack their documents"
            )
