"""`comb bench context-length`: time to first token against the length of the context (EPIC sec. 5.6, Fig. 9).

Random token segments and a random query, so that any model can be measured, also one with random weights. In every
repeat all methods take their turn before the next repeat begins, so that a machine that slows down slows all of them;
ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from comb import methods
from comb.bench.harness import BenchmarkReport, benchmark, or_refused, ratios
from comb.bench.memory import peak_memory
from comb.bench.options import Lengths, Methods, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.bench.work import RandomPrompt, check_logits, first_token, synchronize, vocabulary
from comb.cache.picache import PICache
from comb.evaluation.plot import Bars, Lines, Panel, in_order
from comb.evaluation.table import Column, Row, TextTable, Timing, mebibytes, ms, spread
from comb.methods.base import Method
from comb.methods.prefixes import prefixes_of


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
    specs, lengths = split_methods(options.methods, control=False), integers(options.lengths, "--lengths")
    model = options.load(lengths[-1] + options.query_tokens + 1)
    report.heading = f"{options.title}: segments of {options.segment_tokens}, query of {options.query_tokens} tokens"
    report.facts |= {"threads": torch.get_num_threads(), "dtype": str(model.dtype), "device": str(model.device)}
    for row in measure_context_length(model, specs, lengths, options):
        report.add(row)


def measure_context_length(
    model: Any, specs: Sequence[str], lengths: Sequence[int], options: ContextLengthOptions
) -> Iterator[Row]:
    """Rows by length, then by method.

    Before anything is timed, every method links a short prompt: its logits must be finite, and those of `full` must be
    the plain model's. A method that fails is refused.

    Raises:
        ValueError: when `full` differs from the plain model.
    """
    made: dict[str, Method] = {}
    unfit: dict[str, Row] = {}
    vocab = vocabulary(model)
    short = RandomPrompt.random(vocab, 40, 20, 8, options.seed)
    for spec in specs:
        with or_refused(unfit.setdefault(spec, {"refused": ""})):
            made[spec] = _checked(methods.create(spec, model), short)
        if methods.parse(spec)[0] == "full" and unfit[spec]["refused"]:
            raise ValueError(unfit[spec]["refused"])
    for length in tqdm(lengths, "context lengths", leave=False):
        prompt = RandomPrompt.random(vocab, length, options.segment_tokens, options.query_tokens, options.seed)
        rows: dict[str, Row] = {spec: {"method": spec, "tokens": length, **unfit[spec]} for spec in specs}
        turns: dict[str, list[dict[str, Any]]] = {spec: [] for spec in made}
        for repeat in tqdm(range(-1, options.repeats), f"{length} tokens", leave=False):
            compiled: dict[Any, tuple[list[PICache], float]] = {}
            for spec, method in made.items():
                if not rows[spec]["refused"]:
                    with or_refused(rows[spec]):
                        picaches, compile_s = _compiled(method, prompt, compiled)
                        if repeat < 0:
                            rows[spec] |= _warm_up(method, picaches, prompt)
                        else:
                            turns[spec].append(_turn(method, picaches, compile_s, prompt))
                        prefixes_of(method.backbone).clear()
        for spec, row in rows.items():
            yield row | ({} if row["refused"] else _summary(turns[spec], turns.get("full", [])))


@torch.no_grad()
def _checked(method: Method, prompt: RandomPrompt) -> Method:
    """Raises ValueError unless the logits on a short prompt are finite, and for `full` those of the plain model."""
    state = method.link(method.compile(prompt.segments), prompt.query)
    logits = state.logits[0]
    state.release()
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("check failed: the logits of a short prompt are not finite")
    if method.name == "full":
        ids = torch.tensor([prompt.flat], device=logits.device)
        plain = method.backbone(input_ids=ids).logits[0, -1].float()
        check_logits("`full` differs from the plain model", logits, plain, method.backbone.dtype)
    return method


def _compiled(
    method: Method, prompt: RandomPrompt, compiled: dict[Any, tuple[list[PICache], float]]
) -> tuple[list[PICache], float]:
    """PICaches and the seconds that they took; what several methods compile alike is compiled once per repeat."""
    kind = (method.compile_name or method.name, method.fingerprint)
    if kind not in compiled:
        start = time.perf_counter()
        picaches = method.compile(prompt.segments)
        synchronize(method.backbone.device)
        compiled[kind] = picaches, time.perf_counter() - start
    return compiled[kind]


def _warm_up(method: Method, picaches: Sequence[PICache], prompt: RandomPrompt) -> Row:
    """Lets everything lazy happen, and takes what isn't a time."""
    counts: list[tuple[int, int]] = []

    def cached() -> None:
        state = method.link(picaches, prompt.query)
        counts.append((sum(state.computed), state.recomputed_tokens))
        state.logits.argmax(-1).cpu()
        state.release()

    if method.name == "prefix":  # it keeps what it computed by itself
        cached()
    peak = peak_memory(method.backbone.device, cached)
    kept = sum(picache.nbytes for picache in picaches)
    if method.name == "prefix":
        kept = prefixes_of(method.backbone).nbytes
    # of `full` PICaches are token ids alone, which don't count
    kept = 0 if method.name == "full" else kept
    computed, recomputed = counts[-1]
    return {
        "computed_tokens": computed,
        "recomputed_tokens": recomputed,
        "peak_memory_bytes": peak,
        "cache_bytes": kept,
    }


def _turn(method: Method, picaches: Sequence[PICache], compile_s: float, prompt: RandomPrompt) -> dict[str, Any]:
    """Seconds of one cold and one cached first token, and the cached one's stages."""
    cold = cached = first_token(method, picaches, prompt.query)
    if method.name == "prefix":
        cached = first_token(method, picaches, prompt.query)
    return {"cold": compile_s + sum(cold.values()), "cached": sum(cached.values()), "stages": cached}


def _summary(turns: Sequence[dict[str, Any]], full: Sequence[dict[str, Any]]) -> Row:
    """Over all repeats; ratios are to `full`, of the same repeat."""
    cached, stages = [turn["cached"] for turn in turns], [turn["stages"] for turn in turns]
    return {
        "ttft_cached_s": Timing.of(cached),
        "ttft_cold_s": Timing.of([turn["cold"] for turn in turns]),
        "speedup": ratios([turn["cached"] for turn in full], cached),
        "stages_s": {name: statistics.median(times[name] for times in stages) for name in stages[0]},
    }


def _longest(rows: Sequence[Row]) -> list[Row]:
    measured = [row for row in rows if row.get("stages_s")]
    return [row for row in measured if row["tokens"] == max(each["tokens"] for each in measured)]
