"""`comb bench context-length`: time to first token against the length of the context (EPIC sec. 5.6, Fig. 9).

Random token segments and a random query, so that any model can be measured, also one with random weights. In every
repeat all methods take their turn before the next repeat begins, so that a machine that slows down slows all of them;
ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.options import Lengths, Methods, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.evaluation.plot import Bars, Lines, Panel, in_order
from comb.evaluation.table import Column, Row, TextTable, mebibytes, ms, spread


@dataclass(frozen=True)
class ContextLengthOptions(RandomModelOptions):
    """Of `comb bench context-length`."""

    methods: Methods = "full,naive,legolink:16,cacheblend:0.15"
    lengths: Lengths = "512,1024,2048,4096"
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment")] = 512
    query_tokens: QueryTokens = 32
    repeats: Repeats = 5


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """TTFT per length and method, and below it where it goes at the longest length."""
    columns = (
        Column("method", "method", names=True),
        Column("context", "tokens", names=True),
        Column("cached ms", "ttft_cached_s", ms, "link and first token, median ±half the distance of the quartiles"),
        Column("cold ms", "ttft_cold_s", ms, "with compiling"),
        Column("full/method", "speedup", spread, "cached times of full and the method in the same repeat, quartiles"),
        Column("computed", "computed_tokens", note="tokens that passed through the backbone, cached"),
        Column("cache MiB", "cache_bytes", mebibytes),
        Column("peak MiB", "peak_memory_bytes", mebibytes, "what linking and the first token add"),
    )
    found = [TextTable("Time to first token against context length", columns, rows)]
    if last := _longest(rows):
        stages = [Column(name, name, ms) for name in in_order(row["stages_s"] for row in last)]
        lines: list[Row] = [{"method": row["method"], **row["stages_s"]} for row in last]
        title = f"Where the cached TTFT goes at {last[0]['tokens']} tokens, ms"
        found.append(TextTable(title, [columns[0], *stages], lines))
    return found


def panels(rows: Sequence[Row]) -> list[Panel]:
    """TTFT over context length (EPIC Fig. 9), and where it goes at the longest one."""
    last = _longest(rows)
    where = f"where it goes at {last[0]['tokens']} tokens, ms" if last else ""
    return [
        Lines(rows, "tokens", "ttft_cached_s", "context, tokens", "cached time to first token, ms", scale=1000),
        Bars(last, lambda row: str(row["method"]), lambda row: row["stages_s"], where),
    ]


@benchmark("context-length", tables, panels)
def context_length(options: ContextLengthOptions, report: BenchmarkReport) -> None:
    """TTFT against context length, as ratios to full recompute in one run, and where it goes (EPIC Fig. 9)."""
    import torch

    from comb.bench.work.first_tokens import measure_context_length

    specs, lengths = split_methods(options.methods, control=False), integers(options.lengths, "--lengths")
    model = options.load(lengths[-1] + options.query_tokens + 1)
    report.heading = f"{options.title}: segments of {options.segment_tokens}, query of {options.query_tokens} tokens"
    report.facts |= {"threads": torch.get_num_threads(), "dtype": str(model.dtype), "device": str(model.device)}
    shape = options.segment_tokens, options.query_tokens
    for row in measure_context_length(model, specs, lengths, shape, repeats=options.repeats, seed=options.seed):
        report.add(row)


def _longest(rows: Sequence[Row]) -> list[Row]:
    measured = [row for row in rows if row.get("stages_s")]
    return [row for row in measured if row["tokens"] == max(each["tokens"] for each in measured)]
