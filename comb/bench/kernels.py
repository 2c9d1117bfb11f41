"""`comb bench mac-gpu` and `serving-gpu`: Triton's kernels against the plain way on a GPU, then their time.

Cases are data: `MAC_CHECKS` and `PAGED_CHECKS` compare, `MAC_TIMES` and `PAGED_TIMES` are timed, and nothing is if a
comparison fails. What is timed is captured in a CUDA graph, as in a serving engine's decode, behind an overwritten
cache: in a model, another layer's keys come in between. Keys are noise: times are measured, never fidelity.
`scripts/bench-gpu` runs both commands where comb isn't installed.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import triton
import typer
from torch import Tensor

from comb.bench.harness import BenchmarkReport, OutOptions, benchmark, or_refused
from comb.cache.quantization import quantize
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, fixed
from comb.kernels.interpreter import INTERPRETED
from comb.kernels.launch import Launch, Pages
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step import MacStep, step
from comb.kernels.mac.step_kernel import mac_step_triton
from comb.kernels.paged.attention import attend_plain
from comb.kernels.paged.kernel import attend_paged
from comb.kernels.paged.layout import BlockTable, PagedBatch, PagedLayer
from comb.kernels.paged.plan import launch_for

BOUNDS = {torch.float32: 1e-5, torch.float16: 2e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class GpuOptions(OutOptions):
    """Of `comb bench mac-gpu` and `serving-gpu`."""

    device: Annotated[str, typer.Option(help="cuda, cuda:1, or cpu with TRITON_INTERPRET=1")] = "cuda"
    tiny: Annotated[bool, typer.Option("--tiny", help="a few small sizes, to see that everything runs")] = False


@dataclass(frozen=True)
class KernelCall:
    """One call of the kernels on a device: calling `kernel` or its `rival` again does the same work.

    Args:
        error: gives the largest difference from the plain way, infinite where another choice was made.
        bound: of the error. nbytes: keys and values that the kernel must read, each once.
    """

    kernel: Callable[[], object]
    rival: Callable[[], object]
    error: Callable[[], float]
    bound: float
    nbytes: int


@dataclass(frozen=True)
class MacCase:
    """A decode step of MAC attention for `rows` requests of `context` tokens.

    Args:
        hits: share of the key/value heads whose query heads all find their query, unchanged, in the ring.
        page: tokens of a page of keys; 0: contiguous. chains: those of the ring's entries are drawn below it.
    """

    config: MacConfig
    rows: int
    context: int
    hits: float = 0.5
    dtype: torch.dtype = torch.bfloat16
    heads: int = 32
    groups: int = 8
    width: int = 128
    page: int = 0
    chains: int = 1

    def make(self, device: torch.device) -> KernelCall:
        """Kernels against the plain step: outputs, log-sum-exps and rings; the rival is torch's exact attention."""
        draw, config, scale = torch.Generator(device).manual_seed(0), self.config, self.width**-0.5

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, device=device, dtype=self.dtype)

        keys, values = (noise(self.rows, self.groups, self.context, self.width) for _ in range(2))
        query, unrotated = (noise(self.rows, self.heads, self.width) for _ in range(2))
        start = torch.arange(self.rows, device=device)  # padding in front
        state = self._rings(noise, unrotated, draw)
        stored, pages = _paged(keys, values, self.page) if self.page else ((keys, values), None)
        launch = Launch(16, 16, programs=4) if INTERPRETED else None

        def kernel(into: MacState = state) -> MacStep:
            # the ring's oldest slot is written, which no later call matches
            return mac_step_triton(
                into, unrotated, query, *stored, start, config, scale, write=True, pages=pages, launch=launch
            )

        def rival() -> Tensor:
            # query heads that share keys are queries of one head: keys are read once
            return F.scaled_dot_product_attention(query.unflatten(1, (self.groups, -1)), keys, values)

        def error() -> float:
            names = [ring.name for ring in fields(MacState)]
            written, wanted = (MacState(*(getattr(state, name).clone() for name in names)) for _ in range(2))
            plain, fast = step(wanted, unrotated, query, keys, values, start, config, scale), kernel(written)
            wanted.write(plain.rows)
            same = torch.equal(fast.match.pos, plain.match.pos) and torch.equal(fast.keys_read, plain.keys_read)
            pairs = [(getattr(fast, name), getattr(plain, name)) for name in ("output", "lse", "tail_lse")]
            pairs += [(getattr(written, name), getattr(wanted, name)) for name in names]
            return max(_distance(*pair) for pair in pairs) if same else math.inf

        nbytes = int(step(state, unrotated, query, keys, values, start, config, scale).group_keys_read.sum())
        bound = max(BOUNDS[self.dtype], 1e-2 if config.ring_dtype != "auto" else 0.0)
        return KernelCall(kernel, rival, error, bound, nbytes * 2 * self.width * keys.itemsize)

    def _rings(self, noise: Callable[..., Tensor], unrotated: Tensor, draw: torch.Generator) -> MacState:
        """Rings full of noise, in which chosen groups of heads find their query."""
        window, shared = self.config.window, self.heads // self.groups
        state = MacState.empty(self.rows, self.heads, self.width, self.width, self.config, unrotated)
        state.query.copy_(noise(*state.query.shape))
        state.o.copy_(noise(*state.o.shape))
        state.lse.fill_(math.log(self.context))
        state.chain.copy_(torch.randint(self.chains, state.chain.shape, generator=draw, device=state.chain.device))
        order = torch.randperm(self.rows * self.groups, generator=torch.Generator().manual_seed(1)).tolist()
        for row in range(self.rows):
            position = self.context - 1 - row
            latest = torch.arange(position - window + 1, position, device=state.pos.device)
            state.pos[row, latest % window] = latest
            for group, place in enumerate(order[row * self.groups : (row + 1) * self.groups]):
                if place < round(self.hits * len(order)):
                    own, slot = (
                        slice(group * shared, (group + 1) * shared),
                        (position - 1 - place % (window - 1)) % window,
                    )
                    state.query[row, slot, own] = unrotated[row, own].to(state.query.dtype)
        return state


