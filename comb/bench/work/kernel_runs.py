"""The cases of `comb bench kernels`, compared and timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from functools import partial
from typing import Any

import torch
import triton

from comb.bench.harness import BenchmarkReport, or_refused
from comb.bench.work import seams
from comb.bench.work.kernel_cases import BOUNDS, MacCase, PagedCase
from comb.evaluation.table import Row, Timing
from comb.kernels.interpreter import INTERPRETED
from comb.kernels.mac.mac_config import MacConfig

_MAC = MacConfig(window=48, band=20, tau=0.6, min_length=0, max_chain=None, max_drift=False)
_SMALL = MacCase(_MAC, 2, 150, dtype=torch.float32, heads=6, groups=2, width=10)
MAC_CHECKS = (
    _SMALL,
    replace(_SMALL, dtype=torch.bfloat16),
    replace(_SMALL, config=replace(_MAC, sink=7, max_chain=1, max_drift=True), chains=2),
    replace(_SMALL, config=replace(_MAC, ring_dtype="bfloat16"), dtype=torch.float16, hits=1.0),
    replace(_SMALL, rows=1, width=256, hits=0.0),
    MacCase(replace(_MAC, window=1024, band=256), 4, 6000),
    MacCase(replace(_MAC, window=1024, band=256), 4, 6000, hits=0.0),
)
# the paper's Fig. 6 searches 512 queries; rings in 16 bits as its release
_FIG6 = MacConfig(window=512, band=256, tau=0.8, min_length=0, ring_dtype="bfloat16")
MAC_TIMES = tuple(
    MacCase(_FIG6, rows, context, hits)
    for rows, context in ((1, 32768), (8, 32768), (32, 32768), (1, 131072), (8, 131072)) for hits in (0.0, 0.9, 1.0)
)  # fmt: skip
PAGED_CHECKS = tuple(
    PagedCase(rows, 3, 37, queries, dtype, fp8, least_keys=least)
    for dtype in BOUNDS for fp8 in (False, True) for rows, queries, least in ((4, 1, 256), (2, 37, 16))
)  # fmt: skip
PAGED_TIMES = tuple(
    PagedCase(rows, 8, tokens, queries, fp8=fp8)
    for fp8 in (False, True) for queries in (1, 256) for rows, tokens in ((1, 500), (8, 500), (8, 4000), (128, 500))
)  # fmt: skip
_TINY: dict[str, Any] = {"dtype": torch.float32, "heads": 4, "groups": 2, "width": 16}


def measure_part(part: str, device: str, report: BenchmarkReport, *, tiny: bool) -> None:
    """Raises ValueError for an unknown part."""
    if part == "seams":
        report.tables = seams.tables
        seams.measure(torch.device(device), report, seconds_of, tiny=tiny)
    elif part == "mac":
        small: list[Any] = [MacCase(replace(_MAC, window=16, band=8), 2, 96, hits, **_TINY) for hits in (0.0, 1.0)]
        measure_kernels(device, report, *((MAC_CHECKS[:4], small) if tiny else (MAC_CHECKS, MAC_TIMES)))
    elif part == "paged":
        small = [PagedCase(3, 2, 9, queries, fp8=fp8, block=4, **_TINY) for queries in (1, 5) for fp8 in (False, True)]
        measure_kernels(device, report, *((small, small) if tiny else (PAGED_CHECKS, PAGED_TIMES)))
    else:
        raise ValueError(f"--part is paged, mac or seams, not {part!r}")


def measure_kernels(
    place: str, report: BenchmarkReport, checks: Iterable[MacCase | PagedCase],
    timed: Iterable[MacCase | PagedCase],
) -> None:  # fmt: skip
    """A row per case. Raises ValueError where no kernel can run, RuntimeError if one is wrong: then none is timed."""
    device = torch.device(place)
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
        for case in checks:
            _checked(case, device, report, timed=False)
        if not (wrong := _faults(report)):
            for case in timed:
                _checked(case, device, report, timed=True)
            wrong = _faults(report)
    if wrong:
        raise RuntimeError(f"kernels differ from the plain way and aren't timed: {'; '.join(wrong)}")


def _checked(case: MacCase | PagedCase, device: torch.device, report: BenchmarkReport, *, timed: bool) -> None:
    """Adds the row of a case. Sizes that are timed are checked, too: a fault may show only there."""
    row: Row = {"case": _label(case)}
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
    report.add(row)


def _faults(report: BenchmarkReport) -> list[str]:
    return [f"{row['case']}: {row['fault']}" for row in report.rows if "fault" in row]


def seconds_of(call: Callable[[], object], device: torch.device) -> Timing:
    """Of a call that gives the same whenever it is replayed; on a CPU it shows that it runs, nothing else."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return Timing.over([time.perf_counter() - start])
    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # compiles, and fills the allocator
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    found: Any = triton.testing.do_bench(graph.replay, warmup=5, rep=50, return_mode="all")
    return Timing.over([milliseconds / 1000 for milliseconds in found])


def _label(case: MacCase | PagedCase) -> str:
    """What of it isn't the default."""
    given = [(each.name, getattr(case, each.name)) for each in fields(case) if getattr(case, each.name) != each.default]
    names = {"config": lambda config: f"window {config.window}, band {config.band}, sink {config.sink}"}
    return ", ".join(
        names.get(name, lambda v, n=name: f"{n} {v}".replace("torch.", ""))(value) for name, value in given
    )
