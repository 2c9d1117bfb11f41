"""`comb bench parallel`: TTFT of a cold prompt over several workers, stage by stage (HYPIC sec. 6.5, Fig. 14).

In every repeat each method takes its turn with each number of workers, so that a machine that slows down slows all of
them; ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from comb import methods
from comb.bench.harness import BenchmarkReport, benchmark, in_turns, ratios
from comb.bench.options import Methods, OfRandomModel, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.bench.simulate import CostModel, Trace, random_trace, read_trace, simulate
from comb.bench.work import RandomPrompt, check_logits, first_token, vocabulary
from comb.engine.workers import CompileExecutor
from comb.engine.workers.processes import process_executor
from comb.evaluation.plot import Bars, Lines, Panel
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, fixed, mebibytes, ms, percent, spread
from comb.methods.base import Method
from comb.model.source import ModelSource

STAGES = ("dispatch", "transfer", "combine")
THIS = "this prompt"


@dataclass(frozen=True)
class ParallelOptions(RandomModelOptions):
    """Of `comb bench parallel`."""

    methods: Methods = "naive,legolink:16"
    workers: Annotated[str, typer.Option(help="numbers of workers to measure, 1 among them")] = "1,2"
    beyond: Annotated[str, typer.Option(help="numbers of workers to simulate, at most 64")] = "1,2,4,8,16,32,64"
    segments: Annotated[int, typer.Option(min=2, help="cold segments in the prompt")] = 11
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment; their median with --spread")] = 480
    spread: Annotated[float, typer.Option(min=0, help="sigma of log-normal segment lengths; 0: all equal")] = 0.0
    query_tokens: QueryTokens = 32
    repeats: Repeats = 5
    full: Annotated[bool, typer.Option("--full/--no-full", help="prefill the whole prompt too")] = False
    threads: Annotated[int, typer.Option(min=1, help="of torch, in every worker and here")] = 1
    trace: Annotated[
        Path | None, typer.Option(help="segment lengths to simulate: one JSON list per request and line")
    ] = None
    kv_heads: OfRandomModel = 4

    def prompt(self, vocab: int) -> RandomPrompt:
        """Random token ids in the lengths asked for."""
        (lengths,) = random_trace(1, self.segments, self.segment_tokens, sigma=self.spread, seed=self.seed)
        generator = torch.Generator().manual_seed(self.seed)
        parts = [torch.randint(vocab, (size,), generator=generator).tolist() for size in [*lengths, self.query_tokens]]
        return RandomPrompt(tuple(tuple(part) for part in parts[:-1]), tuple(parts[-1]))


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """What was measured, then what other numbers of workers and another plan would do."""
    measured = (
        Column("method", "method", names=True),
        Column("workers", "workers", names=True),
        Column("TTFT ms", "ttft_s", ms, "median ±half the distance of the quartiles, of interleaved repeats"),
        Column("dispatch", "dispatch_s", ms, "the busiest worker's computing"),
        Column("transfer", "transfer_s", ms, "what serialising, sending and checking could not hide behind it"),
        Column("combine", "combine_s", ms, "link and first token"),
        Column("1 worker/this", "speedup", spread, "within a repeat, with quartiles"),
        Column("combine %", "combine_share", lambda share: spread(share, percent), "of the TTFT with one worker"),
        Column("MiB", "cache_bytes", mebibytes),
    )
    simulated = (
        Column("workers", "workers", names=True),
        Column("plan", "policy", names=True),
        *(Column(name, f"{name.split()[0].lower()}_s", ms) for name in ("TTFT ms", *STAGES)),
        Column("speed-up", "speedup", fixed(2)),
        Column("over optimum", "over_optimum", fixed(3), "the busiest worker's tokens over the least possible, mean"),
        Column("worst", "worst_over_optimum", fixed(3)),
        Column("exact %", "exact", percent, "where the search for it did not give up; elsewhere over a lower bound"),
    )
    found = [TextTable("A cold prompt over several workers", measured, [r for r in rows if r["kind"] == "measured"])]
    for title, own in groupby(rows[len(found[0].rows) :], lambda row: f"Simulated: {row['method']}, {row['name']}"):
        remark = "With the compile, transfer and combine times that one worker has shown."
        found.append(TextTable(title, simulated, list(own), [remark]))
    return found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Stages of TTFT over workers, measured then simulated (HYPIC Fig. 14), and both plans over the optimum."""
    method = next(row["method"] for row in rows if row.get("workers"))
    own = [row for row in rows if row["method"] == method]
    measured = [row for row in own if row["kind"] == "measured"]
    counts = {row["workers"] for row in measured}
    beyond = [row for row in own if row["kind"] == "simulated"]
    lpt = [row for row in beyond if row["name"] == THIS and row["policy"] == "lpt" and row["workers"] not in counts]

    def stages(row: Row) -> dict[str, float]:
        return {name: s.median if isinstance(s, Timing) else s for name in STAGES for s in [row[f"{name}_s"]]}

    bars = Bars(
        [*measured, *lpt], lambda row: f"{row['workers']}, {row['kind']}", stages,
        f"cold time to first token, {method}, ms",
    )  # fmt: skip
    others = [row for row in beyond if row["name"] != THIS]
    label = "workers, simulated: " + "".join(row["name"] for row in others[:1])
    over = Lines(others, "workers", "over_optimum", label, "busiest over the least possible", "policy", log="x")
    return [bars, over]


