"""`comb bench context-length`: time to first token against the length of the context (EPIC sec. 5.6, Fig. 9).

Random token segments and a random query, so that any model can be measured, also one with random weights. In every
repeat all methods take their turn before the next repeat begins, so that a machine that slows down slows all of them;
ratios are taken within a repeat. Tokenisation and the store's look-up are not part of it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import torch
import typer
from tqdm import tqdm

from comb import methods
from comb.bench.harness import BenchmarkReport, benchmark, one_line, or_refused, ratios
from comb.bench.memory import peak_memory
from comb.bench.options import (
    Lengths,
    Memory,
    Methods,
    QueryTokens,
    RandomModelOptions,
    Repeats,
    integers,
    split_methods,
)
from comb.bench.work import RandomPrompt, first_token, synchronize, vocabulary
from comb.cache.picache import PICache
from comb.evaluation.plot import Bars, Lines, Panel
from comb.evaluation.run import Timing
from comb.evaluation.table import Column, Row, TextTable, mebibytes, ms, spread
from comb.methods.base import Method

STAGES = ("assemble", "select", "recompute", "other linking", "first token")


@dataclass(frozen=True)
class ContextLengthOptions(RandomModelOptions):
    """Of `comb bench context-length`."""

    methods: Methods = "full,naive,legolink:16,cacheblend:0.15"
    lengths: Lengths = "512,1024,2048,4096"
    segment_tokens: Annotated[int, typer.Option(min=1, help="tokens per segment")] = 512
    query_tokens: QueryTokens = 32
    repeats: Repeats = 5
    memory: Memory = True


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """TTFT per length and method, and below it where it goes at the longest length."""
    columns = (
        Column("method", "method", names=True),
        Column("context", "tokens", names=True),
        Column("cached ms", "ttft_cached_s", ms, "link and first token, median ±half the distance of the quartiles"),
        Column("cold ms", "ttft_cold_s", ms, "with compiling"),
        Column("full/method", "speedup", spread, "cached times of full and the method in the same repeat, quartiles"),
        Column("redone", "recomputed_tokens", note="document tokens prefilled"),
        Column("cache MiB", "cache_bytes", mebibytes),
        Column("peak MiB", "peak_memory_bytes", mebibytes, "what linking and the first token add"),
    )
    exponents = {method: growth_exponent(rows, method) for method in dict.fromkeys(row["method"] for row in rows)}
    grown = [f"{method} {value:.2f}" for method, value in exponents.items() if value is not None]
    remarks = [f"Growth of cached TTFT, as a power of the context: {', '.join(grown)}."] if grown else []
    found = [TextTable("Time to first token against context length", columns, rows, remarks)]
    if last := _longest(rows):
        names = sorted({name for row in last for name in row["stages_s"]}, key=_place)
        stages = [Column(name, name, ms) for name in names]
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
        Bars(last, lambda row: str(row["method"]), lambda row: row["stages_s"], where, STAGES),
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
    vocab = vocabulary(model)
    made, refused = _make(model, specs, RandomPrompt.random(vocab, 40, 20, 8, options.seed))
    for length in tqdm(lengths, "context lengths", leave=False):
        prompt = RandomPrompt.random(vocab, length, options.segment_tokens, options.query_tokens, options.seed)
        turns = {spec: _Turns(method, options.memory) for spec, method in made.items()}
        for repeat in tqdm(range(-1, options.repeats), f"{length} tokens", leave=False):
            compiled: dict[tuple[str, ...], tuple[list[PICache], float]] = {}
            for turn in turns.values():
                turn(prompt, compiled, warm_up=repeat < 0)
        for spec in specs:
            row = {"method": spec, "tokens": length, "refused": refused.get(spec, "")}
            yield row | (turns[spec].row(turns.get("full")) if spec in turns else {})


def growth_exponent(rows: Sequence[Row], method: str) -> float | None:
    """Slope of log(cached TTFT) over log(context length), by least squares; None for fewer than two lengths."""
    own = [row for row in rows if row["method"] == method and row.get("ttft_cached_s")]
    points = [(math.log(row["tokens"]), math.log(row["ttft_cached_s"].median)) for row in own]
    if len(points) < 2:
        return None
    return statistics.linear_regression(*zip(*points, strict=True)).slope


def _make(model: Any, specs: Sequence[str], prompt: RandomPrompt) -> tuple[dict[str, Method], dict[str, str]]:
    """The methods that run on this model and pass the check, and per other method the reason."""
    made, refused = {}, {}
    for spec in specs:
        try:
            method = methods.create(spec, model)
            _check(method, prompt)
        except (ValueError, NotImplementedError) as error:
            if methods.parse(spec)[0] == "full":
                raise
            refused[spec] = one_line(error)
        else:
            made[spec] = method
    return made, refused


def _check(method: Method, prompt: RandomPrompt) -> None:
    """Raises ValueError unless the logits on a short prompt are finite, and for `full` those of the plain model."""
    state = method.link(method.compile(prompt.segments), prompt.query)
    logits = state.logits[0]
    state.release()
    if not bool(torch.isfinite(logits).all()):
        raise ValueError("check failed: the logits of a short prompt are not finite")
    if method.name != "full":
        return
    with torch.no_grad():
        ids = torch.tensor([prompt.flat], device=logits.device)
        plain = method.backbone(input_ids=ids).logits[0, -1].float()
    # one rounding of the dtype the model computes in, at the size of the largest logit
    allowed = 16 * torch.finfo(method.backbone.dtype).eps * float(plain.abs().max())
    difference = float((logits - plain).abs().max())
    if not difference <= allowed:
        raise ValueError(
            f"check failed: `full` differs from the plain model by {difference:.2g} in a logit (allowed: {allowed:.2g})"
            "; no ratio to it would mean anything"
        )


class _Turns:
    """One method's turns at one length, until it is refused."""

    def __init__(self, method: Method, memory: bool) -> None:
        self.method, self.memory = method, memory
        self.found: Row = {}
        self.cold: list[float] = []
        self.cached: list[float] = []
        self.stages: list[dict[str, float]] = []

    def __call__(
        self, prompt: RandomPrompt, compiled: dict[Any, tuple[list[PICache], float]], *, warm_up: bool
    ) -> None:
        """One turn; `compiled`: what methods have compiled in this repeat, with the seconds."""
        if self.found.get("refused"):
            return
        try:
            with or_refused(self.found):
                self._once(prompt, compiled, warm_up=warm_up)
        except RuntimeError as error:
            if "allocate memory" not in str(error):  # how torch's CPU allocator says that memory runs out
                raise
            self.found["refused"] = one_line(error)

    def _once(self, prompt: RandomPrompt, compiled: dict[Any, tuple[list[PICache], float]], *, warm_up: bool) -> None:
        method = self.method
        # what several methods compile alike is compiled once per repeat
        kind = (method.compile_name or method.name, method.fingerprint)
        if kind not in compiled:
            start = time.perf_counter()
            picaches = method.compile(prompt.segments)
            synchronize(method.backbone.device)
            compiled[kind] = picaches, time.perf_counter() - start
        picaches, compile_s = compiled[kind]
        if warm_up:
            if method.needs_store:
                first_token(method, picaches, prompt.query)
            self._warm_up(picaches, prompt)
        else:
            cold = cached = first_token(method, picaches, prompt.query)
            if method.needs_store:  # it keeps what it computed by itself
                cached = first_token(method, picaches, prompt.query)
            self.cold.append(compile_s + sum(cold.values()))
            self.cached.append(sum(cached.values()))
            self.stages.append(cached)
        if method.needs_store:
            method.store.clear()  # type: ignore[attr-defined]  # what needs_store says

    def _warm_up(self, picaches: Sequence[PICache], prompt: RandomPrompt) -> None:
        """Lets everything lazy happen, and takes what isn't a time."""
        recomputed: list[int] = []

        def cached() -> None:
            state = self.method.link(picaches, prompt.query)
            recomputed.append(state.recomputed_tokens)
            state.logits.argmax(-1).cpu()
            state.release()

        peak = peak_memory(self.method.backbone.device, cached) if self.memory else None
        if peak is None:
            cached()
        self.found |= {"recomputed_tokens": recomputed[0], "peak_memory_bytes": peak}
        kept: Iterable[int] = (picache.nbytes for picache in picaches)
        if self.method.needs_store:
            kept = (tier.bytes for tier in self.method.store.stats().tiers.values())  # type: ignore[attr-defined]
        # of `full` these are token ids alone, which don't count
        self.found["cache_bytes"] = 0 if self.method.name == "full" else sum(kept)

    def row(self, full: _Turns | None) -> Row:
        """What was found; ratios are to `full`, of the same repeat."""
        if self.found.get("refused"):
            return self.found
        names = dict.fromkeys(name for stages in self.stages for name in stages)
        return {
            **self.found,
            "ttft_cached_s": Timing.of(self.cached),
            "ttft_cold_s": Timing.of(self.cold),
            "speedup": ratios(full.cached if full else [], self.cached),
            "stages_s": {name: statistics.median(s.get(name, 0.0) for s in self.stages) for name in names},
        }


def _longest(rows: Sequence[Row]) -> list[Row]:
    measured = [row for row in rows if row.get("stages_s")]
    return [row for row in measured if row["tokens"] == max(each["tokens"] for each in measured)]


def _place(stage: str) -> int:
    return STAGES.index(stage) if stage in STAGES else len(STAGES)
