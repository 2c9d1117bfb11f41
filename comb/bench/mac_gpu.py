"""`scripts/bench-mac-gpu`: the kernels of MAC attention checked on a GPU, then timed against exact attention there.

In one process: check against the plain step; choose the launch's sizes; time of a step and of the best exact attention
over context x batch x share of groups that hit (paper Fig. 6); where a step's time goes (Table 5); constants of the
break-even rule. Nothing is timed if a check fails. Keys are noise: what is measured is time, never fidelity.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comb.bench.gpu_run import GpuRun, chosen_device, parser_for
from comb.bench.gpu_time import Time, exact_attentions, working
from comb.bench.mac_gpu_check import cases, check
from comb.evaluation.plot import make_figure, save
from comb.evaluation.record import environment, write_json
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


@dataclass(frozen=True)
class Point:
    """One context, batch and share of hits.

    Args:
        hit_rate: share of the key/value heads all of whose query heads match.
        skip_ratio: mean of E(p) / (m + 1), 0 for a miss (paper sec. 5.6). read_share: keys read over all keys.
        keys_read: of one key/value head, added up over rows and key/value heads.
        mac: of a step, ring write included; exact: the fastest way, whose name is exact_way.
        speedup: of the medians.
    """

    context: int
    rows: int
    hit_rate: float
    skip_ratio: float
    read_share: float
    keys_read: int
    mac: Time
    exact: Time
    exact_way: str
    speedup: float


@dataclass(frozen=True)
class Sizes:
    """What is measured: lengths, batches, shares of hits, heads."""

    contexts: tuple[int, ...] = (32768, 65536, 131072, 262144)
    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    rates: tuple[float, ...] = (0.0, 0.5, 0.9, 0.95, 0.99, 1.0)
    heads: int = 32
    groups: int = 8
    width: int = 128
    repeats: int = 15


TINY = Sizes((48, 96), (1, 2), (0.0, 1.0), heads=2, groups=1, width=16, repeats=1)


class Request:
    """Rings and queries of `rows` requests of `context` tokens, made so that chosen key/value heads hit.

    A hit's query lies unchanged in the ring, somewhere in the window; all others are unrelated to it.
    """

    def __init__(self, keys: Tensor, values: Tensor, context: int, rows: int, rate: float, config: MacConfig,
                 sizes: Sizes) -> None:  # fmt: skip
        device, shared = keys.device, sizes.heads // sizes.groups
        self.config, self.scale = config, sizes.width**-0.5
        self.keys, self.values = keys[:rows, :, :context], values[:rows, :, :context]
        source = torch.Generator(device).manual_seed(0)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=source, device=device, dtype=keys.dtype)

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
        heads = torch.arange(shared, device=device)
        for one in chosen[: self.hits].tolist():
            b, own = one // sizes.groups, one % sizes.groups * shared + heads
            back = torch.randint(1, window, (1,), generator=source, device=device)
            self.state.query[b, (m - back) % window, own] = self.unrotated[b, own]

    def step(self, launch: Launch) -> Any:
        """One step, rings written."""
        return mac_step_triton(
            self.state, self.unrotated, self.query, self.keys, self.values, self.start, self.config, self.scale,
            write=True, launch=launch,
        )  # fmt: skip


class Benchmark(GpuRun):
    """Everything measured so far."""

    def __init__(self, device: torch.device, sizes: Sizes, config: MacConfig, seconds: float, flex: bool) -> None:
        super().__init__(device, sizes.repeats, seconds)
        self.sizes, self.config = sizes, config
        self.ways = exact_attentions(device, flex=flex)
        self.spent: dict[str, float] = {}
        self.launch = Launch(16, 16, programs=4) if INTERPRETED else Launch()
        self.points: list[Point] = []

    def make_keys(self) -> tuple[Tensor, Tensor]:
        """Keys and values [B, G, L, D] of the largest batch that fits, at the longest context."""
        sizes, kind = self.sizes, torch.float32 if self.device.type == "cpu" else torch.bfloat16
        rows, longest = max(sizes.batches), max(sizes.contexts)
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info()
            fitting = int(0.8 * free) // (2 * sizes.groups * longest * sizes.width * 2)
            if fitting < rows:
                self.left_out[f"batches of more than {fitting}"] = f"{free / 2**30:.0f} GiB are free"
            rows = max(1, min(rows, fitting))
        shape = rows, sizes.groups, longest, sizes.width
        source = torch.Generator(self.device).manual_seed(2)
        made = torch.empty(2, *shape, dtype=kind, device=self.device)
        for one in made.flatten(0, 1):  # row by row: random numbers of everything at once need more memory
            one.normal_(generator=source)
        return made[0], made[1]

    def choose_launch(self, keys: Tensor, values: Tensor) -> dict[str, float]:
        """The launch with the least time over a miss and a hit of a middling size; seconds by its description."""
        candidates = [
            Launch(), Launch(key_tile=128), Launch(key_tile=128, warps=8), Launch(key_tile=32, stages=4),
            Launch(stages=4), Launch(per_processor=4), Launch(ring_tile=32), Launch(ring_tile=128),
        ]  # fmt: skip
        context, rows = sorted(self.sizes.contexts)[len(self.sizes.contexts) // 2], min(8, keys.shape[0])
        requests = [Request(keys, values, context, rows, rate, self.config, self.sizes) for rate in (0.0, 1.0)]
        found: dict[str, float] = {}
        best = float("inf")
        for launch in candidates:
            if self.late("launch sizes"):
                break
            try:
                seconds = [self.clock.time(partial(request.step, launch)).median_s for request in requests]
            except Exception as failure:  # more shared memory or registers than this device has
                self.left_out[str(launch)] = f"{type(failure).__name__}: {str(failure)[:200]}"
                continue
            # a hit is the case that MAC is for: both count by their ratio
            found[str(launch)] = (seconds[0] * seconds[1]) ** 0.5
            if found[str(launch)] < best:
                best, self.launch = found[str(launch)], launch
        return found

    def check_exact(self, keys: Tensor, values: Tensor) -> None:
        """Leaves out ways of exact attention that fail, or differ from the kernels on a step without a match."""
        context = min(self.sizes.contexts)
        request = Request(keys, values, context, 1, 0.0, self.config, self.sizes)
        output = request.step(self.launch).output
        inputs = request.query, request.keys, request.values
        for name, reason in list(working(self.ways, inputs, output, 2e-2)):
            if reason:
                self.left_out[name] = reason
                del self.ways[name]
        if not self.ways:
            raise RuntimeError(f"no exact attention works here: {self.left_out}")

    def measure(self, keys: Tensor, values: Tensor) -> Iterator[Point]:
        """All points as they come, the largest batch first: its figures matter most if time runs out."""
        for rows in sorted((rows for rows in self.sizes.batches if rows <= keys.shape[0]), reverse=True):
            for context in self.sizes.contexts:
                exact, way = None, ""
                known: set[int] = set()
                for rate in self.sizes.rates:
                    if self.late(f"{rows} x {context}"):
                        break
                    request = Request(keys, values, context, rows, rate, self.config, self.sizes)
                    if request.hits in known:
                        continue
                    known.add(request.hits)
                    if exact is None:
                        exact, way = self._exact(request)
                    self.points.append(self._point(request, context, rows, exact, way))
                    yield self.points[-1]

    def _exact(self, request: Request) -> tuple[Time, str]:
        inputs = request.query, request.keys, request.values
        found = {}
        for name, way in list(self.ways.items()):
            begun = self.elapsed()
            try:
                found[name] = self.clock.time(partial(way, *inputs))
            except Exception as failure:  # a size that this backend can't take
                self.left_out[f"{name} at {tuple(request.keys.shape)}"] = f"{type(failure).__name__}: {failure}"[:200]
            self.spent[name] = self.spent.get(name, 0.0) + self.elapsed() - begun
            if self.spent[name] > self.seconds / 6 and len(self.ways) > 1:
                self.left_out[f"{name} from {tuple(request.keys.shape)} on"] = "it takes too long, compiling included"
                del self.ways[name]
        if not found:
            raise RuntimeError(f"no exact attention takes keys of {tuple(request.keys.shape)}: {self.left_out}")
        best = min(found, key=lambda name: found[name].median_s)
        return found[best], best

    def _point(self, request: Request, context: int, rows: int, exact: Time, way: str) -> Point:
        done = request.step(self.launch)
        groups = self.sizes.groups
        rate = float(done.match.hit.float().mean())
        wanted = request.hits / (rows * groups)
        if abs(rate - wanted) > 1e-6:
            raise RuntimeError(f"{rate:.3f} of the heads hit where {wanted:.3f} were made to: nothing is comparable")
        skipped = torch.where(done.match.hit, end(done.match.pos, request.config), 0).double().mean() / context
        read = int(done.group_keys_read.sum())
        mac = self.clock.time(partial(request.step, self.launch))
        return Point(
            context, rows, rate, float(skipped), read / (rows * groups * context), read, mac, exact, way,
            exact.median_s / mac.median_s,
        )  # fmt: skip

    def stages(self, keys: Tensor, values: Tensor) -> list[dict[str, Any]]:
        """Seconds of each launch for one request that hits everywhere, by context."""
        found = []
        for context in self.sizes.contexts:
            if self.late(f"stages at {context}"):
                break
            request = Request(keys, values, context, 1, 1.0, self.config, self.sizes)
            state, config, launch = request.state, request.config, self.launch
            position = torch.full((1,), context - 1, device=self.device)
            near = nearest_in_tiles(state, request.unrotated, position, config, launch)
            tables = (*near, position, self.sizes.groups, config.window, config, launch)
            schedule = make_schedule(*tables)
            spans = (
                request.query, request.keys, request.values, request.start, position, schedule, config, request.scale,
                launch,
            )  # fmt: skip
            pieces = attend_spans(*spans)
            merged = (state, request.unrotated, position, schedule, pieces)
            calls: dict[str, Callable[[], object]] = {
                "match": partial(nearest_in_tiles, state, request.unrotated, position, config, launch),
                "schedule": partial(make_schedule, *tables),
                "attend": partial(attend_spans, *spans),
                "merge": partial(merge_spans, *merged, write=True),
                "step": partial(request.step, launch),
            }
            times = {name: self.clock.time(call).median_s for name, call in calls.items()}
            # without a graph: what Python's launches cost a session in transformers
            times["step, not captured"] = self.clock.time(calls["step"], graph=False).median_s
            found.append({"context": context, **times})
        return found

    def costs(self) -> dict[str, Any]:
        """Constants of the break-even rule from the points, and in how many of them the rule is then right."""
        shape = AttentionShape(self.sizes.heads, self.sizes.groups, self.sizes.width)
        key_bytes, searched = shape.key_bytes / self.sizes.groups, self.config.window * shape.query_bytes
        exact = [(p.rows * p.context * shape.key_bytes, p.exact.median_s) for p in self.points]
        mac = [(p.keys_read * key_bytes + p.rows * searched, p.mac.median_s) for p in self.points]
        costs = fit_costs(exact, mac)
        group = self.sizes.heads // self.sizes.groups
        # here whole groups hit together; the rule takes a rate per head and raises it to the group's size
        right = sum(
            pays(p.context, p.rows, p.hit_rate ** (1 / group), shape, self.config, costs) == (p.speedup >= 1)
            for p in self.points
        )
        return {**asdict(costs), "points": len(self.points), "rule_right": right}


def plot(points: Sequence[Point], path: Path, title: str) -> Path:
    """Speed-up over batch size, one panel per context, one line per share of hits (paper Fig. 6)."""
    contexts = sorted({point.context for point in points})
    figure, axes = make_figure(3.2 * len(contexts) + 1, 3.6, columns=len(contexts))
    several = list(getattr(axes, "flat", [axes]))
    rates = sorted({_rate(point) for point in points})
    for one, context in zip(several, contexts, strict=True):
        for number, rate in enumerate(rates):
            line = sorted((p.rows, p.speedup) for p in points if p.context == context and _rate(p) == rate)
            colour = (0.1, 0.25 + 0.5 * number / max(1, len(rates) - 1), 0.8 - 0.6 * number / max(1, len(rates) - 1))
            if line:
                one.plot(*zip(*line, strict=True), marker="o", markersize=4, color=colour, label=f"{rate:.0%} hits")
        one.axhline(1, color="black", linewidth=0.8, linestyle="--")
        one.set_xscale("log", base=2)
        one.set_yscale("log")
        one.set_xlabel(f"batch, at {context:,} tokens")
    several[0].set_ylabel("exact attention's time over MAC's")
    several[-1].legend(frameon=False, fontsize="small")
    return save(figure, axes, path, title)


def _rate(point: Point) -> float:
    return round(point.hit_rate, 2)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs everything; 1 if a check failed."""
    parser = parser_for(__doc__, "mac-gpu.json and mac-gpu.png", seconds=400)
    parser.add_argument("--no-flex", action="store_true", help="leave out flex attention, which is compiled first")
    chosen = parser.parse_args(arguments)
    device, name = chosen_device(parser, chosen.device)
    # the paper's Fig. 6 searches 512 queries; rings in 16 bits as its release
    config = MacConfig(window=512, band=256, tau=0.8, min_length=0, ring_dtype="bfloat16")
    if chosen.tiny:
        config = replace(config, window=16, band=8, ring_dtype="float32")
    bench = Benchmark(device, TINY if chosen.tiny else Sizes(), config, chosen.seconds, not chosen.no_flex)
    content: dict[str, Any] = environment(device=name, config=asdict(config), sizes=asdict(bench.sizes))
    try:
        _run(bench, content, chosen.tiny, name, chosen.out)
    finally:
        _write(bench, content, chosen.out)
    bench.say_left_out()
    return 1 if any(item["failed"] for item in content["checks"]) else 0


