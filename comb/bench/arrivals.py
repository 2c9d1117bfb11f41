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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import typer
from tqdm import tqdm

from comb.bench.harness import REFUSALS, BenchmarkReport, benchmark, one_line, or_refused
from comb.bench.options import MaxNewTokens, Methods, QuestionOptions, numbers, split_methods
from comb.cache.store import PICacheStore
from comb.documents.document import Example
from comb.engine.engine import PICEngine
from comb.engine.report import Report
from comb.evaluation.plot import Lines, Panel
from comb.evaluation.run import Setting, disjoint
from comb.evaluation.table import Column, Row, TextTable, fixed, ms


@dataclass(frozen=True)
class AsyncOptions(QuestionOptions):
    """Of `comb bench async`."""

    methods: Methods = "full,legolink:16,cacheblend:0.15"
    rates: Annotated[str, typer.Option(help="requests per second, separated by commas")] = "1,2,4,8"
    ccr: Annotated[str, typer.Option(help="context-cache ratios: the store's budget over what all users need")] = "1"
    users: Annotated[int, typer.Option(min=1, help="users, each with the documents of one example")] = 8
    seconds: Annotated[float, typer.Option(min=0.001, help="of simulated arrivals per rate")] = 40.0
    max_new_tokens: MaxNewTokens = 16


class Service(NamedTuple):
    """What a request took once it was begun: seconds to the first token and to the last, documents and hits."""

    first_token_s: float
    total_s: float
    documents: int = 0
    hits: int = 0


class ServedRequest(NamedTuple):
    """One request on the virtual clock, in seconds."""

    arrival: float
    start: float
    service: Service

    @property
    def end(self) -> float:
        """When its last token was there."""
        return self.start + self.service.total_s

    @property
    def ttft_s(self) -> float:
        """From arrival to the first token, waiting included."""
        return self.start - self.arrival + self.service.first_token_s


def tables(rows: Sequence[Row]) -> list[TextTable]:
    """One line per method, ratio and rate."""
    columns = (
        Column("method", "method", names=True),
        Column("ccr", "ccr", "{:g}".format, "the store's budget over what all users' PICaches need", names=True),
        Column("offered/s", "rate", "{:g}".format, names=True),
        Column("n", "n"),
        Column("TTFT median", "ttft_median_s", ms, "in ms from arrival to first token, waiting included"),
        Column("p90", "ttft_p90_s", ms),
        Column("mean", "ttft_mean_s", ms),
        Column("served/s", "throughput", fixed(2)),
        Column("busy %", "busy", _share, "near 100 the queue only grows, and TTFT depends on how long the run is"),
        Column("hits %", "hit_share", _share),
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
        try:
            user_bytes, refused = _user_bytes(setting, spec, chosen), ""
        except REFUSALS as error:
            user_bytes, refused = [1], one_line(error)
        # what stores nothing has no ratio
        for ccr in ratios if any(user_bytes) else [None]:
            for rate in rates:
                row: Row = {"method": spec, "rate": rate, "ccr": ccr, "refused": refused}
                if not refused:
                    with or_refused(row):
                        row |= _run(setting, spec, chosen, user_bytes, ccr, rate, options)
                yield row


def _run(
    setting: Setting, spec: str, examples: Sequence[Example], user_bytes: Sequence[int], ccr: float | None, rate: float,
    options: AsyncOptions,
) -> Row:  # fmt: skip
    store_bytes = None if ccr is None else budget(user_bytes, ccr)
    engine = setting.engine(spec, PICacheStore(device=setting.model.device, device_bytes=store_bytes))

    def serve(user: int) -> Service:
        report = _ask(setting, spec, engine, examples[user], options.max_new_tokens)
        states = [document.state for document in report.documents if document.state != "inlined"]
        return Service(report.ttft_s, report.total_s, len(states), states.count("hit"))

    for user in range(len(examples)):  # compiled once, before the clock starts
        serve(user)
    arrivals = poisson_arrivals(rate, options.seconds, len(examples), options.seed)
    title = f"{spec}, {rate:g}/s"
    return {**summarize(serve_in_order(tqdm(arrivals, title, leave=False), serve)), "store_bytes": store_bytes}


def budget(user_bytes: Sequence[int], ccr: float) -> int:
    """Bytes of a store that holds the share `ccr` of all users' PICaches.

    Raises:
        ValueError: if one user's do not fit, so that this user could never be served.
    """
    total = sum(user_bytes)
    share = int(ccr * total)
    if share < max(user_bytes):
        raise ValueError(
            f"ccr {ccr:g} gives the store {share} bytes, but one user's documents need {max(user_bytes)}: use at least "
            f"ccr {max(user_bytes) / total:.2f}, or more users"
        )
    return share


def summarize(served: Sequence[ServedRequest]) -> Row:
    """The figures of one run: ``busy`` is the share of time in which the worker was; near 1 the queue grows with it."""
    waits = [request.ttft_s for request in served]
    end = served[-1].end
    documents = sum(request.service.documents for request in served)
    return {
        "n": len(served),
        "throughput": len(served) / end,
        "ttft_median_s": statistics.median(waits),
        "ttft_p90_s": statistics.quantiles(waits, n=10, method="inclusive")[-1] if len(waits) > 1 else waits[0],
        "ttft_mean_s": statistics.fmean(waits),
        "busy": sum(request.service.total_s for request in served) / end,
        "hit_share": sum(request.service.hits for request in served) / documents if documents else None,
    }


def poisson_arrivals(rate: float, seconds: float, users: int, seed: int = 0) -> list[tuple[float, int]]:
    """(moment, user) of a Poisson process of `rate` requests per second in ``[0, seconds)``, each from a random user.

    That is the sum of one process of ``rate / users`` for every user. The same seed gives the same arrivals; at least
    one, so that there is something to measure.
    """
    generator = random.Random(f"{seed}:{rate}")
    arrivals: list[tuple[float, int]] = []
    now = generator.expovariate(rate)
    while now < seconds or not arrivals:
        arrivals.append((now, generator.randrange(users)))
        now += generator.expovariate(rate)
    return arrivals


def serve_in_order(arrivals: Sequence[tuple[float, int]], serve: Callable[[int], Service]) -> list[ServedRequest]:
    """Serves one request after the other, first come first served; `serve` answers a user's request and measures it."""
    served: list[ServedRequest] = []
    free = 0.0
    for moment, user in arrivals:
        served.append(ServedRequest(moment, max(moment, free), serve(user)))
        free = served[-1].end
    return served


def _user_bytes(setting: Setting, spec: str, examples: Sequence[Example]) -> list[int]:
    """Bytes that each user's documents take in a store; zeros where all documents are inlined."""
    found = []
    for example in examples:
        engine = setting.engine(spec, PICacheStore(device=setting.model.device))
        report = _ask(setting, spec, engine, example, 1)
        kept = any(document.state != "inlined" for document in report.documents)
        found.append(sum(tier.bytes for tier in engine.store.stats().tiers.values()) if kept else 0)
    return found


def _ask(setting: Setting, spec: str, engine: PICEngine, example: Example, max_new_tokens: int) -> Report:
    question, documents = setting.request(spec, example)
    return engine.ask(question, documents, max_new_tokens=max_new_tokens).report


def _share(value: float) -> str:
    return f"{100 * value:.0f}"