@benchmark("parallel", tables, panels)
def parallel(options: ParallelOptions, report: BenchmarkReport) -> None:
    """TTFT of a cold prompt over several workers, by dispatch, transfer and combine, and simulated beyond (HYPIC)."""
    specs = split_methods(options.methods, control=False)
    counts, beyond = integers(options.workers, "--workers"), integers(options.beyond, "--beyond")
    requests = random_trace(200, options.segments, options.segment_tokens, seed=options.seed)
    name = f"200 requests of {options.segments} log-normal lengths"
    if options.trace is not None:
        requests, name = read_trace(options.trace), str(options.trace)
    report.facts["load_before"] = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        longest = len(options.prompt(options.vocab).flat) + 1
        model = options.load(longest)
        prompt = options.prompt(vocabulary(model))
        source = ModelSource(options.model, {"backbone": options.backbone, "dtype": options.dtype}, str(model.device))
        if options.is_random:
            model.save_pretrained(folder)
            source = ModelSource(folder, device=str(model.device))
        report.facts |= {"lengths": [len(segment) for segment in prompt.segments], "dtype": str(model.dtype)}
        report.heading = (
            f"{options.title}: {options.segments} segments of {options.segment_tokens}, query of "
            f"{options.query_tokens} tokens, {options.threads} thread(s) each"
        )
        with process_executor(source, max(counts), threads=options.threads) as executor:
            measured = measure_parallel(model, executor, specs, counts, prompt, options)
    for row in measured:
        report.add(row)
    for row in simulate_beyond(measured, prompt, beyond, requests, name):
        report.add(row)
    report.facts["load_after"] = os.getloadavg()


def measure_parallel(
    model: Any, executor: CompileExecutor, specs: Sequence[str], workers: Sequence[int], prompt: RandomPrompt,
    options: ParallelOptions,
) -> list[Row]:  # fmt: skip
    """Rows by method, then by number of workers (0: `full`, the whole prompt here).

    Before anything is timed, each method's logits from workers must be those from compiling here. ``costs`` are fitted
    to the segments that one worker has compiled.

    Args:
        workers: numbers of them, 1 among them: it is what the others are compared with.

    Raises:
        ValueError: for numbers of workers that the executor doesn't have, or when a check fails.
    """
    if 1 not in workers or not all(1 <= count <= executor.workers for count in workers):
        raise ValueError(f"workers are counts from 1 to {executor.workers}, 1 among them; got {list(workers)}")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)  # as the workers were told; reset at the end
    try:
        made = {spec: methods.create(spec, model) for spec in specs}
        sizes = {spec: _check(method, executor, prompt) for spec, method in made.items()}
        calls = {("full", 0): partial(_once, methods.create("full", model), None, 0, prompt)} if options.full else {}
        for spec, method in made.items():
            calls |= {(spec, count): partial(_once, method, executor, count, prompt) for count in workers}
        taken = in_turns(calls, options.repeats)
    finally:
        torch.set_num_threads(before)
    if executor.stats.locally:
        raise ValueError(f"workers were lost on the way, so these are no times of workers: {executor.stats}")
    costs = {spec: _fitted(taken[spec, 1], prompt) for spec in specs}
    return [
        {
            "kind": "measured", "method": spec, "workers": count, "tokens": sum(map(len, prompt.segments)),
            "cache_bytes": sizes.get(spec, 0), "costs": asdict(costs[spec]) if count else None,
            **_stages(own, taken[spec if count else specs[0], 1]),
        }
        for (spec, count), own in taken.items()
    ]  # fmt: skip