def _run(bench: Benchmark, content: dict[str, Any], tiny: bool, name: str, out: Path) -> None:
    content["checks"] = []
    with torch.inference_mode():
        for case in cases(tiny):
            done = check(*case, 1 if tiny else 4, bench.device, bench.launch if INTERPRETED else None)
            content["checks"].append(done.to_dict())
            bench.say(f"{done.case}: {done.failed or 'ok'}, {done.error:.2g}, {done.hits} of {done.searches} hit")
        if any(item["failed"] for item in content["checks"]):
            bench.say("a check failed: nothing is timed")
            return
        keys, values = bench.make_keys()
        content["launches"] = bench.choose_launch(keys, values) if bench.device.type == "cuda" else {}
        content["launch"] = asdict(bench.launch)
        bench.say(f"{bench.launch}")
        bench.check_exact(keys, values)
        content["stages"] = bench.stages(keys, values)
        for point in bench.measure(keys, values):
            _write(bench, content, out)  # what there is, should the process be ended
            bench.say(f"{point.rows} x {point.context}, {point.hit_rate:.0%} hits, {point.read_share:.1%} read: "
                 f"{1e6 * point.mac.median_s:.0f} us, {1e6 * point.exact.median_s:.0f} us {point.exact_way}, "
                 f"{point.speedup:.2f}x")  # fmt: skip
    if not bench.points:
        return  # time was up, as `left_out` says: there is nothing to fit or draw
    try:
        content["costs"] = bench.costs()
    except ValueError as error:
        bench.left_out["costs"] = str(error)
    try:
        plot(bench.points, out / "mac-gpu.png", f"MAC attention, {name}")
    except ImportError:
        bench.left_out["plot"] = "matplotlib is not installed"


def _write(bench: Benchmark, content: dict[str, Any], out: Path) -> None:
    content["left_out"], content["elapsed_s"] = bench.left_out, bench.elapsed()
    content["points"] = [asdict(point) for point in bench.points]
    write_json(out / "mac-gpu.json", content)


if __name__ == "__main__":
    sys.exit(main())
