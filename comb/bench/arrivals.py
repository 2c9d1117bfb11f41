"""`comb bench async`: time to first token and throughput under Poisson arrivals (EPIC sec. 5.2 and 5.5, Fig. 8).

Each of d users has the documents and the question of one example. All documents are compiled once, user after user;
then users send their requests again and again. The store holds a fixed share of what the users' PICaches need (the
context-cache ratio): what it had to evict is compiled again inside the request that needs it.

Arrivals are simulated, service is measured: on a virtual clock a request starts when it has arrived and the one before
it is done. So a run lasts as long as its service alone, and an overloaded queue is seen as such.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated

import numpy as np
import typer
from tqdm import tqdm

from comb.bench.harness import BenchmarkReport, benchmark, or_refused
from comb.bench.options import MaxNewTokens, Methods, QuestionOptions, numbers, split_methods
from comb.cache.store import PICacheStore
from comb.documents.document import Example
from comb.engine.report import Report
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.run import Setting, disjoint
from comb.evaluation.table import Column, Row, TextTable, fixed, ms, percent


@dataclass(frozen=True)
class AsyncOptions(QuestionOptions):
    """Of `comb bench async`."""

    methods: Methods = "full,legolink:16,cacheblend:0.15"
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas")] = "1,2,4,8"
    ccr: Annotated[str, typer.Option(help="context-cache ratios: the store's budget over what all users need")] = "1"
    users: Annotated[int, typer.Option(min=1, help="users, each with the documents of one example")] = 8
    seconds: Annotated[float, typer.Option(min=0.001, help="of simulated arrivals per rate")] = 40.0
    max_new_tokens: MaxNewTokens = 16


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per method, ratio and rate."""
    columns = (
        Column("method", "method", names=True),
        Column("ccr", "ccr", "{:g}".format, "the store's budget over what all users' PICaches need", names=True),
        Column("offered/s", "rate", "{:g}".format, names=True),
        Column("n", "n"),
        Column("TTFT median", "ttft_median_s", ms, "in ms from arrival to first token, waiting included"),
        Column("p90", "ttft_p90_s", ms),
        Column("served/s", "throughput", fixed(2)),
        Column("busy %", "busy", percent, "near 100 the queue only grows, and TTFT depends on how long the run is"),
        Column("hits %", "hit_share", percent),
    )
    return [TextTable("Poisson arrivals, one worker, first come first served", columns, rows)]


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Median TTFT and throughput over the request rate (EPIC Fig. 8)."""

    def name(row: Row) -> str:
        return str(row["method"]) if row["ccr"] is None else f"{row['method']}, ccr {row['ccr']:g}"

    offered = "requests offered per second"
    return [
        Lines(
            rows, "rate", "ttft_median_s", offered, "median TTFT, ms, waiting included", by=name, scale=1000, log="y"
        ),
        Lines(rows, "rate", "throughput", offered, "served per second", by=name, diagonal="all that is offered"),
    ]


@benchmark("async", tables, panels)
def measure_arrivals(options: AsyncOptions, report: BenchmarkReport) -> None:
    """TTFT and throughput under Poisson arrivals, with a store of limited size (EPIC Fig. 8)."""
    specs = split_methods(options.methods, control=False)
    rates, ratios = (numbers(getattr(options, name), f"--{name}", least=1e-3) for name in ("rates", "ccr"))
    setting, examples = options.load_questions(report, options.max_new_tokens)
    for row in measure_async(setting, examples, specs, rates, ratios[::-1], options):
        report.add(row)


def measure_async(
    setting: Setting, examples: Sequence[Example], specs: Sequence[str], rates: Sequence[float],
    ratios: Sequence[float], options: AsyncOptions,
) -> Iterator[Row]:  # fmt: skip
    """Rows by method, then by ratio, then by rate. All methods get the same arrivals; each user has one of the first
    examples that have no document in common.

    Raises:
        ValueError: if there are fewer such examples than users.
    """
    chosen = disjoint(examples, options.users)
    if len(chosen) < options.users:
        raise ValueError(
            f"only {len(chosen)} of {len(examples)} examples have documents of their own, {options.users} users need "
            "as many: give --users a smaller number or --limit a larger one"
        )
    for spec in specs:
        needs: Row = {"bytes": [1]}
        with or_refused(needs):
            needs["bytes"] = [_store_bytes(setting, spec, example) for example in chosen]
        # what stores nothing has no ratio
        for ccr, rate in product(ratios if any(needs["bytes"]) else [None], rates):
            row: Row = {"method": spec, "rate": rate, "ccr": ccr, "refused": needs.get("refused", "")}
            if not row["refused"]:
                with or_refused(row):
                    row["store_bytes"] = None if ccr is None else budget(needs["bytes"], ccr)
                    row |= _run(setting, spec, chosen, row["store_bytes"], rate, options)
            yield row


def _run(
    setting: Setting, spec: str, examples: Sequence[Example], store_bytes: int | None, rate: float,
    options: AsyncOptions,
) -> Row:  # fmt: skip
    engine = setting.engine(spec, PICacheStore(device=setting.model.device, device_bytes=store_bytes))

    def serve(user: int) -> Report:
        return engine.ask(*setting.request(spec, examples[user]), max_new_tokens=options.max_new_tokens).report

    for user in range(len(examples)):  # compiled once, before the clock starts
        serve(user)
    arrivals = poisson_arrivals(rate, options.seconds, len(examples), options.seed)
    return serve_in_order(tqdm(arrivals, f"{spec}, {rate:g}/s", leave=False), serve)


def _store_bytes(setting: Setting, spec: str, example: Example) -> int:
    """What an example's documents take in a store; 0 where all documents are inlined."""
    engine = setting.engine(spec, PICacheStore(device=setting.model.device))
    report = engine.ask(*setting.request(spec, example), max_new_tokens=1).report
    if all(document.state == "inlined" for document in report.documents):
        return 0
    return sum(tier.bytes for tier in engine.store.stats().tiers.values())