def simulate_beyond(
    measured: Sequence[Row], prompt: RandomPrompt, workers: Sequence[int], trace: Trace, name: str
) -> Iterator[Row]:
    """The measured prompt over more workers, with each method's costs; then a trace with those of the first."""
    costs = {row["method"]: CostModel(**row["costs"]) for row in measured if row["costs"]}
    plans = [(THIS, method, [[len(segment) for segment in prompt.segments]]) for method in costs]
    plans += [(name, method, [list(request) for request in trace]) for method in list(costs)[:1]]
    for title, method, asked in plans:
        for result in simulate(asked, workers, costs[method]):
            yield {"kind": "simulated", "name": title, "method": method, **result}


def _once(method: Method, executor: CompileExecutor | None, workers: int, prompt: RandomPrompt) -> dict[str, Any]:
    """Seconds by stage of one cold prompt, and of every segment; without an executor it is compiled (`full`: kept)."""
    if executor is None:
        return {"dispatch": 0.0, "transfer": 0.0, "combine": _combine(method, method.compile(prompt.segments), prompt)}
    run = executor.run(method, prompt.segments, workers=workers)
    combine = _combine(method, run.picaches, prompt)
    stages = {"dispatch": run.dispatch_s, "transfer": run.transfer_s, "combine": combine}
    return {**stages, "segments": run.segment_s, "decode": run.decode_s}


def _combine(method: Method, picaches: Any, prompt: RandomPrompt) -> float:
    start = time.perf_counter()
    first_token(method, picaches, prompt.query)
    return time.perf_counter() - start


def _fitted(repeats: Sequence[dict[str, Any]], prompt: RandomPrompt) -> CostModel:
    """Costs of what one worker has compiled."""
    lengths = [len(segment) for segment in prompt.segments]
    segments = [(n, s) for repeat in repeats for n, s in zip(lengths, repeat["segments"], strict=True)]
    transfer, combine = (statistics.median(repeat[name] for repeat in repeats) for name in ("decode", "combine"))
    return CostModel.fitted(segments, transfer / sum(lengths), combine)


def _check(method: Method, executor: CompileExecutor, prompt: RandomPrompt) -> int:
    """Bytes of all PICaches. Raises ValueError unless workers give the logits that compiling here gives."""
    executor.check(method)
    few = prompt.segments[:2]
    logits = []
    for picaches in (executor.compile(method, few), [method.compile([segment])[0] for segment in few]):
        state = method.link(picaches, prompt.query)
        logits.append(state.logits[0])
        state.release()
    check_logits(f"{method.name!r} over workers differs", logits[0], logits[1], method.backbone.dtype)
    return sum(picache.nbytes for picache in executor.compile(method, prompt.segments))


def _stages(own: Sequence[dict[str, Any]], serial: Sequence[dict[str, Any]]) -> Row:
    """Times of the stages and of all three; ratios to one worker within a repeat."""
    whole, alone = ([sum(repeat[name] for name in STAGES) for repeat in repeats] for repeats in (own, serial))
    return {
        "ttft_s": Timing.of(whole),
        **{f"{name}_s": Timing.of([repeat[name] for repeat in own]) for name in STAGES},
        "speedup": ratios(alone, whole),
        "combine_share": ratios([repeat["combine"] for repeat in own], alone),
    }
