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
from typing import TYPE_CHECKING, Annotated, Any

import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark, ratios
from comb.bench.options import Methods, QueryTokens, RandomModelOptions, Repeats, integers, split_methods
from comb.evaluation.plot import Bars, Lines, Panel, in_order
from comb.evaluation.table import Column, Row, TextTable, Timing, ms, or_refused, spread

if TYPE_CHECKING:
    from comb.cache.picache import PICache
    from comb.evaluation.random_prompts import RandomPrompt
    from comb.methods.base import Method


@dataclass(frozen=True)
class ContextLengthOptions(RandomModelOptions):
    methods: Methods = "full,naive,legolink:16,cacheblend:0.15"
    lengths: Annotated[str, typer.Option(help="tokens of context, separated by commas")] = "512,1024,2048,4096"
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
        Column("cache MiB", "cache_bytes", lambda count: f"{count / 2**20:.1f}"),
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

    specs, lengths = split_methods(options.methods, control=False), integers(options.lengths, "--lengths")
    model = options.load(lengths[-1] + options.query_tokens + 1)
    report.heading = f"{options.title}: segments of {options.segment_tokens}, query of {options.query_tokens} tokens"
    report.facts |= {"threads": torch.get_num_threads(), "dtype": str(model.dtype), "device": str(model.device)}
    shape = options.segment_tokens, options.query_tokens
    for row in measure_context_length(model, specs, lengths, shape, repeats=options.repeats, seed=options.seed):
        report.add(row)


def measure_context_length(
    model: Any, specs: Sequence[str], lengths: Sequence[int], shape: tuple[int, int], *, repeats: int, seed: int
) -> Iterator[Row]:
    """Rows by length, then by method.

    Before anything is timed, every method links a short prompt: its logits must be finite, and those of `full` must be
    the plain model's. A method that fails is refused.

    Args:
        shape: tokens of a segment, and of the query.

    Raises:
        ValueError: when `full` differs from the plain model.
    """
    from comb import methods
    from comb.evaluation.random_prompts import RandomPrompt, first_token, synchronize
    from comb.methods.prefix import prefixes_of

    made: dict[str, Method] = {}
    unfit: dict[str, Row] = {}
    short = RandomPrompt.random(model, 40, 20, 8, seed)
    for spec in specs:
        with or_refused(unfit.setdefault(spec, {"refused": ""})):
            made[spec] = _checked(methods.create(spec, model), short)
        if methods.parse(spec)[0] == "full" and unfit[spec]["refused"]:
            raise ValueError(unfit[spec]["refused"])
    for length in tqdm(lengths, "context lengths", leave=False):
        prompt = RandomPrompt.random(model, length, *shape, seed)
        rows: dict[str, Row] = {spec: {"method": spec, "tokens": length, **unfit[spec]} for spec in specs}
        colds: dict[str, list[float]] = {spec: [] for spec in made}
        cacheds: dict[str, list[dict[str, float]]] = {spec: [] for spec in made}
        for repeat in tqdm(range(-1, repeats), f"{length} tokens", leave=False):
            compiled: dict[Any, tuple[list[PICache], float]] = {}  # once for all methods that compile alike
            for spec, method in made.items():
                if rows[spec]["refused"]:
                    continue
                with or_refused(rows[spec]):
                    kind = (method.compile_name or method.name, method.fingerprint)
                    if kind not in compiled:
                        start = time.perf_counter()
                        picaches = method.compile(prompt.segments)
                        synchronize(method.backbone.device)
                        compiled[kind] = picaches, time.perf_counter() - start
                    picaches, compile_s = compiled[kind]
                    if repeat < 0:
                        rows[spec] |= _warm_up(method, picaches, prompt)
                    else:
                        cold = cached = first_token(method, picaches, prompt.query)
                        if method.name == "prefix":  # it keeps what it computed by itself
                            cached = first_token(method, picaches, prompt.query)
                        colds[spec].append(compile_s + sum(cold.values()))
                        cacheds[spec].append(cached)
                    prefixes_of(method.backbone).clear()
        full = [sum(stages.values()) for stages in cacheds.get("full", [])]
        for spec, row in rows.items():
            if not row["refused"]:
                stages = cacheds[spec]
                whole = [sum(times.values()) for times in stages]
                row |= {
                    "ttft_cached_s": Timing.of(whole), "ttft_cold_s": Timing.of(colds[spec]),
                    "speedup": ratios(full, whole),
                    "stages_s": {name: statistics.median(times[name] for times in stages) for name in stages[0]},
                }  # fmt: skip
            yield row


def _checked(method: Method, prompt: RandomPrompt) -> Method:
    """Raises ValueError unless the logits on a short prompt are finite, and for `full` those of the plain model."""
    import torch

    from comb.evaluation.random_prompts import check_logits

    with torch.no_grad():
        logits = method.link(method.compile(prompt.segments), prompt.query).logits[0]
        if not bool(torch.isfinite(logits).all()):
            raise ValueError("check failed: the logits of a short prompt are not finite")
        if method.name == "full":
            ids = torch.tensor([prompt.flat], device=logits.device)
            plain = method.backbone(input_ids=ids).logits[0, -1].float()
            check_logits("`full` differs from the plain model", logits, plain, method.backbone.dtype)
    return method


def _warm_up(method: Method, picaches: Sequence[PICache], prompt: RandomPrompt) -> Row:
    """Lets everything lazy happen, and takes what isn't a time."""
    from comb.methods.prefix import prefixes_of

    for _ in range(2 if method.name == "prefix" else 1):  # which keeps what it computed the first time
        state = method.link(picaches, prompt.query)
        state.logits.argmax(-1).cpu()
    kept = sum(picache.nbytes for picache in picaches)
    if method.name == "prefix":
        kept = prefixes_of(method.backbone).nbytes
    # of `full` PICaches are token ids alone, which don't count
    kept = 0 if method.name == "full" else kept
    return {
        "computed_tokens": sum(state.computed), "recomputed_tokens": state.recomputed_tokens, "cache_bytes": kept,
    }  # fmt: skip


def _longest(rows: Sequence[Row]) -> list[Row]:
    measured = [row for row in rows if row.get("stages_s")]
    return [row for row in measured if row["tokens"] == max(each["tokens"] for each in measured)]
