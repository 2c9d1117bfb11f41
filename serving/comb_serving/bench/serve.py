"""`comb bench serve`: servers up, phase after phase with both in turn, servers down.

Both servers run at once and take turns, phase by phase, so that a slow moment of the machine meets both; the one whose
turn it isn't is idle. With `--one-at-a-time`, for machines that hold one only, each goes through all phases on its own.
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

from comb.bench.harness import BenchmarkReport, benchmark
from comb.bench.options import integers, numbers
from comb.evaluation.table import Row
from comb_serving.bench.client import Asked, RequestRecord, Target
from comb_serving.bench.tables import (
    AS_SENT,
    CACHED,
    COLD,
    REORDERED,
    SOAK,
    TOGETHER,
    alike,
    panels,
    ratio,
    summarize,
    tables,
    trace_panels,
    trace_tables,
)
from comb_serving.bench.trace import Trace, TraceAsk, made
from comb_serving.bench.workload import COMB, PLAIN, ServeBenchOptions, Workload

if TYPE_CHECKING:
    from comb_serving.bench.servers import MeasuredServer, ServerPlan

REPEATS = 2  # of clients that ask together
SOAK_CLIENTS, SOAK_STRIDE = 4, 20  # at once, and between two looks at the memory
BEYOND = 1.3  # a server isn't offered more than so many times what it does in a closed loop
SLO_TIMES = 3
_AUTO = (0.5, 0.8, 1.2)


@benchmark("serve", lambda rows: ())  # a run has tables and panels of its own, which know its facts
def serve(options: ServeBenchOptions, report: BenchmarkReport) -> None:
    """`comb serve` against plain vLLM over HTTP: TTFT, throughput, bytes, start-up, memory (COMB Fig. 5a and 10)."""
    from jinja2 import TemplateError
    from transformers import AutoTokenizer

    from comb_serving.bench.servers import models_of, plans

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="comb-bench-")))
        logs, log = folder, None
        if options.out is not None:
            logs = options.out.with_suffix(".logs")
            logs.mkdir(parents=True, exist_ok=True)
            log = stack.enter_context(options.out.with_suffix(".records.jsonl").open("w", encoding="utf-8"))
        models = models_of(options, folder)
        tokenizer = AutoTokenizer.from_pretrained(models.adapter)

        def count(text: str) -> int:
            return len(tokenizer.encode(text, add_special_tokens=False))

        asked = f"{options.documents} of {options.pool} documents of {options.document_tokens} tokens"
        more = [] if options.checkpoint else ["--dtype", options.dtype]
        linking = [] if options.method is None else ["--method", options.method]
        positions, trace = options.positions, None
        if options.trace is not None:
            trace = made(options.trace, options.prompt_tokens, options.requests, options.seed, count)
            try:
                tokenizer.apply_chat_template([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])
            except TemplateError:  # of a model that knows no system messages
                trace = replace(trace, systems=False)
            asked = f"trace {trace.name}, {len(trace.requests)} requests, {trace.repeated():.0%} of the tokens repeated"
            more = ["--dtype", options.dtype]
            linking += ["--comb-segments", "auto"]
            positions = trace.positions(options.max_tokens)
        report.heading = f"{models.name}: {asked}"
        found = plans(options, models.backbone, [models.adapter, *linking], more, positions=positions)
        report.facts |= {
            "models": vars(models), "servers": {plan.name: plan.command for plan in found},
            "threads": os.environ.get("OMP_NUM_THREADS"), "load_before": os.getloadavg(),
        }  # fmt: skip
        run = ServeRun(options, report, Workload(options, count), log, trace=trace)
        run.go(found, logs)
    if run.wrong():
        raise RuntimeError("requests have failed: " + "; ".join(run.wrong()))


class ServeRun:
    """A run; one that is broken off leaves in the report what it has.

    What the report says of servers, by their names: ``ready_s`` and ``first_answer_s`` from the start, ``token_bytes``
    of keys and values per document token, as the server counts its own memory; ``memory`` over time; ``slo_s``.
    """

    def __init__(
        self, options: ServeBenchOptions, report: BenchmarkReport, workload: Workload, log: TextIO | None,
        *, trace: Trace | None = None,
    ) -> None:  # fmt: skip
        self.options, self.report, self.workload, self.log, self.trace = options, report, workload, log, trace
        self.clients = integers(options.clients, "--clients")
        self.rates = None if options.rates == "auto" else numbers(options.rates, "--rates", least=1e-9)
        self.records: list[RequestRecord] = []
        self.peak: dict[str, float] = {}  # by server: answers per second in its best closed loop
        self.facts = report.facts
        self.facts |= {"slo_s": None, "ready_s": {}, "first_answer_s": {}, "token_bytes": {}, "memory": []}
        report.tables, report.panels = partial(tables, facts=self.facts), partial(panels, facts=self.facts)
        if trace is not None:
            report.tables, report.panels = trace_tables, trace_panels

    def go(self, plans: Sequence[ServerPlan], logs: Path) -> None:
        """Everything; what servers print goes to ``logs/<name>.log``."""
        for group in [[plan] for plan in plans] if self.options.one_at_a_time else [plans]:
            with ExitStack() as stack:
                servers = [stack.enter_context(self._started(plan, logs)) for plan in group]
                for step in self._steps():
                    for server in servers:
                        step(server)

    def wrong(self, most: int = 5) -> list[str]:
        """Which requests have failed, the first few of them."""
        failed = [f"{r.server}, {r.phase}, request {r.number}: {r.error}" for r in self.records if r.error]
        return [*failed[:most], *([f"{len(failed) - most} more"] if len(failed) > most else [])]

    @contextmanager
    def _started(self, plan: ServerPlan, logs: Path) -> Iterator[MeasuredServer]:
        from comb_serving.bench.servers import MeasuredServer

        with MeasuredServer(plan, logs / f"{plan.name.replace(' ', '-')}.log") as server:
            self.facts["ready_s"][plan.name] = server.ready_s
            warm_up = replace(self._target(server), on_record=lambda _: None)
            asks: Iterable[Asked] = self.workload.drawn(3, "warm-up", new=self.options.documents)
            if self.trace is not None:
                asks = [TraceAsk(0, ({"role": "user", "content": "Hello."},))] * 3
            for ask in asks:
                (record,) = warm_up.run_closed("warm-up", [ask], 1)
                if record.error:
                    raise RuntimeError(f"{plan.name} fails at its first requests: {record.error}; see {server.log}")
                self.facts["first_answer_s"].setdefault(plan.name, time.monotonic() - server.started)
            self.report.say(f"{plan.name}: ready after {server.ready_s:.0f} s")
            yield server

    def _steps(self) -> Iterator[Callable[[MeasuredServer], None]]:
        """One phase after the other: rates that depend on closed loops are known when those have been run."""
        if self.trace is not None:
            yield partial(self._sent, trace=self.trace, way=AS_SENT)
            yield partial(self._sent, trace=self.trace.reordered(), way=REORDERED)
            return
        yield self._cold
        for clients in self.clients:
            yield partial(self._cached, clients=clients)
        yield self._together
        # without rates given: below, near and above what each server does in a closed loop
        around = {float(f"{share * peak:.2g}") for peak in self.peak.values() for share in _AUTO if peak > 0}
        for rate in self.rates or sorted(around):
            yield partial(self._open, rate=rate)
        if self.options.soak:
            yield self._soak

    def _cold(self, server: MeasuredServer) -> None:
        from comb_serving.bench.servers import token_bytes

        before, asks = server.get("/metrics"), self.workload.cold(self.options.cold)
        self._measure(server, COLD, lambda target: target.run_closed(COLD, asks, 1), clients=1)
        tokens = sum(r.document_tokens for r in self.records if (r.server, r.phase) == (server.plan.name, COLD))
        found = token_bytes(server.plan, before, server.get("/metrics"), tokens)
        if found is not None:
            self.facts["token_bytes"][server.plan.name] = found

    def _cached(self, server: MeasuredServer, *, clients: int) -> None:
        name, phase = server.plan.name, f"{CACHED} {clients}"
        asks = list(self.workload.drawn(self.options.requests, phase))
        row = self._measure(server, phase, lambda target: target.run_closed(phase, asks, clients), clients=clients)
        self.peak[name] = max(self.peak.get(name, 0.0), row["throughput"] or 0.0)
        if name == PLAIN and self.facts["slo_s"] is None and row["ttft_p50"]:
            self.facts["slo_s"] = SLO_TIMES * row["ttft_p50"]

    def _together(self, server: MeasuredServer) -> None:
        def run(target: Target) -> list[RequestRecord]:
            records: list[RequestRecord] = []
            for asks in self.workload.together(self.options.together, REPEATS):
                # one repeat behind the other, as they were
                before = max((record.due_s + record.total_s for record in records), default=0.0)
                found = target.run_closed(TOGETHER, asks, len(asks))
                records += [replace(record, due_s=before + record.due_s) for record in found]
            return records

        self._measure(server, TOGETHER, run, clients=self.options.together)

    def _open(self, server: MeasuredServer, *, rate: float) -> None:
        name, phase = server.plan.name, f"{rate:.3g}/s"
        if rate > BEYOND * self.peak[name]:
            why = f"not run: more than {BEYOND:g} times its {self.peak[name]:.2f}/s in a closed loop"
            self.report.add({"server": name, "phase": phase, "rate": rate, "n": 0, "errors": 0, "refused": why})
            return
        arrivals = self.workload.arrivals(rate, self.options.seconds)
        asks = list(self.workload.drawn(len(arrivals), phase))
        self._measure(server, phase, lambda target: target.run_open(phase, asks, arrivals), rate=rate)

    def _soak(self, server: MeasuredServer) -> None:
        """Some requests at a time, with a look at the memory behind each: the server is idle then."""
        if server.plan.name != COMB:
            return
        asks = self.workload.drawn(self.options.soak, SOAK, new=1)

        def run(target: Target) -> list[RequestRecord]:
            records: list[RequestRecord] = []
            while some := list(islice(asks, SOAK_STRIDE)):
                records += target.run_closed(SOAK, some, SOAK_CLIENTS)
                self._note_memory(server, SOAK)
            return records

        self._measure(server, SOAK, run, clients=SOAK_CLIENTS)

    def _sent(self, server: MeasuredServer, *, trace: Trace, way: str) -> None:
        """A trace in one of the ways that clients may send it; only plain vLLM needs the second."""
        from comb_serving.bench.servers import compiled_tokens

        name, options = server.plan.name, self.options
        if (name, way) == (COMB, REORDERED):
            return
        before, asks = server.get("/metrics"), trace.asks(salt=way)
        row = self._measure(server, way, lambda target: target.run_closed(way, asks, 1, pause=options.pause), clients=1)
        records, plain = self._good(name, way), self._good(PLAIN, AS_SENT)
        later = [r for r in records if r.number >= len(asks) // 2]
        row["prompt_tokens"] = sum(r.prompt_tokens for r in records)
        row["computed"] = sum(r.computed for r in records)
        row["later_share"] = sum(r.computed for r in later) / max(1, sum(r.prompt_tokens for r in later))
        row["compiled"] = compiled_tokens(server.get("/metrics")) - compiled_tokens(before)
        row["ratio"] = ratio([r.ttft_s for r in plain if r.number >= len(asks) // 2], [r.ttft_s for r in later])
        row |= alike([r for r in records if r.document_tokens], plain) if name == COMB else {}

    def _good(self, server: str, phase: str) -> list[RequestRecord]:
        return [r for r in self.records if (r.server, r.phase) == (server, phase) and not r.error]

    def _target(self, server: MeasuredServer) -> Target:
        def keep(record: RequestRecord) -> None:
            self.records.append(record)
            if self.log is not None:
                self.log.write(json.dumps(asdict(record)) + "\n")
                self.log.flush()

        plan, options = server.plan, self.options
        linked = plan.pool_bytes > 0 and self.trace is None
        return Target(plan.name, server.url, linked, options.max_tokens, options.timeout, keep)

    def _measure(
        self, server: MeasuredServer, phase: str, run: Callable[[Target], list[RequestRecord]], *, clients: int = 0,
        rate: float | None = None,
    ) -> Row:  # fmt: skip
        """One phase of one server: a row of its requests, and its memory at the end."""
        name, options = server.plan.name, self.options
        records = run(self._target(server))
        self._note_memory(server, phase)
        row = summarize(records, name, phase, clients=clients, rate=rate, window_s=options.seconds if rate else 0.0)
        if name == COMB and self.trace is None:
            plain, comb = ([r.ttft_s for r in self._good(server, phase)] for server in (PLAIN, COMB))
            row["ratio"] = ratio(plain, comb)
        self.report.add(row)
        times = "-" if row["ttft_p50"] is None else f"{1000 * row['ttft_p50']:.0f} ms"
        errors = f", {row['errors']} errors" if row["errors"] else ""
        self.report.say(f"{name}: {phase}: {row['n']} answers, TTFT {times}, {row['encoded']} encoded{errors}")
        return row

    def _note_memory(self, server: MeasuredServer, phase: str) -> None:
        name = server.plan.name
        if parts := server.resident():
            done = sum((each.server, each.phase) == (name, phase) for each in self.records)
            self.facts["memory"].append({"server": name, "phase": phase, "requests": done, "parts": parts})
