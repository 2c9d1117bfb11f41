"""`comb bench serve`: servers up, phase after phase with both in turn, servers down.

Both servers run at once and take turns, phase by phase, so that a slow moment of the machine meets both; the one whose
turn it isn't is idle. With `--one-at-a-time`, for machines that hold one only, each goes through all phases on its own.
"""

from __future__ import annotations

import json
import os
import shlex
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import torch

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.options import integers, numbers
from comb_serving.bench.client import RequestRecord, Target
from comb_serving.bench.figures import ratio, summarize
from comb_serving.bench.models import Models, given_models, make_models
from comb_serving.bench.options import ServeBenchOptions
from comb_serving.bench.servers import (
    COMB,
    PLAIN,
    MeasuredServer,
    ServerPlan,
    decoder_token_bytes,
    plans,
    pool_token_bytes,
)  # fmt: skip
from comb_serving.bench.tables import CACHED, COLD, SOAK, TOGETHER, panels, tables
from comb_serving.bench.workload import Ask, Workload
from comb_serving.config.sizes import parse_bytes

REPEATS, SOAK_CLIENTS = 2, 4  # of clients that ask together; at once in the soak
BEYOND = 1.3  # a server isn't offered more than so many times what it does in a closed loop
SLO_TIMES = 3
_AUTO = (0.5, 0.8, 1.2)
_MEMORY_EVERY_S = 2.0


@benchmark("serve", lambda rows: tables(rows, {}), lambda rows: panels(rows, {}))
def serve(options: ServeBenchOptions, report: BenchmarkReport) -> None:
    """`comb serve` against plain vLLM over HTTP: TTFT, throughput, bytes, start-up, memory (COMB Fig. 5a and 10)."""
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, _leave))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comb-bench-")))
        logs, log = folder, None
        if options.out is not None:
            logs = options.out.with_suffix(".logs")
            logs.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(options.out.with_suffix(".records.jsonl").open("w", encoding="utf-8"))
        models = given_models(options) if options.checkpoint else make_models(folder, options)
        report.heading = (
            f"{models.name}: {options.documents} of {options.pool} documents of {options.document_tokens} tokens"
        )
        run = ServeRun(options, report, Workload(options, _counter(models)), log)
        run.go(_plans(options, models, report), logs)
    if run.wrong():
        raise RuntimeError("requests have failed: " + "; ".join(run.wrong()))


def _leave(number: int, _: object) -> None:
    """SIGTERM unwinds like Ctrl-C, so that the servers end."""
    raise SystemExit(128 + number)


def _plans(options: ServeBenchOptions, models: Models, report: BenchmarkReport) -> list[ServerPlan]:
    given = shlex.split(options.vllm)
    if options.vllm == "auto":
        # a CPU's attention wants blocks of a multiple of 32 tokens, and compiling takes minutes there
        given = [] if torch.cuda.is_available() else ["--enforce-eager", "--block-size", "32"]
        given += [] if options.checkpoint else ["--dtype", options.dtype]
    found = plans(
        models, cache_bytes=parse_bytes(options.cache_bytes), pool_bytes=parse_bytes(options.pool_bytes),
        max_len=options.positions, options=given,
    )  # fmt: skip
    report.facts |= {
        "models": vars(models), "servers": {plan.name: plan.command for plan in found},
        "threads": os.environ.get("OMP_NUM_THREADS"), "load_before": os.getloadavg(),
    }  # fmt: skip
    return found


def _counter(models: Models) -> Callable[[str], int]:
    from transformers import AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(models.adapter)
    return lambda text: len(tokenizer.encode(text, add_special_tokens=False))


