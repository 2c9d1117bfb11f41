"""Calls of the kernels of joint attention as data, for `comb bench kernels`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from comb.bench.work.kernel_cases import KernelCall, PagedCase, relative_error
from comb.kernels.joint.attention import join_, join_plain_, own_masses
from comb.kernels.joint.batch import JointBatch, OwnKeys, ReadingRun
from comb.kernels.paged.attention import attend_plain, attend_row
from comb.kernels.paged.layout import BlockTable


@dataclass(frozen=True)
class JointKernelCase(PagedCase):
    """One layer's joint attention of a step: each row's tokens read its documents one by one, where each stands in the
    prompt, beside `own` tokens of the row in front of them and those in front of each in the step."""

    own: int = 100

    def make(self, device: torch.device) -> KernelCall:
        """The kernels against the plain way. What vLLM's attention gives is there already and isn't timed."""
        draw = torch.Generator(device).manual_seed(0)
        layer, tables = self.stored(device, draw)
        batch = self._batch(tables, device)
        shape = self.rows * self.queries, self.heads, self.width
        query = torch.randn(shape, generator=draw, device=device, dtype=self.dtype)
        own, attended = self._own(query, draw)
        frequencies = 10_000.0 ** -torch.linspace(0, 1, self.width // 2, device=device)

        def turning(places: Tensor) -> tuple[Tensor, Tensor]:
            angles = (places[..., None].float() * frequencies).repeat(1, 1, 2)
            return angles.cos(), angles.sin()

        def kernel() -> Tensor:
            output = attended.clone()
            join_(output, query, layer, own, batch, turning)
            return output

        def plain(
            query: Tensor = query, turned: Callable[[Tensor], tuple[Tensor, Tensor]] = turning, more: float = 0.0
        ) -> Tensor:
            output, each = attended.to(query), self._batch(tables, device)
            mass = torch.empty(len(each.readers), self.heads, dtype=torch.float32, device=device)
            read = attend_plain(query, layer, each.batch, mass=mass, turned=each.turned(turned, 1.0))
            join_plain_(output, own_masses(query, own, each) + more, read, mass, each)
            return output

        error = partial(relative_error, wanted=plain(query.double()))
        wrong = {
            "queries that aren't turned": lambda: plain(turned=lambda places: turning(0 * places)),
            "own tokens a tenth too light": lambda: plain(more=-0.1),
            "another row's answer": lambda: plain().roll(1, 0),
        }
        nbytes = self.nbytes + own.table.numel() * self.block * self.groups * self.width * self.dtype.itemsize
        return KernelCall(kernel, kernel, plain, error, plain, error, wrong, {}, self.bound, nbytes)

    def _batch(self, tables: tuple[BlockTable, ...], device: torch.device) -> JointBatch:
        runs = []
        for row, table in enumerate(tables):
            blocks = table.last.reshape(self.documents, -1) // self.block
            each = tuple(BlockTable([(self.tokens, one.tolist())], self.block) for one in blocks)
            starts = 10 + self.tokens * np.arange(self.documents)
            nobody = np.zeros(self.documents, dtype=np.int64)
            runs.append(ReadingRun(row * self.queries, self.queries, row, self.own, nobody, starts, each))
        return JointBatch(runs, device)

    def _own(self, query: Tensor, draw: torch.Generator) -> tuple[OwnKeys, Tensor]:
        """Keys of the rows' own tokens in shuffled blocks, and attention to them."""
        count = -(-(self.own + self.queries) // self.block)
        table = torch.randperm(self.rows * count, device=query.device).view(self.rows, count).int()
        shape = 2, self.rows * count, self.block, self.groups, self.width
        keys, values = torch.randn(shape, generator=draw, device=query.device, dtype=self.dtype)
        attended = torch.empty_like(query)
        for row in range(self.rows):
            own = [part[table[row].long()].flatten(0, 1) for part in (keys, values)]
            for number in range(self.queries):
                at = slice(row * self.queries + number, row * self.queries + number + 1)
                attended[at] = attend_row(query[at], *(part[: self.own + number + 1] for part in own))

        def read(slots: Tensor) -> Tensor:
            found: Tensor = keys[slots // self.block, slots % self.block]
            return found

        return OwnKeys(table, self.block, keys, read), attended
