"""Requests whose tokens read documents beside their own keys, for the tests of joint attention; the rest is NaN."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from comb.kernels.joint.batch import OwnKeys, ReadingRun
from comb.kernels.paged.layout import BlockTable, PagedLayer

SIZE, PAGE = 4, 8
"""Slots of a block of documents, and of a request's own tokens."""
ROTARY = 6
"""Channels that turn."""


def turning(places: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of places [rows, N], each [rows, N, ROTARY]."""
    angles = places[..., None].float() * torch.tensor([1.0, 0.3, 0.01])
    angles = torch.cat((angles, angles), -1)
    return angles.cos(), angles.sin()


def turn(x: Tensor, place: float) -> Tensor:
    """A vector [D] turned by a place, in float64: pair by pair."""
    out = x.double().clone()
    half = ROTARY // 2
    for one, frequency in enumerate((1.0, 0.3, 0.01)):
        angle = torch.tensor(place * frequency, dtype=torch.float64)
        first, second = x[one].double(), x[one + half].double()
        out[one] = first * angle.cos() - second * angle.sin()
        out[one + half] = second * angle.cos() + first * angle.sin()
    return out


@dataclass
class JointCase:
    """A step: queries and keys [T, H or G, D] of its tokens, what attention to own tokens gave, documents."""

    query: Tensor
    output: Tensor
    layer: PagedLayer
    own: OwnKeys
    own_values: Tensor
    runs: list[ReadingRun]
    scale: float

    def expected(self) -> Tensor:
        """float64, token by token and head by head: one softmax over own keys and all documents that are read."""
        found = self.output.double().clone()
        shared = self.query.shape[1] // self.layer.keys.shape[1]
        for run in self.runs:
            for number in range(run.count):
                place = run.past + number
                low = 0 if self.own.window is None else max(0, place + 1 - self.own.window)
                slots = self.slots(run.row, torch.arange(low, place + 1))
                for head in range(self.query.shape[1]):
                    query, group = self.query[run.token + number, head], head // shared
                    scores = [self.own.read(slots)[:, group].double() @ query.double()]
                    values = [self.own_values[slots][:, group].double()]
                    for skipped, start, table in zip(run.skipped, run.starts, run.tables, strict=True):
                        if number < skipped:
                            continue
                        asked = turn(query, -float(start))
                        scores.append(self.layer.keys[table.slots()][:, group].double() @ asked)
                        values.append(self.layer.values[table.slots()][:, group].double())
                    scores_of = torch.cat(scores) * self.scale * query.shape[-1] ** -0.5
                    found[run.token + number, head] = scores_of.softmax(0) @ torch.cat(values)
        return found

    def slots(self, row: int, places: Tensor) -> Tensor:
        """Of a request's own tokens."""
        return self.own.table[row][places // PAGE].long() * PAGE + places % PAGE


def joint_case(
    dtype: torch.dtype, *, heads: int = 6, groups: int = 2, width: int = 10, window: int | None = None,
    scale: float = 0.7, scattered: bool = True, seed: int = 0,
) -> JointCase:  # fmt: skip
    """One that decodes behind two documents, a chunk some of whose tokens stand in front of one, one without documents,
    and one with many own tokens that reads nine times."""
    draw = torch.Generator().manual_seed(seed)
    lengths = {"a": 5, "b": 9, "c": 1, "d": 23}
    blocks = torch.randperm(40, generator=draw).tolist()
    tables = {
        name: BlockTable([(tokens, [blocks.pop() for _ in range(-(-tokens // SIZE))])], SIZE)
        for name, tokens in lengths.items()
    }
    pool = torch.full((2, 40 * SIZE, groups, width), float("nan"))
    filled = torch.cat([table.slots() for table in tables.values()])
    pool[:, filled] = torch.randn(2, len(filled), groups, width, generator=draw)

    def run(token: int, count: int, row: int, past: int, *documents: tuple[str, int, int]) -> ReadingRun:
        names, skipped, starts = zip(*documents, strict=True)
        return ReadingRun(
            token, count, row, past, np.array(skipped), np.array(starts), tuple(tables[name] for name in names)
        )

    runs = [
        run(1, 1, 0, 11, ("a", 0, 2), ("b", 0, 40)),
        run(2, 7, 1, 3, ("d", 0, 3), ("a", 4, 30)),
        run(10, 2, 3, 70, *[("abcd"[n % 4], 0, 7 * n) for n in range(9)]),
    ]
    rows, pages = 4, 10
    table = torch.randperm(rows * pages, generator=draw).view(rows, pages).int()
    # heads in front of tokens, or the other way round
    kept = torch.full((2, rows * pages, groups, PAGE, width), float("nan"))
    kept = kept.transpose(2, 3) if scattered else kept.transpose(2, 3).contiguous()
    for each in runs:
        at = torch.arange(each.past + each.count)
        kept[:, table[each.row][at // PAGE].long(), at % PAGE] = torch.randn(2, len(at), groups, width, generator=draw)
    keys, values = kept.to(dtype), kept[1].reshape(-1, groups, width).to(dtype)
    # [blocks, PAGE, G, D]: as the cache lies there
    own_keys = keys[0]

    def read(view: Tensor, slots: Tensor) -> Tensor:
        return view[slots // PAGE, slots % PAGE]

    own = OwnKeys(table, PAGE, own_keys, partial(read, own_keys), window)
    query = torch.randn(12, heads, width, generator=draw).to(dtype)
    case = JointCase(query, torch.zeros_like(query), PagedLayer(*pool.to(dtype), SIZE), own, values, runs, scale)
    for each in runs:  # what attention to own tokens gives
        for number in range(each.count):
            place = each.past + number
            low = 0 if window is None else max(0, place + 1 - window)
            slots = case.slots(each.row, torch.arange(low, place + 1))
            for head in range(heads):
                group = head // (heads // groups)
                scores = own.read(slots)[:, group].double() @ query[each.token + number, head].double()
                weights = (scores * scale * width**-0.5).softmax(0)
                case.output[each.token + number, head] = (weights @ values[slots][:, group].double()).to(dtype)
    case.output[[0, 9]] = torch.randn(2, heads, width, generator=draw).to(dtype)  # rows that read nothing
    return case
