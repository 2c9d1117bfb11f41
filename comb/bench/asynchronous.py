"""`comb bench async`: time to first token and throughput under Poisson arrivals (EPIC sec. 5.2 and 5.5, Fig. 8).

Each of d users has the documents and the question of one example. All documents are compiled once, user after user;
then users send their requests again and again. The store holds a fixed share of what the users' PICaches need (the
context-cache ratio): what it had to evict is compiled again inside the request that needs it.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tqdm import tqdm

from comb.bench.comparison import REFUSALS, one_line
from comb.bench.queueing import Served, Service, poisson_arrivals, serve_in_order
from comb.cache.store import PICacheStore
from comb.documents.document import Example
from comb.engine.engine import PICEngine
from comb.evaluation.run import Setting, disjoint


@dataclass(frozen=True)
class AsyncResult:
    """One method at one request rate and one context-cache ratio.

    Args:
        rate: requests per second that were offered. ccr: store budget over the bytes of all users' PICaches; None for
            methods that store nothing.
        n: requests served. throughput: of them per second, until the last was done.
        ttft_median_s, ttft_p90_s, ttft_mean_s: from arrival to first token, waiting included.
        busy: share of that time in which the worker was busy; near 1 the queue grows with the length of the run.
        hit_share: documents found in the store over documents asked about; None where none is ever stored.
        store_bytes: the budget. refused: why nothing was measured.
    """

    method: str
    rate: float
    ccr: float | None
    n: int = 0
    throughput: float | None = None
    ttft_median_s: float | None = None
    ttft_p90_s: float | None = None
    ttft_mean_s: float | None = None
    busy: float | None = None
    hit_share: float | None = None
    store_bytes: int | None = None
    refused: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


def measure_async(
    setting: Setting,
    examples: Sequence[Example],
    specs: Sequence[str],
    rates: Sequence[float],
    ratios: Sequence[float] = (1.0,),
    *,
    users: int = 8,
    seconds: float = 40.0,
    max_new_tokens: int = 16,
    seed: int = 0,
    progress: bool = True,
) -> list[AsyncResult]:
    """Results by method, then by ratio, then by rate. All methods get the same arrivals.

    Args:
        examples: the first `users` of them that have no document in common.
        seconds: of simulated arrivals per rate.

    Raises:
        ValueError: if there are fewer such examples than users.
    """
    chosen = disjoint(examples, users)
    if len(chosen) < users:
        raise ValueError(
            f"only {len(chosen)} of {len(examples)} examples have documents of their own, {users} users need as many: "
            "give --users a smaller number or --limit a larger one"
        )
    results = []
    for spec in specs:
        try:
            user_bytes = _user_bytes(setting, spec, chosen)
        except REFUSALS as error:
            refusal = one_line(error)
            results += [AsyncResult(spec, rate, ccr, refused=refusal) for ccr in ratios for rate in rates]
            continue
        for ccr in ratios if any(user_bytes) else [None]:
            users_of = _Users(setting, spec, chosen, user_bytes, ccr, max_new_tokens)
            for rate in tqdm(rates, f"{spec}, ccr {ccr}", unit="rate", disable=not progress, leave=False):
                results.append(users_of.run(rate, seconds, seed, progress))
    return results


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


def summarize(
    served: Sequence[Served], method: str, rate: float, ccr: float | None, store_bytes: int | None
) -> AsyncResult:
    """The figures of one run."""
    waits = [request.ttft_s for request in served]
    end = served[-1].end
    documents = sum(request.service.documents for request in served)
    return AsyncResult(
        method=method,
        rate=rate,
        ccr=ccr,
        n=len(served),
        throughput=len(served) / end,
        ttft_median_s=statistics.median(waits),
        ttft_p90_s=statistics.quantiles(waits, n=10, method="inclusive")[-1] if len(waits) > 1 else waits[0],
        ttft_mean_s=statistics.fmean(waits),
        busy=sum(request.service.total_s for request in served) / end,
        hit_share=sum(request.service.hits for request in served) / documents if documents else None,
        store_bytes=store_bytes,
    )


class _Users:
    """One method's users with their store."""

    def __init__(
        self,
        setting: Setting,
        spec: str,
        examples: Sequence[Example],
        user_bytes: Sequence[int],
        ccr: float | None,
        max_new_tokens: int,
    ) -> None:
        self.setting = setting
        self.spec = spec
        self.examples = examples
        self.user_bytes = user_bytes
        self.ccr = ccr
        self.max_new_tokens = max_new_tokens

    def run(self, rate: float, seconds: float, seed: int, progress: bool) -> AsyncResult:
        try:
            store_bytes = None if self.ccr is None else budget(self.user_bytes, self.ccr)
            engine = self.setting.engine(self.spec, _store(self.setting, store_bytes))
            for user in range(len(self.examples)):  # compiled once, before the clock starts
                self._serve(engine, user)
            arrivals = poisson_arrivals(rate, seconds, len(self.examples), seed)
            with tqdm(total=len(arrivals), desc=f"{rate:g}/s", disable=not progress, leave=False) as bar:

                def serve(user: int) -> Service:
                    bar.update()
                    return self._serve(engine, user)

                served = serve_in_order(arrivals, serve)
        except REFUSALS as error:
            return AsyncResult(self.spec, rate, self.ccr, refused=one_line(error))
        return summarize(served, self.spec, rate, self.ccr, store_bytes)

    def _serve(self, engine: PICEngine, user: int) -> Service:
        question, documents = self.setting.request(self.spec, self.examples[user])
        report = engine.ask(question, documents, max_new_tokens=self.max_new_tokens).report
        states = [document.state for document in report.documents if document.state != "inlined"]
        return Service(report.ttft_s, report.total_s, len(states), states.count("hit"))


def _user_bytes(setting: Setting, spec: str, examples: Sequence[Example]) -> list[int]:
    """Bytes that each user's documents take in a store; zeros where all documents are inlined."""
    found = []
    for example in examples:
        store = _store(setting, None)
        engine = setting.engine(spec, store)
        report = engine.ask(*setting.request(spec, example), max_new_tokens=1).report
        kept = any(document.state != "inlined" for document in report.documents)
        found.append(sum(tier.bytes for tier in store.stats().tiers.values()) if kept else 0)
    return found


def _store(setting: Setting, device_bytes: int | None) -> PICacheStore:
    return PICacheStore(device=setting.model.device, device_bytes=device_bytes)