@dataclass(frozen=True)
class PagedCase:
    """One layer's attention of a step: `rows` requests of `queries` tokens each over `documents` of `tokens` each."""

    rows: int
    documents: int
    tokens: int
    queries: int = 1
    dtype: torch.dtype = torch.bfloat16
    fp8: bool = False
    heads: int = 32
    groups: int = 8
    width: int = 128
    block: int = 16
    least_keys: int = 256

    def make(self, device: torch.device) -> KernelCall:
        """The kernels against the plain way, in shuffled blocks of a pool; slots that no row may read are NaN."""
        count, draw = -(-self.tokens // self.block), torch.Generator(device).manual_seed(0)
        order = iter(torch.randperm(self.rows * self.documents * count).tolist())
        tables = tuple(
            BlockTable([(self.tokens, [next(order) for _ in range(count)]) for _ in range(self.documents)], self.block)
            for _ in range(self.rows)
        )
        slots = self.rows * self.documents * count * self.block
        hole = torch.ones(slots, dtype=torch.bool, device=device)
        for table in tables:
            hole[table.slots(device)] = False
        parts, scales = [], []
        for _ in range(2):
            part = torch.randn(slots, self.groups, self.width, generator=draw, device=device, dtype=self.dtype)
            if self.fp8:
                part, scale = quantize(part, "fp8")
                part.view(torch.uint8).masked_fill_(hole[:, None, None], 0x7F)  # NaN
                scales.append(scale[..., 0].float().masked_fill_(hole[:, None], math.nan))
            parts.append(part if self.fp8 else part.masked_fill_(hole[:, None, None], math.nan))
        layer = PagedLayer(parts[0], parts[1], self.block, *scales)
        batch = PagedBatch((self.queries,) * self.rows, tables)
        size = self.rows * self.queries, self.heads, self.width
        query = torch.randn(size, generator=draw, device=device, dtype=self.dtype)
        launch, bound = replace(launch_for(self.dtype, self.width), least_keys=self.least_keys), BOUNDS[self.dtype]
        kernel = partial(attend_paged, query, layer, batch, launch)

        def error() -> float:
            found, wanted = kernel().double(), attend_plain(query.double(), layer, batch)
            # the control: another row's answer is far away
            return _distance(found, wanted) if _distance(found.roll(1, 0), wanted) > 4 * bound else math.inf

        each = parts[0].itemsize * self.width + (4 if self.fp8 else 0)
        nbytes = 2 * each * self.groups * self.rows * self.documents * self.tokens
        return KernelCall(kernel, partial(attend_plain, query, layer, batch), error, bound, nbytes)


_MAC = MacConfig(window=48, band=20, tau=0.6, min_length=0, max_chain=None, max_drift=False)
_SMALL = MacCase(_MAC, 2, 150, dtype=torch.float32, heads=6, groups=2, width=10)
MAC_CHECKS = (
    _SMALL,
    replace(_SMALL, dtype=torch.bfloat16, page=16),
    replace(_SMALL, config=replace(_MAC, sink=7, max_chain=1, max_drift=True), chains=2),
    replace(_SMALL, config=replace(_MAC, ring_dtype="bfloat16"), dtype=torch.float16, hits=1.0),
    replace(_SMALL, rows=1, width=256, hits=0.0),
    MacCase(replace(_MAC, window=1024, band=256), 4, 6000),
    MacCase(replace(_MAC, window=1024, band=256), 4, 6000, page=16, hits=0.0),
)
# the paper's Fig. 6 searches 512 queries; rings in 16 bits as its release
_FIG6 = MacConfig(window=512, band=256, tau=0.8, min_length=0, ring_dtype="bfloat16")
MAC_TIMES = tuple(
    MacCase(_FIG6, rows, context, hits) for context in (32768, 131072) for rows in (1, 8) for hits in (0.0, 0.9, 1.0)
)
PAGED_CHECKS = tuple(
    PagedCase(rows, 3, 37, queries, dtype, fp8, least_keys=least)
    for dtype in BOUNDS for fp8 in (False, True) for rows, queries, least in ((4, 1, 256), (2, 37, 16))
)  # fmt: skip
PAGED_TIMES = tuple(
    PagedCase(rows, 8, tokens, queries, fp8=fp8)
    for fp8 in (False, True) for queries in (1, 256) for rows, tokens in ((1, 500), (8, 500), (8, 4000), (128, 500))
)  # fmt: skip
_TINY: dict[str, Any] = {"dtype": torch.float32, "heads": 4, "groups": 2, "width": 16}


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """The comparisons, then the times."""

    def us(timing: Timing) -> str:
        return f"{1e6 * timing.median:.0f}"

    case = Column("case", "case", names=True)
    times = (
        case, Column("kernel us", "kernel_s", us), Column("rival us", "rival_s", us),
        Column("rival/kernel", "speedup", fixed(2)),
        Column("GB/s", "bytes_per_s", lambda rate: f"{rate / 1e9:.4g}", "keys and values that it must read, each once"),
    )  # fmt: skip
    checks = (case, Column("error", "error", "{:.2g}".format), Column("bound", "bound", "{:.2g}".format))
    found = [TextTable("Against the plain way", checks, [row for row in rows if "bound" in row])]
    return [*found, TextTable("One layer's attention of a step", times, [row for row in rows if "bound" not in row])]


@benchmark("mac-gpu", tables)
def mac_gpu(options: GpuOptions, report: BenchmarkReport) -> None:
    """The kernels of MAC attention on a GPU: checked, then timed against torch's exact attention."""
    tiny = [MacCase(replace(_MAC, window=16, band=8), 2, 96, hits, **_TINY) for hits in (0.0, 1.0)]
    measure_kernels(options, report, *((MAC_CHECKS[:4], tiny) if options.tiny else (MAC_CHECKS, MAC_TIMES)))


@benchmark("serving-gpu", tables)
def serving_gpu(options: GpuOptions, report: BenchmarkReport) -> None:
    """The kernels of paged attention on a GPU: checked, then timed against the plain way and a device copy."""
    tiny = [PagedCase(3, 2, 9, queries, fp8=fp8, block=4, **_TINY) for queries in (1, 5) for fp8 in (False, True)]
    measure_kernels(options, report, *((tiny, tiny) if options.tiny else (PAGED_CHECKS, PAGED_TIMES)))


def measure_kernels(
    options: GpuOptions, report: BenchmarkReport, checks: Iterable[MacCase | PagedCase],
    timed: Iterable[MacCase | PagedCase],
) -> None:  # fmt: skip
    """A row per case. Raises ValueError where no kernel can run, RuntimeError if one is wrong: then none is timed."""
    device = torch.device(options.device)
    if device.type == "cuda":
        device = torch.device("cuda", device.index or 0)
        torch.cuda.set_device(device)
    elif not INTERPRETED:
        raise ValueError(f"the kernels run on {device.type} only interpreted: set TRITON_INTERPRET=1")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted: times mean nothing"
    source = torch.empty(2**30 if device.type == "cuda" else 2**16, dtype=torch.uint8, device=device)
    copied = 2 * len(source) / seconds_of(partial(torch.empty_like(source).copy_, source), device).median
    report.facts |= {"device": name, "copy_bytes_per_s": copied}
    report.heading = f"{name}; a device copy reads and writes {copied / 1e9:.4g} GB/s"
    del source
    with torch.inference_mode():
        for case in checks:
            call = case.make(device)
            report.add({"case": _label(case), "error": call.error(), "bound": call.bound})
        wrong = [row["case"] for row in report.rows if not row["error"] < row["bound"]]
        if wrong:
            raise RuntimeError(f"kernels differ from the plain way, so none is timed: {'; '.join(wrong)}")
        for case in timed:
            row: Row = {"case": _label(case)}
            with or_refused(row):
                call = case.make(device)
                own, other = (seconds_of(run, device) for run in (call.kernel, call.rival))
                row |= {"kernel_s": own, "rival_s": other, "speedup": other.median / own.median,
                        "bytes_per_s": call.nbytes / own.median}  # fmt: skip
            report.add(row)


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


def _paged(keys: Tensor, values: Tensor, page: int) -> tuple[tuple[Tensor, Tensor], Pages]:
    """Keys [B, G, L, D] and values in shuffled pages [N, page, G, ...], and the table of them."""
    rows, groups, length, _ = keys.shape
    count = -(-length // page)
    table = torch.randperm(rows * count, generator=torch.Generator().manual_seed(4)).to(keys.device)
    stored = []
    for tensor in (keys, values):
        whole = F.pad(tensor, (0, 0, 0, count * page - length))
        pages = torch.empty_like(whole).view(rows * count, page, groups, -1)
        pages[table] = whole.unflatten(2, (count, page)).permute(0, 2, 3, 1, 4).flatten(0, 1)
        stored.append(pages)
    lengths = torch.full((rows,), length, device=keys.device)
    return (stored[0], stored[1]), Pages(table.view(rows, count).int(), lengths)


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest absolute difference; equal infinities are equal, NaN is infinitely far."""
    apart = torch.where(left == right, 0.0, (left.double() - right.double()).abs())
    return float(torch.nan_to_num(apart, nan=torch.inf).max())
