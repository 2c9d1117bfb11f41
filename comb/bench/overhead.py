"""`comb bench overhead`: what a cached question costs besides the model's own forward passes.

Processor time of the calling thread, not wall-clock: what other processes take of the machine doesn't count.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from comb.backbones.exclusive import backbone_of
from comb.backbones.forward import decoder_of
from comb.bench.harness import BenchmarkReport, benchmark, or_refused
from comb.bench.options import MaxNewTokens, Methods, QuestionOptions, Repeats, split_methods
from comb.documents.document import Example
from comb.evaluation.run import Setting
from comb.evaluation.table import Column, Row, TextTable

ALONE = "generate alone"
"""The row of transformers' own ``generate`` on the whole prompt, ready as tensors: no comb in it."""
_WARM_UP = 3


@dataclass(frozen=True)
class OverheadOptions(QuestionOptions):
    """Of `comb bench overhead`."""

    methods: Methods = "full,prefix,naive,legolink:16,cacheblend:0.15"
    max_new_tokens: MaxNewTokens = 1
    repeats: Repeats = 50


def tables(rows: list[Row]) -> list[TextTable]:
    """One line per method."""

    def ms(value: float) -> str:
        return f"{1000 * value:.2f}"

    columns = [
        Column("method", "method", names=True),
        Column("total ms", "total_s", ms, "processor time of a call, median"),
        Column("passes ms", "passes_s", ms, "in forward passes of the backbone, median"),
        Column("outside ms", "outside_s", ms, "the difference, median"),
        Column("least ms", "least_s", ms, "the difference, least"),
    ]
    return [TextTable("Processor time", columns, rows)]


@benchmark("overhead", tables)
def overhead(options: OverheadOptions, report: BenchmarkReport) -> None:
    """What a cached question costs in processor time besides the model's own forward passes, by method."""
    specs = split_methods(options.methods, control=False)
    setting, [example, *_] = options.load_questions(report, options.max_new_tokens)
    backbone, calls = backbone_of(setting.model), {ALONE: _alone(setting, example, options)}
    rows: list[Row] = [{"method": name} for name in (ALONE, *specs)]
    for row in rows[1:]:
        with or_refused(row):
            calls[row["method"]] = _cached(setting, row["method"], example, options)
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for _ in range(_WARM_UP + options.repeats):  # all methods take their turn: a slow moment meets them all
        for name, call in calls.items():
            with pass_clock(backbone) as seconds:
                start = time.thread_time()
                call()
                times[name].append((time.thread_time() - start, sum(seconds)))
    for row in rows:
        if taken := times.get(row["method"], [])[_WARM_UP:]:
            outside = [total - passes for total, passes in taken]
            row["total_s"], row["passes_s"] = (median(part) for part in zip(*taken, strict=True))
            row["outside_s"], row["least_s"] = median(outside), min(outside)
        report.add(row)
    report.heading += (
        f"; its first question, {options.max_new_tokens} new tokens at most, {torch.get_num_threads()} threads"
    )


def _alone(setting: Setting, example: Example, options: OverheadOptions) -> Callable[[], object]:
    engine = setting.engine("full")
    question, documents = setting.request("full", example)
    segments = [segment.token_ids for segment in engine.segments_of(documents)]
    ids = torch.tensor([setting.builder.build(question, segments).flat], device=engine.method.backbone.device)
    mask = torch.ones_like(ids)
    return lambda: engine.method.backbone.generate(
        ids, attention_mask=mask, do_sample=False, max_new_tokens=options.max_new_tokens
    )


def _cached(setting: Setting, spec: str, example: Example, options: OverheadOptions) -> Callable[[], object]:
    engine, request = setting.engine(spec), setting.request(spec, example)
    engine.ask(*request, max_new_tokens=1)  # compiles
    return lambda: engine.ask(*request, max_new_tokens=options.max_new_tokens)


@contextmanager
def pass_clock(backbone: Any) -> Iterator[list[float]]:
    """Processor seconds of this thread in each of the backbone's forward passes, also of those that are broken off."""
    seconds: list[float] = []
    entered: list[float] = []

    def enter(*_: object) -> None:
        entered.append(time.thread_time())

    def leave(*_: object) -> None:
        started = entered.pop()
        if not entered:  # the whole model calls its decoder, linking calls the decoder alone
            seconds.append(time.thread_time() - started)

    handles = []
    for module in {backbone, decoder_of(backbone)}:
        handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave, always_call=True)]
    try:
        yield seconds
    finally:
        for handle in handles:
            handle.remove()
