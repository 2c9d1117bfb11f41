"""The frame of benchmarks on a GPU: on which device, for how long, what was left out, and times as an engine sees them.

A call is captured in a CUDA graph where it can be (so no launch waits for Python, as in a serving engine's decode), and
the device's cache is overwritten before each replay: in a model, another layer's keys come in between.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import triton
import typer

from comb.bench.harness import BenchmarkReport, OutOptions
from comb.evaluation.run import Timing
from comb.kernels.interpreter import INTERPRETED


@dataclass(frozen=True)
class GpuOptions(OutOptions):
    """What these benchmarks share."""

    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu with TRITON_INTERPRET=1")] = "cuda"
    tiny: Annotated[bool, typer.Option("--tiny", help="a few small sizes, to see that everything runs")] = False
    seconds: Annotated[float, typer.Option(help="after which nothing further is begun")] = 400.0


class GpuRun:
    """A benchmark under way; what isn't measured, and why, goes into the report.

    Raises:
        ValueError: where no kernel can run.
    """

    def __init__(self, options: GpuOptions, report: BenchmarkReport) -> None:
        self.report, self.limit_s, self.device = report, options.seconds, torch.device(options.device)
        self.left_out: dict[str, str] = {}
        if self.device.type == "cuda":
            self.device = torch.device("cuda", self.device.index or 0)
            torch.cuda.set_device(self.device)  # streams, free memory and single launches are the current device's
        elif not INTERPRETED:
            raise ValueError(f"the kernels run on {self.device.type} only interpreted: set TRITON_INTERPRET=1")
        on_gpu = self.device.type == "cuda"
        name = torch.cuda.get_device_name(self.device) if on_gpu else "cpu, interpreted: times mean nothing"
        report.facts |= {"device": name, "left_out": self.left_out}
        report.heading = name

    def late(self, what: str) -> bool:
        """Whether time is up; what is therefore not measured is noted."""
        if self.report.elapsed() < self.limit_s:
            return False
        self.left_out[what] = f"time is up after {self.limit_s:.0f} s"
        return True

    @contextmanager
    def or_left_out(self, what: object) -> Iterator[None]:
        """Notes what can't be done here, and why: backends and compilers fail with any kind of error."""
        try:
            yield
        except Exception as error:
            self.left_out[str(what)] = f"{type(error).__name__}: {str(error)[:200]}"

    def finish(self) -> None:
        """Says what was left out."""
        self.report.facts["elapsed_s"] = self.report.elapsed()
        for what, why in self.left_out.items():
            self.report.say(f"left out: {what}: {why}")

    def time(self, call: Callable[[], object], *, graph: bool = True) -> Timing:
        """Seconds of `call`, which must not depend on what it changes; on a CPU they show that it runs, nothing else.

        Raises:
            RuntimeError: where it can't be captured, which a call that waits for the device can't; `graph` False
                times it as it is.
        """
        if self.device.type != "cuda":
            start = time.perf_counter()
            call()
            return Timing.over([time.perf_counter() - start])
        run = _captured(call) if graph else call
        found: Any = triton.testing.do_bench(run, warmup=5, rep=50, return_mode="all")
        return Timing.over([milliseconds / 1000 for milliseconds in found])


def _captured(call: Callable[[], object]) -> Callable[[], None]:
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # compiles, and fills the allocator
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay
