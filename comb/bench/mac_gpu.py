"""`comb bench mac-gpu`: the kernels of MAC attention checked on a GPU, then timed against exact attention there.

In one process: check against the plain step; choose the launch's sizes; time of a step and of the best exact attention
over context x batch x share of groups that hit (paper Fig. 6); where a step's time goes (Table 5); constants of the
break-even rule. Nothing is timed if a check fails. Keys are noise: what is measured is time, never fidelity.
`scripts/bench-mac-gpu` runs it where comb isn't installed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from statistics import geometric_mean
from typing import Annotated, Any

import torch
import typer
from torch import Tensor

from comb.bench.exact_attention import exact_attentions
from comb.bench.gpu import GpuOptions, GpuRun
from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.mac_gpu_check import cases, check
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, fixed, percent
from comb.kernels.interpreter import INTERPRETED
from comb.kernels.launch import Launch
from comb.kernels.mac.attend import attend_spans
from comb.kernels.mac.config import MacConfig
from comb.kernels.mac.match import end
from comb.kernels.mac.match_kernel import nearest_in_tiles
from comb.kernels.mac.merge import merge_spans
from comb.kernels.mac.schedule import make_schedule
from comb.kernels.mac.state import MacState
from comb.kernels.mac.step_kernel import mac_step_triton
from comb.mac.breakeven import AttentionShape, fit_costs, pays

LAUNCHES = (
    Launch(), Launch(key_tile=128), Launch(key_tile=128, warps=8), Launch(key_tile=32, stages=4), Launch(stages=4),
    Launch(per_processor=4), Launch(ring_tile=32), Launch(ring_tile=128),
)  # fmt: skip


@dataclass(frozen=True)
class MacGpuOptions(GpuOptions):
    """Of `comb bench mac-gpu`."""

    flex: Annotated[bool, typer.Option(help="measure flex attention too, which is compiled first")] = True


@dataclass(frozen=True)
class MacGpuSizes:
    """What is measured: lengths, batches, shares of hits, heads."""

    contexts: tuple[int, ...] = (32768, 65536, 131072, 262144)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rates: tuple[float, ...] = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
    heads: int = 32
    groups: int = 8
    width: int = 128


TINY = MacGpuSizes((48, 96), (1, 2), (0.0, 1.0), heads=2, groups=1, width=16)


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per context, batch and share of hits."""

    def us(timing: Timing) -> str:
        return f"{1e6 * timing.median:.0f}"

    columns = (
        Column("batch", "rows", names=True),
        Column("context", "context", "{:,}".format, names=True),
        Column("hits %", "hit_rate", percent, "of the key/value heads all of whose query heads match"),
        Column("read %", "read_share", percent, "keys read over all keys"),
        Column("MAC us", "mac", us, "of a step, ring write included"),
        Column("exact us", "exact", us, "the fastest way"),
        Column("way", "exact_way"),
        Column("exact/MAC", "speedup", fixed(2)),
    )
    return [TextTable("A decode step of one layer", columns, rows)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Speed-up over batch size, one panel per context, one line per share of hits (paper Fig. 6)."""
    return [
        Lines(
            [row for row in rows if row["context"] == context], "rows", "speedup", f"batch, at {context:,} tokens",
            "exact attention's time over MAC's", lambda row: f"{row['hit_rate']:.0%} hits", log="xy", level=1,
        )
        for context in sorted({row["context"] for row in rows})
    ]  # fmt: skip


@benchmark("mac-gpu", tables, panels)
def mac_gpu(options: MacGpuOptions, report: BenchmarkReport) -> None:
    """The kernels of MAC attention on a GPU: checked, then timed against exact attention (MAC-Attention Fig. 6)."""
    # the paper's Fig. 6 searches 512 queries; rings in 16 bits as its release
    config = MacConfig(window=512, band=256, tau=0.8, min_length=0, ring_dtype="bfloat16")
    if options.tiny:
        config = replace(config, window=16, band=8, ring_dtype="float32")
    run = MacGpuRun(options, report, TINY if options.tiny else MacGpuSizes(), config)
    report.facts |= {"config": asdict(config), "sizes": asdict(run.sizes)}
    with torch.inference_mode():
        run.check(options.tiny)
        run.measure()
    run.finish()


class DecodeStep:
    """Rings and queries of `rows` requests of `context` tokens, made so that chosen key/value heads hit.

    A hit's query lies unchanged in the ring, somewhere in the window; all others are unrelated to it.
    """

    def __init__(
        self, sizes: MacGpuSizes, config: MacConfig, made: Tensor, *, context: int, rows: int, rate: float
    ) -> None:
        self.config, self.scale, shared = config, sizes.width**-0.5, sizes.heads // sizes.groups
        self.keys, self.values = made[:, :rows, :, :context]
        source, device = torch.Generator(made.device).manual_seed(0), made.device

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, device=device, dtype=made.dtype)

        self.query, self.unrotated = noise(rows, sizes.heads, sizes.width), noise(rows, sizes.heads, sizes.width)
        self.start = torch.zeros(rows, dtype=torch.long, device=device)
        self.state = MacState.empty(rows, sizes.heads, sizes.width, sizes.width, config, self.query)
        self.state.query.copy_(noise(*self.state.query.shape))
        self.state.o.copy_(noise(*self.state.o.shape))
        self.state.lse.fill_(context**0.5)
        m, window = context - 1, config.window
        latest = torch.arange(m - window + 1, m, device=device)
        self.state.pos[:, latest % window] = latest
        chosen = torch.randperm(rows * sizes.groups, generator=torch.Generator().manual_seed(1))
        self.hits = round(rate * rows * sizes.groups)
        for one in chosen[: self.hits].tolist():
            b, own = one // sizes.groups, one % sizes.groups * shared + torch.arange(shared, device=device)
            back = torch.randint(1, window, (1,), generator=source, device=device)
            self.state.query[b, (m - back) % window, own] = self.unrotated[b, own]

    def __call__(self, launch: Launch) -> Any:
        """One step, rings written."""
        return mac_step_triton(
            self.state, self.unrotated, self.query, self.keys, self.values, self.start, self.config, self.scale,
            write=True, launch=launch,
        )  # fmt: skip

    @property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor]:
        """What exact attention takes."""
        return self.query, self.keys, self.values


class MacGpuRun(GpuRun):
    """Everything measured so far."""

    def __init__(self, options: MacGpuOptions, report: BenchmarkReport, sizes: MacGpuSizes, config: MacConfig) -> None:
        super().__init__(options, report)
        self.sizes, self.config = sizes, config
        self.exact = exact_attentions(self.device, flex=options.flex)
        self.launch = Launch(16, 16, programs=4) if INTERPRETED else Launch()

    def check(self, tiny: bool) -> None:
        """The kernels against the plain step. Raises RuntimeError if any case differs."""
        checks = self.report.facts["checks"] = []
        for name, case in cases(tiny).items():
            done = check(name, case, 1 if tiny else 4, self.device, self.launch if INTERPRETED else None)
            checks.append(done)
            self.report.say(f"{name}: {done['failed'] or 'ok'}, {done['hits']} of {done['searches']} hit")
        if any(done["failed"] for done in checks):
            self.report.write()
            raise RuntimeError("a check failed: nothing is timed")

    def measure(self) -> None:
        """All points, the largest batch first: its figures matter most if time runs out."""
        made, facts, contexts = self._make_keys(), self.report.facts, self.sizes.contexts
        largest = made.shape[1]
        step = partial(DecodeStep, self.sizes, self.config, made)
        facts["launches"] = self._choose_launch(step, min(8, largest)) if self.device.type == "cuda" else {}
        facts["launch"] = asdict(self.launch)
        self._check_exact(step(context=min(contexts), rows=1, rate=0.0))
        facts["stages"] = [
            {"context": context, **self._stages(step(context=context, rows=1, rate=1.0))}
            for context in contexts
            if not self.late(f"stages at {context}")
        ]
        for rows in sorted((rows for rows in self.sizes.batches if rows <= largest), reverse=True):
            for context in contexts:
                for row in self._points(step, context, rows):
                    self.report.add(row)
        if self.report.rows:
            with self.or_left_out("costs"):
                facts["costs"] = self._costs(self.report.rows)

    def _make_keys(self) -> Tensor:
        """Keys and values [2, B, G, L, D] of the largest batch that fits, at the longest context."""
        sizes, kind = self.sizes, torch.float32 if self.device.type == "cpu" else torch.bfloat16
        rows, longest = max(sizes.batches), max(sizes.contexts)
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            fitting = int(0.8 * free) // (2 * sizes.groups * longest * sizes.width * 2)
            if fitting < rows:
                self.left_out[f"batches of more than {fitting}"] = f"{free / 2**30:.0f} GiB are free"
            rows = max(1, min(rows, fitting))
        source = torch.Generator(self.device).manual_seed(2)
        made = torch.empty(2, rows, sizes.groups, longest, sizes.width, dtype=kind, device=self.device)
        for one in made.flatten(0, 1):  # row by row: random numbers of everything at once need more memory
            one.normal_(generator=source)
        return made

    def _choose_launch(self, step: Callable[..., DecodeStep], rows: int) -> dict[str, float]:
        """Takes the launch with the least time over a miss and a hit of a middling size; seconds by description."""
        context = sorted(self.sizes.contexts)[len(self.sizes.contexts) // 2]
        both = [step(context=context, rows=rows, rate=rate) for rate in (0.0, 1.0)]
        found: dict[Launch, float] = {}
        for launch in LAUNCHES:
            if not self.late("launch sizes"):
                with self.or_left_out(launch):  # more shared memory or registers than this device has
                    # a hit is the case that MAC is for: both count by their ratio
                    found[launch] = geometric_mean(self.time(partial(one, launch)).median for one in both)
        self.launch = min(found, key=found.__getitem__, default=self.launch)
        return {str(launch): seconds for launch, seconds in found.items()}

    def _check_exact(self, step: DecodeStep) -> None:
        """Leaves out exact attentions that fail, or differ from the kernels on a step without a match."""
        wanted, right = step(self.launch).output, {}
        for name, attention in self.exact.items():
            with self.or_left_out(name):  # a backend refuses, or its compiler is missing
                error = float((attention(*step.inputs).float() - wanted).abs().max())
                if not error < 2e-2:
                    raise ValueError(f"off by {error:.3g}")
                right[name] = attention
        self.exact = right
        if not right:
            raise RuntimeError(f"no exact attention works here: {self.left_out}")

    def _points(self, make: Callable[..., DecodeStep], context: int, rows: int) -> Iterator[Row]:
        """One row per share of hits that differs; exact attention doesn't depend on it.

        ``skip_ratio`` is the mean of E(p) / (m + 1), 0 for a miss (paper sec. 5.6); ``keys_read`` is added up.
        """
        groups = rows * self.sizes.groups
        exact: dict[str, Timing] = {}
        rates = {round(rate * groups): rate for rate in reversed(self.sizes.rates)}
        for hits, rate in reversed(rates.items()):
            if self.late(f"{rows} x {context}"):
                return
            step = make(context=context, rows=rows, rate=rate)
            exact = exact or self._time_exact(step)
            way = min(exact, key=lambda name: exact[name].median)
            done = step(self.launch)
            hit_rate = float(done.match.hit.float().mean())
            if abs(hit_rate - hits / groups) > 1e-6:
                raise RuntimeError(f"{hit_rate:.3f} of the heads hit, {hits} of {groups} were made to: not comparable")
            skipped = torch.where(done.match.hit, end(done.match.pos, step.config), 0).double().mean() / context
            read, mac = int(done.group_keys_read.sum()), self.time(partial(step, self.launch))
            yield {
                "context": context, "rows": rows, "hit_rate": hit_rate, "skip_ratio": float(skipped),
                "read_share": read / (groups * context), "keys_read": read, "mac": mac, "exact": exact[way],
                "exact_way": way, "speedup": exact[way].median / mac.median,
            }  # fmt: skip

    def _time_exact(self, step: DecodeStep) -> dict[str, Timing]:
        found = {}
        for name, attention in self.exact.items():
            with self.or_left_out(f"{name} at {tuple(step.keys.shape)}"):  # a size that this backend can't take
                found[name] = self.time(partial(attention, *step.inputs))
        if not found:
            raise RuntimeError(f"no exact attention takes keys of {tuple(step.keys.shape)}: {self.left_out}")
        return found

    def _stages(self, step: DecodeStep) -> dict[str, float]:
        """Seconds of each launch for one request that hits everywhere."""
        state, config, launch = step.state, step.config, self.launch
        position = torch.full((1,), step.keys.shape[2] - 1, device=self.device)
        near = nearest_in_tiles(state, step.unrotated, position, config, launch)
        tables = (*near, position, self.sizes.groups, config.window, config, launch)
        schedule = make_schedule(*tables)
        spans = (*step.inputs, step.start, position, schedule, config, step.scale, launch)
        pieces = attend_spans(*spans)
        calls: dict[str, Callable[[], object]] = {
            "match": partial(nearest_in_tiles, state, step.unrotated, position, config, launch),
            "schedule": partial(make_schedule, *tables),
            "attend": partial(attend_spans, *spans),
            "merge": partial(merge_spans, state, step.unrotated, position, schedule, pieces, write=True),
            "step": partial(step, launch),
        }
        times = {name: self.time(call).median for name, call in calls.items()}
        # without a graph: what Python's launches cost a session in transformers
        return {**times, "step, not captured": self.time(calls["step"], graph=False).median}

    def _costs(self, points: Sequence[Row]) -> Row:
        """Constants of the break-even rule from the points, and in how many of them the rule is then right."""
        shape = AttentionShape(self.sizes.heads, self.sizes.groups, self.sizes.width)
        key_bytes, searched = shape.key_bytes / self.sizes.groups, self.config.window * shape.query_bytes
        exact = [(p["rows"] * p["context"] * shape.key_bytes, p["exact"].median) for p in points]
        mac = [(p["keys_read"] * key_bytes + p["rows"] * searched, p["mac"].median) for p in points]
        costs = fit_costs(exact, mac)
        # here whole groups hit together; the rule takes a rate per head and raises it to the group's size
        head = self.sizes.groups / self.sizes.heads
        right = sum(
            pays(p["context"], p["rows"], p["hit_rate"] ** head, shape, self.config, costs) == (p["speedup"] >= 1)
            for p in points
        )
        return {**asdict(costs), "points": len(points), "rule_right": right}
