"""The order of events: servers up, phase after phase with both in turn, servers down.

Both servers run at once and take turns, phase by phase, so that a slow moment of the machine meets both; the one whose
turn it isn't is idle. With `one_at_a_time`, for machines that hold one only, each goes through all phases on its own.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from comb_serving.bench.client import Record, Target, run_closed, run_open
from comb_serving.bench.results import Memory, PhaseResult, summarize
from comb_serving.bench.servers import COMB, PLAIN, Metrics, Server, ServerPlan
from comb_serving.bench.workload import Ask, Workload

COLD, CACHED, TOGETHER, SOAK = "cold", "cached", "together", "soak"
BEYOND = 1.3  # a server isn't offered more than so many times what it does in a closed loop
SLO_TIMES = 3
_AUTO = (0.5, 0.8, 1.2)
_MEMORY_EVERY_S = 2.0


@dataclass(frozen=True)
class RunShape:
    """How much is asked.

    Args:
        cold: requests with documents that nobody has asked about. requests: per closed loop.
        clients: of the closed loops; the first of them is where TTFT is compared without load.
        rates: arrivals per second; None: shares of what each server does in its closed loops.
        seconds: of arrivals per rate.
        together, repeats: clients that ask about the same documents at one moment, and how often.
        soak: requests to comb alone with memory watched; 0: none. soak_clients: at once.
        tokens: of each answer. timeout_s: of a request.
        slo_s: p90 of TTFT that a sustained rate keeps; None: three times plain vLLM's median with the fewest clients.
    """

    cold: int = 16
    requests: int = 40
    clients: tuple[int, ...] = (1, 4, 16)
    rates: tuple[float, ...] | None = None
    seconds: float = 30.0
    together: int = 16
    repeats: int = 2
    soak: int = 0
    soak_clients: int = 4
    tokens: int = 16
    timeout_s: float = 300.0
    slo_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("cold", "requests", "together", "repeats", "soak_clients", "tokens"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.clients or min(self.clients) < 1 or any(rate <= 0 for rate in self.rates or ()):
            raise ValueError(f"clients and rates are above zero, got {list(self.clients)} and {self.rates}")
        if self.seconds <= 0 or self.soak < 0:
            raise ValueError(f"seconds are above zero, a soak has 0 requests or more; got {self.seconds}, {self.soak}")


@dataclass
class Outcome:
    """What is known so far; a run that is broken off leaves what it has.

    Args:
        ready_s, first_answer_s: by server, from its start: to its first sign of health, to its first answer.
        token_bytes: by server, of keys and values per document token, as the server counts its own memory.
    """

    results: list[PhaseResult] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    memory: list[Memory] = field(default_factory=list)
    ready_s: dict[str, float] = field(default_factory=dict)
    first_answer_s: dict[str, float] = field(default_factory=dict)
    token_bytes: dict[str, float] = field(default_factory=dict)
    slo_s: float | None = None

    def ttft(self, server: str, phase: str) -> list[float]:
        """Of all good answers."""
        return [r.ttft_s for r in self.records if (r.server, r.phase) == (server, phase) and not r.error]

    def result(self, server: str, phase: str) -> PhaseResult | None:
        """Of one phase, if it was run."""
        return next((r for r in self.results if (r.server, r.phase) == (server, phase) and r.n), None)


class Bench:
    """A run over started servers.

    Args:
        log: takes every record as one JSON line, at once. say: shows a line of progress.
    """

    def __init__(
        self, workload: Workload, shape: RunShape, outcome: Outcome, *, log: TextIO | None, say: Callable[[str], Any]
    ) -> None:
        self.workload, self.shape, self.outcome, self.log, self.say = workload, shape, outcome, log, say
        self.start = time.monotonic()
        self.peak: dict[str, float] = {}  # by server: answers per second in its best closed loop

    def run(self, plans: Sequence[ServerPlan], logs: Path, *, one_at_a_time: bool = False) -> None:
        """Everything; what servers print goes to ``logs/<name>.log``."""
        groups = [[plan] for plan in plans] if one_at_a_time else [list(plans)]
        for group in groups:
            with ExitStack() as stack:
                servers = [stack.enter_context(self._started(plan, logs)) for plan in group]
                for step in self._steps():
                    for server in servers:
                        step(server)

    @contextmanager
    def _started(self, plan: ServerPlan, logs: Path) -> Iterator[Server]:
        self._progress(plan.name, "starting")
        with Server(plan, logs / f"{plan.name.replace(' ', '-')}.log") as server:
            self.outcome.ready_s[plan.name] = server.ready_s
            for number, ask in enumerate(self.workload.new(3, "warm-up")):
                (record,) = run_closed(self._target(server), "warm-up", [ask], 1, lambda _: None)
                if record.error:
                    raise RuntimeError(f"{plan.name} fails at its first requests: {record.error}; see {server.log}")
                if number == 0:
                    self.outcome.first_answer_s[plan.name] = time.monotonic() - server.started
            self._progress(plan.name, f"ready after {server.ready_s:.0f} s")
            yield server
            self._progress(plan.name, "ending")

    # ---- phases ----

    def _steps(self) -> Iterator[Callable[[Server], None]]:
        """One after the other: rates that depend on closed loops are known when those have been run."""
        yield self._cold
        for clients in self.shape.clients:
            yield partial(self._closed, clients=clients)
        yield self._together
        for rate in self.shape.rates or auto_rates(list(self.peak.values())):
            yield partial(self._open, rate=rate)
        yield self._soak

    def _cold(self, server: Server) -> None:
        before = server.metrics()
        records = self._run_closed(server, COLD, self.workload.cold(self.shape.cold), 1)
        self._keep(server, COLD, records, clients=1)
        if server.plan.pool_bytes:
            found = pool_token_bytes(before, server.metrics(), sum(record.document_tokens for record in records))
        else:
            found = decoder_token_bytes(server)
        if found is not None:
            self.outcome.token_bytes[server.plan.name] = found

    def _closed(self, server: Server, *, clients: int) -> None:
        name, phase = server.plan.name, f"{CACHED} {clients}"
        asks = self.workload.drawn(self.shape.requests, phase)
        result = self._keep(server, phase, self._run_closed(server, phase, asks, clients), clients=clients)
        self.peak[name] = max(self.peak.get(name, 0.0), result.throughput or 0.0)
        if name == PLAIN and self.outcome.slo_s is None:
            self.outcome.slo_s = self.shape.slo_s or (SLO_TIMES * result.ttft_p50 if result.ttft_p50 else None)

    def _together(self, server: Server) -> None:
        records: list[Record] = []
        for asks in self.workload.together(self.shape.together, self.shape.repeats):
            # one repeat behind the other, as they were
            before = max((record.due_s + record.total_s for record in records), default=0.0)
            found = self._run_closed(server, TOGETHER, asks, len(asks))
            records += [replace(record, due_s=before + record.due_s) for record in found]
        self._keep(server, TOGETHER, records, clients=self.shape.together)

    def _open(self, server: Server, *, rate: float) -> None:
        name, phase = server.plan.name, f"{rate:.3g}/s"
        if rate > BEYOND * self.peak[name]:
            why = f"more than {BEYOND:g} times its {self.peak[name]:.2f}/s in a closed loop"
            self.outcome.results.append(PhaseResult(name, phase, rate=rate, skipped=why))
            return
        arrivals = self.workload.arrivals(rate, self.shape.seconds)
        asks = self.workload.drawn(len(arrivals), phase)
        with self._counting(server, phase) as count:
            records = run_open(self._target(server), phase, asks, arrivals, count)
        self._keep(server, phase, records, rate=rate)

    def _soak(self, server: Server) -> None:
        if not self.shape.soak or server.plan.name != COMB:
            return
        with self._counting(server, SOAK, watch=True) as count:
            asks = self.workload.soak(self.shape.soak)
            records = run_closed(self._target(server), SOAK, asks, self.shape.soak_clients, count)
        self._keep(server, SOAK, records, clients=self.shape.soak_clients)

    # ---- one phase ----

    def _run_closed(self, server: Server, phase: str, asks: Sequence[Ask], clients: int) -> list[Record]:
        with self._counting(server, phase) as count:
            return run_closed(self._target(server), phase, asks, clients, count)

    def _target(self, server: Server) -> Target:
        plan = server.plan
        return Target(plan.name, server.url, plan.pool_bytes > 0, self.shape.tokens, self.shape.timeout_s)

    @contextmanager
    def _counting(self, server: Server, phase: str, *, watch: bool = False) -> Iterator[Callable[[Record], None]]:
        """Yields what takes each record; with `watch` memory is looked at every few seconds meanwhile."""
        done, stop = 0, threading.Event()

        def count(record: Record) -> None:
            nonlocal done
            done += 1
            self.outcome.records.append(record)
            if self.log is not None:
                self.log.write(json.dumps(record.to_dict()) + "\n")
                self.log.flush()
            if watch and done % 100 == 0:
                self._progress(server.plan.name, f"{phase}: {done} requests")

        def look() -> None:
            while not stop.wait(_MEMORY_EVERY_S):
                self._remember(server, phase, done)

        watcher = threading.Thread(target=look, daemon=True)
        if watch:
            watcher.start()
        try:
            yield count
        finally:
            stop.set()
            if watch:
                watcher.join()
            self._remember(server, phase, done)

    def _remember(self, server: Server, phase: str, requests: int) -> None:
        parts = resident(server)
        if parts:
            since = time.monotonic() - server.started
            self.outcome.memory.append(Memory(server.plan.name, phase, since, requests, parts))

    def _keep(
        self, server: Server, phase: str, records: Sequence[Record], *, clients: int = 0, rate: float | None = None
    ) -> PhaseResult:
        window = 0.0 if rate is None else self.shape.seconds
        result = summarize(records, server.plan.name, phase, clients=clients, rate=rate, window_s=window)
        self.outcome.results.append(result)
        times = "-" if result.ttft_p50 is None else f"{1000 * result.ttft_p50:.0f} ms"
        served = "" if result.throughput is None else f", {result.throughput:.2f}/s"
        said = f"{result.n} answers, TTFT {times}{served}, {result.hits} hits, {result.encoded} encoded"
        errors = f", {result.errors} errors" if result.errors else ""
        self._progress(server.plan.name, f"{phase}: {said}{errors}")
        return result

    def _progress(self, server: str, text: str) -> None:
        self.say(f"[{time.monotonic() - self.start:5.0f} s] {server:10} {text}")


def auto_rates(peaks: Sequence[float]) -> tuple[float, ...]:
    """Rates below, near and above what each server does in a closed loop, rising."""
    return tuple(sorted({float(f"{share * peak:.2g}") for peak in peaks for share in _AUTO if peak > 0}))


def resident(server: Server) -> dict[str, int]:
    """Proportional set size of each of a server's processes in bytes, by what it does: shared pages count once."""
    import psutil

    found: dict[str, int] = {}
    for process in server.tree():
        try:
            name, memory = _role(process.name(), process.cmdline()), process.memory_full_info()
        except psutil.Error:
            continue
        found[name] = found.get(name, 0) + getattr(memory, "pss", memory.rss)
    return found


def _role(name: str, command: Sequence[str]) -> str:
    if name.startswith("VLLM::"):
        return name.removeprefix("VLLM::").lower()
    roles = {"comb_serving.encoding.process": "encoder", "api_server": "API server", "comb.cli": "launcher"}
    return next((role for word, role in roles.items() if any(word in part for part in command)), "others")


def pool_token_bytes(before: Metrics, after: Metrics, tokens: int) -> float | None:
    """Bytes by which the pool has filled per document token, what blocks leave empty included; None if it evicted."""
    if before.ours("evictions") != after.ours("evictions") or not tokens:
        return None
    return (after.ours("pool_used_bytes") - before.ours("pool_used_bytes")) / tokens


def decoder_token_bytes(server: Server) -> float | None:
    """Bytes of keys and values per token in vLLM's own cache: its size over the tokens that fit; None if unsaid."""
    metrics = server.metrics()
    blocks, size = (metrics.label("vllm:cache_config_info", name) for name in ("num_gpu_blocks", "block_size"))
    return server.plan.kv_bytes / (int(blocks) * int(size)) if blocks and size else None
