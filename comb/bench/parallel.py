"""`comb bench parallel`: TTFT of a cold prompt over several workers, stage by stage (HYPIC sec. 6.5, Fig. 14).

In every repeat each method takes its turn with each number of workers, so that a machine that slows down slows all of
them; ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from comb.bench.harness import BenchmarkReport, benchmark, in_turns, ratios
from comb.bench.options import Methods, OfRandomModel, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.evaluation.plot import Bars, Panel
from comb.evaluation.table import Column, Row, TextTable, Timing, ms, percent, spread

if TYPE_CHECKING:
    from comb.engine.workers import CompileExecutor
    from comb.evaluation.random_prompts import RandomPrompt
    from comb.methods.base import Method

STAGES = ("dispatch", "transfer", "combine")


@dataclass(frozen=True)
class ParallelOptions(RandomModelOptions):
    methods: Methods = "naive,legolink:16"
    workers: Annotated[str, typer.Option(help="numbers of workers to measure, 1 among them")] = "1,2"
    segments: Annotated[int, typer.Option(min=2, help="cold segments in the prompt")] = 11
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment")] = 480
    query_tokens: QueryTokens = 32
    repeats: Repeats = 5
    threads: Annotated[int, typer.Option(min=1, help="of torch, in every worker and here")] = 1
    kv_heads: OfRandomModel = 4


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """TTFT per method and number of workers, by stage."""
    columns = (
        Column("method", "method", names=True),
        Column("workers", "workers", names=True),
        Column("TTFT ms", "ttft_s", ms, "median ±half the distance of the quartiles, of interleaved repeats"),
        Column("dispatch", "dispatch_s", ms, "the busiest worker's computing"),
        Column("transfer", "transfer_s", ms, "what serialising, sending and checking could not hide behind it"),
        Column("combine", "combine_s", ms, "link and first token"),
        Column("1 worker/this", "speedup", spread, "within a repeat, with quartiles"),
        Column("combine %", "combine_share", lambda share: spread(share, percent), "of the TTFT with one worker"),
    )
    return [TextTable("A cold prompt over several workers", columns, rows)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Stages of TTFT over workers (HYPIC Fig. 14)."""

    def stages(row: Row) -> dict[str, float]:
        return {name: row[f"{name}_s"].median for name in STAGES}

    own = [row for row in rows if row["method"] == rows[0]["method"]]
    return [Bars(own, lambda row: str(row["workers"]), stages, f"cold time to first token, {rows[0]['method']}, ms")]


@benchmark("parallel", tables, panels)
def parallel(options: ParallelOptions, report: BenchmarkReport) -> None:
    """TTFT of a cold prompt over several workers, by dispatch, transfer and combine (HYPIC)."""
    from comb.engine.workers import CompileExecutor
    from comb.evaluation.random_prompts import RandomPrompt
    from comb.model.source import ModelSource

    specs = split_methods(options.methods, control=False)
    counts = integers(options.workers, "--workers")
    report.facts["load_before"] = os.getloadavg()
    with tempfile.TemporaryDirectory() as folder:
        tokens = options.segments * options.segment_tokens
        model = options.load(tokens + options.query_tokens + 1)
        prompt = RandomPrompt.random(model, tokens, options.segment_tokens, options.query_tokens, options.seed)
        source = ModelSource(options.model, {"backbone": options.backbone, "dtype": options.dtype}, str(model.device))
        if options.is_random:
            model.save_pretrained(folder)
            source = ModelSource(folder, device=str(model.device))
        report.heading = (
            f"{options.title}: {options.segments} segments of {options.segment_tokens}, query of "
            f"{options.query_tokens} tokens, {options.threads} thread(s) each"
        )
        with CompileExecutor(source, max(counts), threads=options.threads) as executor:
            measured = measure_parallel(model, executor, specs, counts, prompt, options)
    for row in measured:
        report.add(row)
    report.facts["load_after"] = os.getloadavg()


def measure_parallel(
    model: Any, executor: CompileExecutor, specs: Sequence[str], workers: Sequence[int], prompt: RandomPrompt,
    options: ParallelOptions,
) -> list[Row]:  # fmt: skip
    """Rows by method, then by number of workers.

    Before anything is timed, each method's logits from workers must be those from compiling here.

    Args:
        workers: numbers of them, 1 among them: it is what the others are compared with.

    Raises:
        ValueError: for numbers of workers that the executor doesn't have, or when a check fails.
    """
    import torch

    from comb import methods
    from comb.evaluation.random_prompts import check_logits, first_token

    def once(method: Method, count: int) -> dict[str, float]:
        """Seconds by stage of one cold prompt."""
        run = executor.run(method, prompt.segments, workers=count)
        start = time.perf_counter()
        first_token(method, run.picaches, prompt.query)
        return {"dispatch": run.dispatch_s, "transfer": run.transfer_s, "combine": time.perf_counter() - start}

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
            "method": spec, "workers": count, "ttft_s": Timing.of(whole),
            **{f"{name}_s": Timing.of([run[name] for run in own]) for name in STAGES},
            "speedup": ratios(alone, whole), "combine_share": ratios([run["combine"] for run in own], alone),
        })  # fmt: skip
    return rows
