"""`comb bench parallel`: TTFT of a cold prompt over several workers, stage by stage (HYPIC sec. 6.5, Fig. 14).

In every repeat each method takes its turn with each number of workers, so that a machine that slows down slows all of
them; ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from comb import methods
from comb.bench.harness import BenchmarkReport, benchmark, ratios
from comb.bench.options import Methods, OfRandomModel, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.bench.simulate import CostModel, Trace, random_trace, read_trace, simulate
from comb.bench.work import RandomPrompt, first_token, vocabulary
from comb.engine.workers import CompileExecutor
from comb.engine.workers.processes import process_executor
from comb.evaluation.plot import Bars, Lines, Panel
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, fixed, mebibytes, ms, percent, spread
from comb.methods.base import Method
from comb.model.source import ModelSource

STAGES = ("dispatch", "transfer", "combine")


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
        """Random token ids in the lengths asked for.

        Raises:
            ValueError: for sizes below 1, or fewer than two segments.
        """
        if self.segments < 2 or min(self.segment_tokens, self.query_tokens) < 1 or self.spread < 0:
            raise ValueError(
                "segment parallelism takes at least two segments and one token in each and in the query, got "
                f"{self.segments} segments of {self.segment_tokens} tokens, {self.query_tokens} of query, spread "
                f"{self.spread:g}"
            )
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
    for title, own in _simulated(rows).items():
        remark = "With the compile, transfer and combine times that one worker has shown."
        found.append(TextTable(f"Simulated: {title}", simulated, own, [remark]))
    return found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Stages of TTFT over workers, measured then simulated (HYPIC Fig. 14), and both plans over the optimum."""
    measured = [row for row in rows if row["kind"] == "measured" and row["workers"]]
    method = measured[0]["method"]
    bars = [row for row in measured if row["method"] == method]
    known = {row["workers"] for row in bars}
    own = [group for title, group in _simulated(rows).items() if title.startswith(f"{method}, ")]
    bars += [row for group in own[:1] for row in group if row["policy"] == "lpt" and row["workers"] not in known]

    def stages(row: Row) -> dict[str, float]:
        return {name: s.median if isinstance(s, Timing) else s for name in STAGES for s in [row[f"{name}_s"]]}

    found: list[Panel] = [
        Bars(
            bars,
            lambda row: f"{row['workers']}, {row['kind']}",
            stages,
            f"cold time to first token, {method}, ms",
            STAGES,
        )
    ]
    for group in own[-1:]:
        label = f"workers, simulated: {group[0]['name']}"
        found.append(
            Lines(group, "workers", "over_optimum", label, "busiest over the least possible", "policy", log="x")
        )
    return found


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
            costs: dict[str, CostModel] = {}
            for row in measure_parallel(model, executor, specs, counts, prompt, options, costs):
                report.add(row)
    for row in simulate_beyond(costs, prompt, beyond, requests, name):
        report.add(row)
    report.facts["load_after"] = os.getloadavg()


