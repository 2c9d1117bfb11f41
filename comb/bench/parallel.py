"""`comb bench parallel`: TTFT of a cold prompt over several workers, stage by stage (HYPIC sec. 6.5, Fig. 14).

In every repeat each method takes its turn with each number of workers, so that a machine that slows down slows all of
them; ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it. What one worker has
shown is replayed for more of them.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comb.bench.harness import BenchmarkReport, benchmark, in_turns, ratios
from comb.bench.options import Methods, OfRandomModel, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.evaluation.plot import Bars, Panel
from comb.evaluation.table import Column, Row, TextTable, Timing, fixed, ms, percent, spread

if TYPE_CHECKING:
    from comb.engine.workers import CompileExecutor
    from comb.engine.workers.executor import Plan
    from comb.evaluation.random_prompts import RandomPrompt
    from comb.methods.base import Method

STAGES = ("dispatch", "transfer", "combine")


@dataclass(frozen=True)
class ParallelOptions(RandomModelOptions):
    methods: Methods = "naive,legolink:16"
    workers: Annotated[str, typer.Option(help="numbers of workers to measure, 1 among them")] = "1,2"
    beyond: Annotated[str, typer.Option(help="numbers of workers to simulate")] = "1,2,4,8,16,32,64"
    segments: Annotated[int, typer.Option(min=2, help="cold segments in the prompt")] = 11
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment")] = 480
    query_tokens: QueryTokens = 32
    repeats: Repeats = 5
    threads: Annotated[int, typer.Option(min=1, help="of torch, in every worker and here")] = 1
    kv_heads: OfRandomModel = 4


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """What was measured, and what more workers would do."""
    names = (Column("method", "method", names=True), Column("workers", "workers", names=True))
    measured = (
        *names,
        Column("TTFT ms", "ttft_s", ms, "median ±half the distance of the quartiles, of interleaved repeats"),
        Column("dispatch", "dispatch_s", ms, "the busiest worker's computing"),
        Column("transfer", "transfer_s", ms, "what serialising, sending and checking could not hide behind it"),
        Column("combine", "combine_s", ms, "link and first token"),
        Column("1 worker/this", "speedup", spread, "within a repeat, with quartiles"),
        Column("combine %", "combine_share", lambda share: spread(share, percent), "of the TTFT with one worker"),
    )
    simulated = (*names, *(Column(column.name, column.value, ms) for column in measured[2:6]),
                 Column("speed-up", "speedup", fixed(2)))  # fmt: skip
    own, made_up = ([row for row in rows if row["kind"] == kind] for kind in ("measured", "simulated"))
    return [
        TextTable("A cold prompt over several workers", measured, own),
        TextTable("Simulated with the times that one worker has shown", simulated, made_up),
    ]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Stages of TTFT over workers, measured then simulated (HYPIC Fig. 14)."""

    def stages(row: Row) -> dict[str, float]:
        return {name: s.median if isinstance(s, Timing) else s for name in STAGES for s in [row[f"{name}_s"]]}

    own = [row for row in rows if row["method"] == rows[0]["method"]]
    counts = {row["workers"] for row in own if row["kind"] == "measured"}
    shown = [row for row in own if row["kind"] == "measured" or row["workers"] not in counts]
    label = f"cold time to first token, {rows[0]['method']}, ms"
    return [Bars(shown, lambda row: f"{row['workers']}, {row['kind']}", stages, label)]


@benchmark("parallel", tables, panels)
def parallel(options: ParallelOptions, report: BenchmarkReport) -> None:
    """TTFT of a cold prompt over several workers, by dispatch, transfer and combine, and simulated beyond (HYPIC)."""
    from comb.engine.workers.ray_actors import ray_executor
    from comb.evaluation.random_prompts import RandomPrompt, vocabulary
    from comb.model.source import ModelSource

    specs = split_methods(options.methods, control=False)
    counts, beyond = integers(options.workers, "--workers"), integers(options.beyond, "--beyond")
    report.facts["load_before"] = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        tokens = options.segments * options.segment_tokens
        model = options.load(tokens + options.query_tokens + 1)
        prompt = RandomPrompt.random(
            vocabulary(model), tokens, options.segment_tokens, options.query_tokens, options.seed
        )
        source = ModelSource(options.model, {"backbone": options.backbone, "dtype": options.dtype}, str(model.device))
        if options.is_random:
            model.save_pretrained(folder)
            source = ModelSource(folder, device=str(model.device))
        report.heading = (
            f"{options.title}: {options.segments} segments of {options.segment_tokens}, query of "
            f"{options.query_tokens} tokens, {options.threads} thread(s) each"
        )
        with ray_executor(source, max(counts), threads=options.threads) as executor:
            measured = measure_parallel(model, executor, specs, counts, prompt, options)
    for row in [*measured, *simulate(measured, beyond)]:
        report.add(row)
    report.facts["load_after"] = os.getloadavg()


