"""`comb bench tiers`: a document between host memory and a GPU, in one copy of pinned memory and tensor by tensor.

What the store does (`comb.cache.transfer`) beside what ``Tensor.to`` does with ordinary memory, in turns. On a CPU
there is nothing to copy: there it shows that it runs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated

import torch
import typer
from torch import Tensor

from comb.bench.harness import BenchmarkReport, benchmark, in_turns, ratios
from comb.bench.options import DeviceOptions, Repeats
from comb.bench.work import synchronize
from comb.cache.transfer import moved
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, fixed, mebibytes, ms, spread


@dataclass(frozen=True)
class TierOptions(DeviceOptions):
    """Of `comb bench tiers`: a document of an 8B model, unless told otherwise."""

    tokens: Annotated[int, typer.Option(min=1, help="of the document")] = 512
    layers: Annotated[int, typer.Option(min=1, help="that keep keys and values of it")] = 36
    kv_heads: Annotated[int, typer.Option(min=1, help="of each layer")] = 8
    head_dim: Annotated[int, typer.Option(min=1, help="of each head")] = 128
    repeats: Repeats = 10


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """Times of both ways, to the device and back."""
    columns = (
        Column("way", "way", names=True), Column("MiB", "nbytes", mebibytes), Column("one copy ms", "own_s", ms),
        Column("by tensor ms", "plain_s", ms), Column("by tensor/one copy", "speedup", spread, "in the same repeat"),
        Column("GB/s", "bytes_per_s", fixed(1), "of the one copy"),
    )  # fmt: skip
    return [TextTable("A document between tiers", columns, rows)]


@benchmark("tiers", tables)
def tiers(options: TierOptions, report: BenchmarkReport) -> None:
    """A document's way between host memory and a GPU: one copy of pinned memory, against a copy for each tensor."""
    dtype, name = options.place()
    device, host = torch.device(name), torch.device("cpu")
    shape = options.kv_heads, options.tokens, options.head_dim
    kept = {f"{what}.{layer}": torch.randn(shape).to(dtype) for layer in range(options.layers) for what in "kv"}
    there = moved(kept, device)
    back = moved(there, host)
    if not all(torch.equal(back[name], tensor) for name, tensor in kept.items()):
        raise RuntimeError("a document came back from the device as another one: nothing is timed")
    report.facts |= {"device": str(device), "dtype": str(dtype)}
    report.heading = f"{len(kept)} tensors of {list(shape)}, {dtype}, {device}"
    nbytes = sum(tensor.nbytes for tensor in kept.values())
    pinned = moved(there, host)  # as the store keeps it
    for way, sources, target in (("up", (pinned, kept), device), ("down", (there, there), host)):
        calls: dict[str, Callable[[], float]] = {
            "own": partial(_seconds, partial(moved, sources[0], target), device),
            "plain": partial(_seconds, partial(_by_tensor, sources[1], target), device),
        }
        for call in calls.values():
            call()
        found = in_turns(calls, options.repeats)
        own, plain = found["own"], found["plain"]
        report.add(
            {
                "way": way, "nbytes": nbytes, "own_s": Timing.of(own), "plain_s": Timing.of(plain),
                "speedup": ratios(plain, own), "bytes_per_s": nbytes / sorted(own)[len(own) // 2] / 1e9,
            }
        )  # fmt: skip


def _by_tensor(tensors: Mapping[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    return {name: tensor.to(device) for name, tensor in tensors.items()}


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    synchronize(device)
    return time.perf_counter() - start