def measure_parallel(
    model: Any, executor: CompileExecutor, specs: Sequence[str], workers: Sequence[int], prompt: RandomPrompt,
    options: ParallelOptions, costs: dict[str, CostModel],
) -> list[Row]:  # fmt: skip
    """Rows by method, then by number of workers (0 for `full`, which prefills the whole prompt here).

    Before anything is timed, each method's logits from workers must be those from compiling here.

    Args:
        workers: numbers of them, 1 among them: it is what the others are compared with.
        costs: is filled, by method, with costs fitted to the segments that one worker has compiled.

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
        samples: dict[tuple[str, int], list[dict[str, float]]] = defaultdict(list)
        segments: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
        plain = methods.create("full", model) if options.full else None
        total = sum(map(len, prompt.segments))
        for _ in tqdm(range(options.repeats), "repeats", leave=False):
            if plain is not None:
                combine = _combine(plain, plain.compile(prompt.segments), prompt)
                samples["full", 0].append({"dispatch": 0.0, "transfer": 0.0, "combine": combine})
            for spec, method in made.items():
                for count in workers:
                    run = executor.run(method, prompt.segments, workers=count)
                    combine = _combine(method, run.picaches, prompt)
                    samples[spec, count].append(
                        {"dispatch": run.dispatch_s, "transfer": run.transfer_s, "combine": combine}
                    )
                    if count == 1:
                        times = zip(prompt.segments, run.segment_s, strict=True)
                        segments[spec] += [(len(segment), s, run.decode_s / total) for segment, s in times]
    finally:
        torch.set_num_threads(before)
    if executor.stats.locally:
        raise ValueError(f"workers were lost on the way, so these are no times of workers: {executor.stats}")
    for spec, own in segments.items():
        combine = statistics.median(repeat["combine"] for repeat in samples[spec, 1])
        transfer = statistics.median(decode for _, _, decode in own)
        costs[spec] = CostModel.fitted([(tokens, s) for tokens, s, _ in own], transfer, combine)
    return [
        {
            "kind": "measured", "method": spec, "workers": count, "tokens": total, "cache_bytes": sizes.get(spec, 0),
            "costs": asdict(costs[spec]) if spec in costs else None,
            **_stages(own, samples[spec if count else specs[0], 1]),
        }
        for (spec, count), own in samples.items()
    ]  # fmt: skip


def simulate_beyond(
    costs: dict[str, CostModel], prompt: RandomPrompt, workers: Sequence[int], trace: Trace, name: str
) -> Iterator[Row]:
    """The measured prompt over more workers, with each method's costs; then a trace with those of the first."""
    lengths = [[len(segment) for segment in prompt.segments]]
    plans = [("this prompt", method, lengths) for method in costs]
    plans += [(name, method, [list(request) for request in trace]) for method in list(costs)[:1]]
    for title, method, asked in plans:
        for result in simulate(asked, workers, costs[method]):
            yield {"kind": "simulated", "name": title, "method": method, **result}


def _check(method: Method, executor: CompileExecutor, prompt: RandomPrompt) -> int:
    """Bytes of all PICaches. Raises ValueError unless workers give the logits that compiling here gives."""
    executor.check(method)
    few = prompt.segments[:2]
    logits = []
    for picaches in (executor.compile(method, few), [method.compile([segment])[0] for segment in few]):
        state = method.link(picaches, prompt.query)
        logits.append(state.logits[0])
        state.release()
    difference = float((logits[0] - logits[1]).abs().max())
    # threads may differ in how they add up: one rounding at the size of the largest logit
    allowed = 16 * torch.finfo(method.backbone.dtype).eps * float(logits[1].abs().max())
    if not difference <= allowed:
        raise ValueError(
            f"check failed: {method.name!r} over workers differs by {difference:.2g} (allowed {allowed:.2g})"
        )
    return sum(picache.nbytes for picache in executor.compile(method, prompt.segments))


def _combine(method: Method, picaches: Any, prompt: RandomPrompt) -> float:
    start = time.perf_counter()
    first_token(method, picaches, prompt.query)
    return time.perf_counter() - start


def _stages(own: Sequence[dict[str, float]], serial: Sequence[dict[str, float]]) -> Row:
    """Times of the stages and of all three; ratios to one worker within a repeat."""
    whole, alone = ([sum(stages.values()) for stages in repeats] for repeats in (own, serial))
    stages = {f"{name}_s": Timing.of([repeat[name] for repeat in own]) for name in STAGES}
    combine = [repeat["combine"] for repeat in own]
    return {
        "ttft_s": Timing.of(whole),
        **stages,
        "speedup": ratios(alone, whole),
        "combine_share": ratios(combine, alone),
    }


def _simulated(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        if row["kind"] == "simulated":
            groups.setdefault(f"{row['method']}, {row['name']}", []).append(row)
    return groups
