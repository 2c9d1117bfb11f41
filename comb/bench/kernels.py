"""`comb bench kernels`: Triton's kernels, and attention of recomputed tokens, on a GPU: checked, then timed.

Cases are data (`comb.bench.work.kernel_cases`): some are compared, others compared and timed; nothing is timed if a
comparison fails, or wouldn't notice answers that are wrong on purpose. What is timed is captured in a CUDA graph, as in
a serving engine's decode, behind an overwritten cache: in a model, another layer's keys come in between. Keys are
noise: times are measured, never fidelity. `scripts/bench-gpu` runs it where comb isn't installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Annotated

import typer

from comb.bench.harness import BenchmarkReport, OutOptions, benchmark, or_refused
from comb.evaluation.table import Column, Row, TextTable, Timing, fixed

if TYPE_CHECKING:
    import torch

    from comb.bench.work.kernel_cases import MacCase, PagedCase


@dataclass(frozen=True)
class GpuOptions(OutOptions):
    """Of `comb bench kernels`."""

    part: Annotated[str, typer.Option(help="paged, mac, or seams: recomputed tokens")] = "paged"
    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu with TRITON_INTERPRET=1")] = "cuda"
    tiny: Annotated[bool, typer.Option("--tiny", help="a few small sizes, to see that everything runs")] = False


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """The comparisons, then the times."""

    def us(timing: Timing) -> str:
        return f"{1e6 * timing.median:.0f}"

    def rate(bytes_per_s: float) -> str:
        return f"{bytes_per_s / 1e9:.4g}"

    case = Column("case", "case", names=True)
    times = (
        case, Column("kernel us", "kernel_s", us), Column("rival us", "rival_s", us),
        Column("rival/kernel", "speedup", fixed(2)),
        Column("GB/s", "bytes_per_s", rate, "keys and values that it must read, each once"),
        Column("rival GB/s", "rival_bytes_per_s", rate),
    )  # fmt: skip
    errors = {"error": "kernel", "rival_error": "rival", "bound": "bound", "least_wrong": "a wrong one, at least"}
    checks = (case, *(Column(title, name, "{:.2g}".format) for name, title in errors.items()))
    timed = [row for row in rows if "kernel_s" in row]
    found = [TextTable("Relative errors, of vectors, against the plain way", checks, rows)]
    return [*found, TextTable("One layer's attention of a step", times, timed)]


@benchmark("kernels", tables)
def kernels(options: GpuOptions, report: BenchmarkReport) -> None:
    """The kernels on a GPU: checked, then timed beside the plain way (of MAC, torch's exact attention) and a copy."""
    if find_spec("triton") is None:
        raise ValueError("the kernels are Triton's, which isn't installed here: pip install triton, on Linux")
    import torch

    from comb.bench.work import seams
    from comb.bench.work.kernel_cases import CASES, TINY_CASES, seconds_of
    from comb.kernels.launch import INTERPRETED

    device = torch.device(options.device)
    if options.part == "seams":
        report.tables = seams.tables
        seams.measure(device, report, tiny=options.tiny)
        return
    if options.part not in CASES:
        raise ValueError(f"--part is paged, mac or seams, not {options.part!r}")
    checks, timed = (TINY_CASES if options.tiny else CASES)[options.part]
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif not INTERPRETED:
        raise ValueError(f"the kernels run on {device.type} only interpreted: set TRITON_INTERPRET=1")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted: times mean nothing"
    # by a kernel: a copy of a graph's own reaches two thirds of it on an H200
    source, target = torch.ones(2, 2**28 if device.type == "cuda" else 2**14, device=device)
    copied = 2 * source.nbytes / seconds_of(partial(torch.neg, source, out=target), device).median
    report.facts |= {"device": name, "copy_bytes_per_s": copied}
    report.heading = f"{name}; a device copy reads and writes {copied / 1e9:.4g} GB/s"
    del source, target
    with torch.inference_mode():
        for some, clock in ((checks, False), (timed, True)):
            for case in some:
                report.add(_checked(case, device, timed=clock))
            # sizes that are timed are checked, too: a fault may show only there
            if wrong := [f"{row['case']}: {row['fault']}" for row in report.rows if "fault" in row]:
                raise RuntimeError(f"kernels differ from the plain way and aren't timed: {'; '.join(wrong)}")


def _checked(case: MacCase | PagedCase, device: torch.device, *, timed: bool) -> Row:
    from comb.bench.work.kernel_cases import label, seconds_of

    row: Row = {"case": label(case)}
    with or_refused(row):
        call = case.make(device)
        errors, fault = call.fault()
        row |= {**errors, "bound": call.bound, **({"fault": fault} if fault else {})}
        if timed and not fault:
            own, other = (seconds_of(run, device) for run in (call.kernel, call.rival))
            row |= {
                "kernel_s": own, "bytes_per_s": call.nbytes / own.median, "speedup": other.median / own.median,
                "rival_s": other, "rival_bytes_per_s": call.rival_nbytes / other.median,
            }  # fmt: skip
    return row