class ServeRun:
    """A run; one that is broken off leaves in the report what it has.

    What the report says of servers, by their names: ``ready_s`` and ``first_answer_s`` from the start, ``token_bytes``
    of keys and values per document token, as the server counts its own memory; ``memory`` over time; ``slo_s``.

    Args:
        log: takes every record as one JSON line, at once.
    """

    def __init__(
        self, options: ServeBenchOptions, report: BenchmarkReport, workload: Workload, log: TextIO | None
    ) -> None:
        self.options, self.report, self.workload, self.log = options, report, workload, log
        self.clients = integers(options.clients, "--clients")
        self.rates = None if options.rates == "auto" else numbers(options.rates, "--rates", least=1e-9)
        self.records: list[RequestRecord] = []
        self.peak: dict[str, float] = {}  # by server: answers per second in its best closed loop
        self.facts = report.facts
        self.facts |= {"slo_s": None, "ready_s": {}, "first_answer_s": {}, "token_bytes": {}, "memory": []}
        report.tables = partial(tables, facts=self.facts)
        report.panels = partial(panels, facts=self.facts)

    def go(self, plans: Sequence[ServerPlan], logs: Path) -> None:
        """Everything; what servers print goes to ``logs/<name>.log``."""
        try:
            for group in [[plan] for plan in plans] if self.options.one_at_a_time else [list(plans)]:
                with ExitStack() as stack:
                    servers = [stack.enter_context(self._started(plan, logs)) for plan in group]
                    for step in self._steps():
                        for server in servers:
                            step(server)
        finally:
            self.facts |= {"seconds": time.perf_counter() - self.report.begun, "load_after": os.getloadavg()}

    def wrong(self, most: int = 3) -> list[str]:
        """Which requests have failed, the first few of each server."""
        found: list[str] = []
        for server in (PLAIN, COMB):
            failed = [record for record in self.records if record.server == server and record.error]
            found += [f"{server}, {record.phase}, request {record.number}: {record.error}" for record in failed[:most]]
            found += [f"{server}: {len(failed) - most} more"] if len(failed) > most else []
        return found

    @contextmanager
    def _started(self, plan: ServerPlan, logs: Path) -> Iterator[MeasuredServer]:
        self.report.say(f"{plan.name}: starting")
        with MeasuredServer(plan, logs / f"{plan.name.replace(' ', '-')}.log") as server:
            self.facts["ready_s"][plan.name] = server.ready_s
            for ask in self.workload.new(3, "warm-up"):
                (record,) = replace(self._target(server), on_record=lambda _: None).run_closed("warm-up", [ask], 1)
                if record.error:
                    raise RuntimeError(f"{plan.name} fails at its first requests: {record.error}; see {server.log}")
                self.facts["first_answer_s"].setdefault(plan.name, time.monotonic() - server.started)
            self.report.say(f"{plan.name}: ready after {server.ready_s:.0f} s")
            yield server
            self.report.say(f"{plan.name}: ending")

    # ---- phases ----

    def _steps(self) -> Iterator[Callable[[MeasuredServer], None]]:
        """One after the other: rates that depend on closed loops are known when those have been run."""
        yield self._cold
        for clients in self.clients:
            yield partial(self._closed, clients=clients)
        yield self._together
        for rate in self.rates or auto_rates(list(self.peak.values())):
            yield partial(self._open, rate=rate)
        if self.options.soak:
            yield self._soak

    def _cold(self, server: MeasuredServer) -> None:
        before = server.get("/metrics")
        records = self._run_closed(server, COLD, self.workload.cold(self.options.cold), 1)
        self._keep(server, COLD, records, clients=1)
        after, tokens = server.get("/metrics"), sum(record.document_tokens for record in records)
        found = (
            pool_token_bytes(before, after, tokens)
            if server.plan.pool_bytes
            else decoder_token_bytes(after, server.plan.kv_bytes)
        )
        if found is not None:
            self.facts["token_bytes"][server.plan.name] = found

    def _closed(self, server: MeasuredServer, *, clients: int) -> None:
        name, phase = server.plan.name, f"{CACHED} {clients}"
        asks = self.workload.drawn(self.options.requests, phase)
        row = self._keep(server, phase, self._run_closed(server, phase, asks, clients), clients=clients)
        self.peak[name] = max(self.peak.get(name, 0.0), row["throughput"] or 0.0)
        if name == PLAIN and self.facts["slo_s"] is None:
            self.facts["slo_s"] = self.options.slo or (SLO_TIMES * row["ttft_p50"] if row["ttft_p50"] else None)

    def _together(self, server: MeasuredServer) -> None:
        records: list[RequestRecord] = []
        for asks in self.workload.together(self.options.together, REPEATS):
            # one repeat behind the other, as they were
            before = max((record.due_s + record.total_s for record in records), default=0.0)
            found = self._run_closed(server, TOGETHER, asks, len(asks))
            records += [replace(record, due_s=before + record.due_s) for record in found]
        self._keep(server, TOGETHER, records, clients=self.options.together)

    def _open(self, server: MeasuredServer, *, rate: float) -> None:
        name, phase = server.plan.name, f"{rate:.3g}/s"
        if rate > BEYOND * self.peak[name]:
            why = f"not run: more than {BEYOND:g} times its {self.peak[name]:.2f}/s in a closed loop"
            self.report.add({"server": name, "phase": phase, "rate": rate, "n": 0, "errors": 0, "refused": why})
            return
        arrivals = self.workload.arrivals(rate, self.options.seconds)
        asks = self.workload.drawn(len(arrivals), phase)
        with self._counting(server, phase) as target:
            records = target.run_open(phase, asks, arrivals)
        self._keep(server, phase, records, rate=rate)

    def _soak(self, server: MeasuredServer) -> None:
        if server.plan.name == COMB:
            with self._counting(server, SOAK, watch=True) as target:
                records = target.run_closed(SOAK, self.workload.soak(self.options.soak), SOAK_CLIENTS)
            self._keep(server, SOAK, records, clients=SOAK_CLIENTS)

    # ---- one phase ----

    def _run_closed(self, server: MeasuredServer, phase: str, asks: Sequence[Ask], clients: int) -> list[RequestRecord]:
        with self._counting(server, phase) as target:
            return target.run_closed(phase, asks, clients)

    def _target(self, server: MeasuredServer) -> Target:
        plan, options = server.plan, self.options
        return Target(plan.name, server.url, plan.pool_bytes > 0, options.max_tokens, options.timeout, self._on_record)

    def _on_record(self, record: RequestRecord) -> None:
        self.records.append(record)
        if self.log is not None:
            self.log.write(json.dumps(asdict(record)) + "\n")
            self.log.flush()

    @contextmanager
    def _counting(self, server: MeasuredServer, phase: str, *, watch: bool = False) -> Iterator[Target]:
        """The server to be asked; memory is noted at the end, and with `watch` every few seconds."""
        begun, stop = len(self.records), threading.Event()

        def look() -> None:
            parts = server.resident()
            if parts:
                since, requests = time.monotonic() - server.started, len(self.records) - begun
                at = {"server": server.plan.name, "phase": phase, "seconds": since, "requests": requests}
                self.facts["memory"].append({**at, "parts": parts})

        def look_on() -> None:
            while not stop.wait(_MEMORY_EVERY_S):
                look()

        watcher = threading.Thread(target=look_on, daemon=True)
        if watch:
            watcher.start()
        try:
            yield self._target(server)
        finally:
            stop.set()
            if watch:
                watcher.join()
            look()

    def _keep(
        self, server: MeasuredServer, phase: str, records: Sequence[RequestRecord], *, clients: int = 0,
        rate: float | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        name = server.plan.name
        row = summarize(
            records, name, phase, clients=clients, rate=rate, window_s=0.0 if rate is None else self.options.seconds
        )
        if name == COMB:
            row["ratio"] = ratio(self._ttft(PLAIN, phase), self._ttft(COMB, phase))
        self.report.add(row)
        times = "-" if row["ttft_p50"] is None else f"{1000 * row['ttft_p50']:.0f} ms"
        served = "" if row["throughput"] is None else f", {row['throughput']:.2f}/s"
        said = f"{row['n']} answers, TTFT {times}{served}, {row['hits']} hits, {row['encoded']} encoded"
        errors = f", {row['errors']} errors" if row["errors"] else ""
        self.report.say(f"{name}: {phase}: {said}{errors}")
        return row

    def _ttft(self, server: str, phase: str) -> list[float]:
        return [r.ttft_s for r in self.records if (r.server, r.phase) == (server, phase) and not r.error]


def auto_rates(peaks: Sequence[float]) -> list[float]:
    """Rates below, near and above what each server does in a closed loop, rising."""
    return sorted({float(f"{share * peak:.2g}") for peak in peaks for share in _AUTO if peak > 0})