def budget(user_bytes: Sequence[int], ccr: float) -> int:
    """Bytes of a store that holds the share `ccr` of all users' PICaches.

    Raises:
        ValueError: if one user's do not fit, so that this user could never be served.
    """
    total, share = sum(user_bytes), int(ccr * sum(user_bytes))
    if share < max(user_bytes):
        raise ValueError(
            f"ccr {ccr:g} gives the store {share} bytes, but one user's documents need {max(user_bytes)}: use at least "
            f"ccr {max(user_bytes) / total:.2f}, or more users"
        )
    return share


def poisson_arrivals(rate: float, seconds: float, users: int, seed: int = 0) -> list[tuple[float, int]]:
    """(moment, user) of a Poisson process of `rate` requests per second in ``[0, seconds)``, each from a random user.

    The same seed gives the same arrivals; at least one, so that there is something to measure.
    """
    generator = random.Random(f"{seed}:{rate}")
    arrivals: list[tuple[float, int]] = []
    now = generator.expovariate(rate)
    while now < seconds or not arrivals:
        arrivals.append((now, generator.randrange(users)))
        now += generator.expovariate(rate)
    return arrivals


def serve_in_order(arrivals: Iterable[tuple[float, int]], serve: Callable[[int], Report]) -> Row:
    """The figures of requests served one after the other, first come first served, on a virtual clock.

    `serve` answers a user's request, and its times count from its start. ``busy`` is the share of time in which the
    worker was; near 1 the queue grows with the run.
    """
    waits, free, busy, states = [], 0.0, 0.0, []
    for arrival, user in arrivals:
        report, start = serve(user), max(arrival, free)
        free, busy = start + report.total_s, busy + report.total_s
        waits.append(start - arrival + report.ttft_s)
        states += [document.state for document in report.documents if document.state != "inlined"]
    return {
        "n": len(waits), "throughput": len(waits) / free, "busy": busy / free,
        "ttft_median_s": statistics.median(waits),
        "ttft_p90_s": float(np.percentile(waits, 90)),
        "hit_share": states.count("hit") / len(states) if states else None,
    }  # fmt: skip
