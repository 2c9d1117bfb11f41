"""`comb bench kernels`: Triton's kernels, and attention of recomputed tokens, on a GPU: checked, then timed.

Cases are data: those of `MAC_CHECKS` and `PAGED_CHECKS` are compared, those of `MAC_TIMES` and `PAGED_TIMES` compared
and timed; nothing is timed if a comparison fails, or wouldn't notice answers that are wrong on purpose. What is timed
is captured in a CUDA graph, as in a serving engine's decode, behind an overwritten cache: in a model, another layer's
keys come in between. Keys are noise: times are measured, never fidelity.
`scripts/bench-gpu` runs it where comb isn't installed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Annotated

import typer

from comb.bench.harness import BenchmarkReport, OutOptions, benchmark
from comb.evaluation.table import Column, Row, TextTable, Timing, fixed


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
    from comb.bench.work.kernel_runs import measure_part

    measure_part(options.part, options.device, report, tiny=options.tiny)
