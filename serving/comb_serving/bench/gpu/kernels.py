"""`comb bench serving-gpu`: what of serving a CPU can't show, checked on a GPU and then timed.

The kernels of paged attention against the plain way; a pool handed to another process, which is killed, and how fast
documents are written there; the kernels' time, and their bandwidth against a device copy. No kernel is timed if a check
fails. `scripts/bench-serving-gpu` runs it where comb isn't installed.
"""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from comb.bench.gpu import GpuOptions, GpuRun
from comb.bench.harness import BenchmarkReport, benchmark
from comb.cache.quantization import quantize
from comb.evaluation.table import Column, Row, TextTable, percent
from comb.kernels.interpreter import INTERPRETED
from comb.kernels.paged.attention import attend_plain, why_plain
from comb.kernels.paged.kernel import attend_paged, run_plan
from comb.kernels.paged.layout import FP8, BlockTable, PagedBatch, PagedLayer
from comb.kernels.paged.plan import launch_for, make_plan
from comb_serving.bench.gpu.handover import hand_over
from comb_serving.pool.pool import PoolLayout

BOUNDS = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class Measured:
    """What is measured: (rows, documents of a row, tokens of a document), query tokens of a row, heads."""

    requests: tuple[tuple[int, int, int], ...] = (
        (1, 8, 500), (1, 64, 500), (8, 8, 500), (8, 8, 4000), (32, 8, 500), (32, 8, 4000), (128, 8, 500),
    )  # fmt: skip
    queries: tuple[int, ...] = (1, 256)
    heads: int = 32
    groups: int = 8
    width: int = 128
    block: int = 16
    copied: int = 2**30
    handed_over: tuple[int, ...] = (512, 8192)
    cross_layers: int = 8