def measure_parallel(
    model: Any, executor: CompileExecutor, specs: Sequence[str], workers: Sequence[int], prompt: RandomPrompt,
    options: ParallelOptions,
) -> list[Row]:  # fmt: skip
    """Rows by method, then by number of workers.

    Before anything is timed, each method's logits from workers must be those from compiling here. ``segments_s`` are
    the median seconds of each segment, ``decode_s`` those of taking one in.

    Args:
        workers: numbers of them, 1 among them: it is what the others are compared with.

    Raises:
        ValueError: for numbers of workers that the executor doesn't have, or when a check fails.
    """
    import torch

    from comb import methods
    from comb.evaluation.random_prompts import check_logits, first_token

    def once(method: Method, count: int) -> dict[str, Any]:
        """Seconds by stage of one cold prompt, and of every segment."""
        run = executor.run(method, prompt.segments, workers=count)
        start = time.perf_counter()
        first_token(method, run.picaches, prompt.query)
        stages = {"dispatch": run.dispatch_s, "transfer": run.transfer_s, "combine": time.perf_counter() - start}
        return {**stages, "segments": run.segment_s, "decode": run.decode_s}

    if 1 not in workers or not all(1 <= count <= executor.workers for count in workers):
        raise ValueError(f"workers are counts from 1 to {executor.workers}, 1 among them; got {list(workers)}")
    before = torch.get_num_threads()
    torch.set_num_threads(options.threads)  # as the workers were told; reset at the end
    try:
        made = {spec: methods.create(spec, model) for spec in specs}
        few = prompt.segments[:2]
        for method in made.values():
            executor.check(method)
            compiled = executor.compile(method, few), [method.compile([segment])[0] for segment in few]
            logits, wanted = (method.link(picaches, prompt.query).logits[0] for picaches in compiled)
            check_logits(f"{method.name!r} over workers differs", logits, wanted, method.backbone.dtype)
        calls = {(spec, count): partial(once, made[spec], count) for spec in specs for count in workers}
        taken = in_turns(calls, options.repeats)
    finally:
        torch.set_num_threads(before)
    if executor.stats.locally:
        raise ValueError(f"workers were lost on the way, so these are no times of workers: {executor.stats}")
    rows = []
    for (spec, count), own in taken.items():
        whole, alone = ([sum(run[name] for name in STAGES) for run in runs] for runs in (own, taken[spec, 1]))
        rows.append({
            "kind": "measured", "method": spec, "workers": count, "ttft_s": Timing.of(whole),
            **{f"{name}_s": Timing.of([run[name] for run in own]) for name in STAGES},
            "speedup": ratios(alone, whole), "combine_share": ratios([run["combine"] for run in own], alone),
            "segments_s": [statistics.median(times) for times in zip(*(run["segments"] for run in own), strict=True)],
            "decode_s": statistics.median(run["decode"] for run in own) / len(prompt.segments),
        })  # fmt: skip
    return rows


def simulate(measured: Sequence[Row], workers: Sequence[int]) -> Iterator[Row]:
    """The measured prompt over other numbers of workers, each with a core of its own, as one worker has shown it."""
    from comb.engine.workers.executor import lpt

    for row in measured:
        if row["workers"] == 1:
            times = (row["segments_s"], row["decode_s"], row["combine_s"].median)
            alone = replay(lpt(times[0], 1), *times)["ttft_s"]
            for count in workers:
                stages = replay(lpt(times[0], count), *times)
                yield {"kind": "simulated", "method": row["method"], "workers": count, **stages,
                       "speedup": alone / stages["ttft_s"]}  # fmt: skip


def replay(plan: Plan, compile_s: Sequence[float], decode_s: float, combine_s: float) -> dict[str, float]:
    """One request's seconds to the first token, in all and by stage.

    Workers compile side by side, the combiner takes results in one by one as they come: ``dispatch_s`` is the busiest
    worker, ``transfer_s`` what then still waits to be taken in.
    """
    finished = sorted(end for indices in plan for end in accumulate(compile_s[index] for index in indices))
    clock = 0.0
    for end in finished:
        clock = max(clock, end) + decode_s
    stages = {"dispatch_s": finished[-1], "transfer_s": clock - finished[-1], "combine_s": combine_s}
    return {"ttft_s": clock + combine_s, **stages}