TINY = Measured(((1, 2, 20), (3, 2, 9)), (1, 5), 4, 2, 16, 4, 2**16, (9,), 2)


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per number of rows, length of documents, queries and dtype of the pool."""

    def us(seconds: float) -> str:
        return f"{1e6 * seconds:.0f}"

    columns = (
        *(Column(name, name, names=True) for name in ("rows", "documents", "tokens", "queries", "stored")),
        Column("kernel us", "kernel_s", us),
        Column("GB/s", "bytes_per_second", lambda rate: f"{rate / 1e9:.4g}"),
        Column("% of a copy", "share_of_copy", percent, "of a device copy's bytes per second"),
        Column("plain us", "plain_s", us),
        Column("plan us", "plan_s", us, "the host's, once per step"),
    )
    return [TextTable("One layer's paged attention for the rows of one step", columns, rows)]


@benchmark("serving-gpu", tables)
def serving_gpu(options: GpuOptions, report: BenchmarkReport) -> None:
    """Serving's kernels and the pool's hand-over on a GPU: checked, then timed."""
    run = ServingGpuRun(options, report, TINY if options.tiny else Measured())
    report.facts |= {"sizes": asdict(run.measured), "checks": [], "handovers": []}
    with torch.inference_mode():
        run.run()
    run.finish()
    report.write()
    failed = [done["failed"] for done in report.facts["checks"] + report.facts["handovers"] if done["failed"]]
    if failed:
        raise RuntimeError(f"checks have failed: {'; '.join(failed)}")


class ServingGpuRun(GpuRun):
    """What is checked and timed."""

    def __init__(self, options: GpuOptions, report: BenchmarkReport, measured: Measured) -> None:
        super().__init__(options, report)
        self.measured = measured
        self.dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def run(self) -> None:
        """Checks, hand-overs, then the kernels' times."""
        facts, say = self.report.facts, self.report.say
        for done in self.checks():
            facts["checks"].append(done)
            say(f"{done['case']}: {done['failed'] or 'ok'}, {done['error']:.2g}")
        for done in self.handovers():
            facts["handovers"].append(done)
            say(f"handed over: {done['what']}: {done['failed'] or 'ok'}")
            if "bytes_per_second" in done:
                say(f"  write {1e6 * done['write_s']:.0f} us + event {1e6 * done['wait_s']:.0f} us, "
                    f"{done['bytes_per_second'] / 1e9:.3g} GB/s, open {1e3 * done['attach_s']:.3g} ms")  # fmt: skip
            self.report.write()
        if any(done["failed"] for done in facts["checks"]):
            say("a check failed: no kernel is timed")
            return
        source = torch.empty(self.measured.copied, dtype=torch.uint8, device=self.device)
        copied = 2 * source.numel() / self.time(partial(torch.empty_like(source).copy_, source)).median
        del source  # its room is for what is measured next
        facts["copy_bytes_per_second"] = copied
        say(f"device copy: {copied / 1e9:.4g} GB/s, read and written")
        self.points(copied)

    def step(
        self, rows: int, documents: int, tokens: int, queries: Sequence[int], *, fp8: bool, dtype: torch.dtype
    ) -> tuple[Tensor, PagedLayer, PagedBatch]:  # fmt: skip
        """Queries, a pool in which every slot that no row may read is NaN, and the rows' shuffled blocks."""
        sizes, block = self.measured, self.measured.block
        count = -(-tokens // block)
        source = torch.Generator(self.device).manual_seed(0)
        order = torch.randperm(rows * documents * count, generator=torch.Generator().manual_seed(1)).tolist()
        taken = iter(order)
        tables = tuple(
            BlockTable([(tokens, [next(taken) for _ in range(count)]) for _ in range(documents)], block)
            for _ in range(rows)
        )
        slots = len(order) * block
        made = torch.empty(2, slots, sizes.groups, sizes.width, dtype=dtype, device=self.device)
        made.normal_(generator=source)
        hole = torch.ones(slots, dtype=torch.bool, device=self.device)
        for table in tables:
            hole[table.slots(self.device)] = False
        keys, values = made.masked_fill_(hole[:, None, None], 0 if fp8 else float("nan"))
        layer = PagedLayer(keys, values, block)
        if fp8:
            layer = _in_fp8(layer, hole)
        query = torch.randn(sum(queries), sizes.heads, sizes.width, generator=source, device=self.device)
        return query.to(dtype), layer, PagedBatch(tuple(queries), tables)

    def checks(self) -> Iterator[Row]:
        """The kernels against the plain way in float64: last blocks filled in part, rows with few and many tokens."""
        rows, documents, tokens = self.measured.requests[-1 if INTERPRETED else 2]
        rows = min(rows, 4)
        usual = launch_for(self.dtype, self.measured.width)
        split = replace(usual, least_keys=self.measured.block)
        cases = [(self.dtype, fp8, sizes) for fp8 in (False, True) for sizes in (usual, split)]
        if not INTERPRETED:
            others = (torch.float16, torch.float32)
            cases += [(dtype, fp8, launch_for(dtype, self.measured.width)) for dtype in others for fp8 in (False, True)]
        for dtype, fp8, sizes in cases:
            queries = [1 if row % 2 else 37 for row in range(rows)]
            query, layer, batch = self.step(rows, documents, tokens - 3, queries, fp8=fp8, dtype=dtype)
            name = f"{str(dtype).removeprefix('torch.')}{' fp8 pool' if fp8 else ''}, least {sizes.least_keys} keys"
            failed = why_plain(query, layer)
            if failed:  # not the kernels' fault, and said
                self.left_out[name] = failed
                continue
            found, wanted = attend_paged(query, layer, batch, sizes), attend_plain(query.double(), layer, batch)
            error = float((found.double() - wanted).abs().nan_to_num(nan=float("inf")).max())
            # the negative control: rows in each other's place
            other = float((found.double().roll(1, 0) - wanted).abs().max())
            right = error < BOUNDS[dtype] < other / 4
            yield {"case": name, "error": error, "of_another_row": other, "failed": "" if right else "differs"}

    def handovers(self) -> Iterator[Row]:
        """The pool between two processes, from the device and from host memory; it ends where that isn't possible."""
        sizes, dtype = self.measured, str(self.dtype).removeprefix("torch.")
        sources = ["cpu"] if self.device.type == "cpu" else [str(self.device), "cpu"]
        if self.device.type == "cuda" and torch.cuda.device_count() > 1:
            sources.append("cuda:1")
        # starting a process takes seconds: the long document goes the usual way alone
        cases = [(source, stored, tokens) for source in sources for stored in ("auto", "fp8")
                 for tokens in sizes.handed_over[: None if source == sources[0] else 1]]  # fmt: skip
        for source, stored, tokens in cases:
            what = f"{tokens} tokens from {source}, {stored}"
            if self.late(f"handing over {what}"):
                continue
            layout = PoolLayout(
                sizes.cross_layers, sizes.groups, sizes.width, 1, sizes.block, dtype=dtype, stored=stored
            )
            with tempfile.TemporaryDirectory() as folder:
                try:
                    done = hand_over(Path(folder), layout, self.device, source=source, tokens=tokens)
                except (RuntimeError, OSError) as error:  # this machine's processes are isolated, say
                    yield {"what": what, "failed": f"{what}: {type(error).__name__}: {error}"}
                    return
            yield {"what": what, **done}

    def points(self, copied: float) -> None:
        """Times for every combination, as long as there is time."""
        for fp8, queries, (rows, documents, tokens) in itertools.product(
            (False, True), self.measured.queries, self.measured.requests
        ):
            what = f"{rows} rows of {documents} x {tokens}, {queries} queries, {'fp8' if fp8 else 'plain'}"
            if self.late(what):
                continue
            try:
                self.report.add(self._point(rows, documents, tokens, queries, fp8, copied))
            except torch.OutOfMemoryError:
                self.left_out[what] = "no room"

    def _point(self, rows: int, documents: int, tokens: int, queries: int, fp8: bool, copied: float) -> Row:
        """One layer's attention for the rows of one step.

        ``stored`` is the pool's dtype; ``queries`` are of each row; ``plan_s`` is the host's, once per step;
        ``bytes_read``: keys, values and scales of the rows' documents, each once; ``share_of_copy`` is of a device
        copy's bytes per second, read and written counted, and None for several query tiles, which read them again.
        """
        sizes = self.measured
        query, layer, batch = self.step(rows, documents, tokens, [queries] * rows, fp8=fp8, dtype=self.dtype)
        chosen = launch_for(self.dtype, sizes.width)
        begun = time.perf_counter()
        for _ in range(3):
            plan = make_plan(batch, heads=sizes.heads, groups=sizes.groups, device=self.device, sizes=chosen)
        plan_s = (time.perf_counter() - begun) / 3
        kernel_s = self.time(partial(run_plan, query, layer, plan)).median
        plain_s = self.time(partial(attend_plain, query, layer, batch), graph=False).median
        each = layer.keys.element_size() * sizes.width + (4 if fp8 else 0)
        rate = 2 * each * sizes.groups * rows * documents * tokens / kernel_s
        single = all(queries <= items.tokens for items in plan.launches)
        return {
            "rows": rows, "documents": documents, "tokens": tokens, "queries": queries,
            "stored": "fp8" if fp8 else str(self.dtype).removeprefix("torch."),
            "kernel_s": kernel_s, "plain_s": plain_s, "plan_s": plan_s, "bytes_read": round(rate * kernel_s),
            "bytes_per_second": rate, "share_of_copy": rate / copied if single else None,
        }  # fmt: skip


def _in_fp8(layer: PagedLayer, hole: Tensor) -> PagedLayer:
    (keys, key_scales), (values, value_scales) = (quantize(part, "fp8") for part in (layer.keys, layer.values))
    for data in (keys, values):
        data.view(torch.uint8).masked_fill_(hole[:, None, None], 0x7F)  # NaN
    scales = [part[..., 0].float().masked_fill_(hole[:, None], float("nan")) for part in (key_scales, value_scales)]
    assert keys.dtype == FP8
    return PagedLayer(keys, values, layer.block_size, *scales)
