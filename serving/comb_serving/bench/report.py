"""Tables and plot of `comb bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comb.bench.report import TextTable
from comb.evaluation.plot import FAMILIES, make_figure, save
from comb_serving.bench.results import Memory, PhaseResult, Ratio, growth, ratio, sustained
from comb_serving.bench.run import CACHED, COLD, SOAK, TOGETHER, Outcome
from comb_serving.bench.servers import COMB, PLAIN

SERVERS = (PLAIN, COMB)
SHORT = {PLAIN: "plain", COMB: "comb"}
COLOURS = {PLAIN: FAMILIES["prefix"][0], COMB: FAMILIES["comb"][0]}
MARKERS = {PLAIN: FAMILIES["prefix"][1], COMB: FAMILIES["comb"][1]}
MIB = 2**20


def serve_tables(outcome: Outcome) -> list[TextTable]:
    """What was aimed at, TTFT without arrivals, Poisson arrivals, and memory if there was a soak."""
    tables = [_aims(outcome), _loops(outcome), _arrivals(outcome), _servers(outcome)]
    return [table for table in tables if table.lines]


def _aims(outcome: Outcome) -> TextTable:
    fewest = min((result.clients for result in _closed(outcome, COMB)), default=1)
    lines = [
        _aim(outcome, f"cached TTFT, clients: {fewest}", f"{CACHED} {fewest}", "at least 8", 8.0),
        _aim(outcome, "cold TTFT, clients: 1", COLD, "at least 1", 1.0),
        _aim(outcome, "TTFT, all clients at once, same documents", TOGETHER, "-", None),
    ]
    best = {name: max((r.throughput or 0.0 for r in _closed(outcome, name)), default=0.0) for name in SERVERS}
    if all(best.values()):
        lines.append(_over("answers/s, closed loop", best[COMB], best[PLAIN], "{:.2f}", "at least 3", 3.0))
    if outcome.slo_s is not None:
        kept = {name: sustained(outcome.results, name, outcome.slo_s) for name in SERVERS}
        rates = {name: result.rate or 0.0 for name, result in kept.items() if result is not None}
        if len(rates) == len(SERVERS):
            lines.append(
                _over("requests/s offered and kept in the SLO", rates[COMB], rates[PLAIN], "{:.2f}", "at least 3", 3.0)
            )
        else:
            shown = [f"{rates[name]:.2f}" if name in rates else "none" for name in SERVERS]
            lines.append(("requests/s offered and kept in the SLO", *shown, "-", "at least 3", "-"))
    if all(name in outcome.token_bytes for name in SERVERS):
        plain, comb = (outcome.token_bytes[name] for name in SERVERS)
        lines.append(
            ("K/V bytes per document token", f"{plain:.0f}", f"{comb:.0f}", f"{100 * comb / plain:.1f}%", "25%", "-")
        )
    slo = "not known" if outcome.slo_s is None else f"{1000 * outcome.slo_s:.0f} ms"
    remarks = (
        "ratio: how many times better comb is (95% bootstrap interval of the ratio of medians). TTFT in ms, median. "
        f"SLO: 90% of the first tokens within {slo} of arrival, and no failed request. Bytes: what the pool takes, "
        "partly filled blocks included.",
    )
    columns = ("", PLAIN, COMB, "ratio", "aim", "met")
    return TextTable("comb serve against plain vLLM", columns, tuple(line for line in lines if line), remarks)


def _aim(outcome: Outcome, name: str, phase: str, aim: str, least: float | None) -> tuple[str, ...]:
    plain, comb = (outcome.ttft(server, phase) for server in SERVERS)
    times = ratio(plain, comb)
    if times is None:
        return ()
    results = [outcome.result(server, phase) for server in SERVERS]
    shown = [_ms(None if result is None else result.ttft_p50) for result in results]
    return (name, *shown, _interval(times), aim, "-" if least is None else _yes(times.value >= least))


def _over(name: str, comb: float, plain: float, form: str, aim: str, least: float) -> tuple[str, ...]:
    return (name, form.format(plain), form.format(comb), f"{comb / plain:.1f}", aim, _yes(comb / plain >= least))


def _loops(outcome: Outcome) -> TextTable:
    lines = []
    phases = dict.fromkeys(r.phase for r in outcome.results if r.rate is None)
    for phase in phases:
        above, below = (outcome.ttft(server, phase) for server in SERVERS)
        times = ratio(above, below)
        for server in SERVERS:
            found = [r for r in outcome.results if (r.server, r.phase) == (server, phase)]
            lines += [_line(result, times if server == COMB else None) for result in found]
    columns = (
        "phase", "server", "n", "TTFT p50", "p90", "p99", "ratio", "TPOT", "whole", "answers/s", "hits", "new",
    )  # fmt: skip
    remarks = (
        "Times in ms: TTFT from sending to the first token, TPOT per further token, whole to the last one, medians. "
        "ratio: plain vLLM's median TTFT over comb's (95% bootstrap interval). Behind the phase how many clients. "
        "cold: documents never seen before; cached: from the pool of documents, in any order; together: all at once "
        "about the same documents. hits, new: documents found and encoded. With few requests p99 is the slowest.",
        *_evicted(outcome),
    )
    return TextTable("Time to first token, closed loops", columns, tuple(lines), remarks)


def _evicted(outcome: Outcome) -> list[str]:
    again = sum(r.encoded for r in outcome.results if r.server == COMB and r.phase not in (COLD, SOAK))
    return [f"{again} documents had left the pool and were encoded again: --pool-bytes is too small."] if again else []


def _line(result: PhaseResult, times: Ratio | None) -> tuple[str, ...]:
    documents = (result.hits, result.encoded) if result.server == COMB else ("-", "-")
    return (
        _name(result), SHORT[result.server], _count(result),
        *(_ms(value) for value in (result.ttft_p50, result.ttft_p90, result.ttft_p99)), _interval(times),
        _ms(result.tpot_p50), _ms(result.total_p50), _rate(result.throughput), *map(str, documents),
    )  # fmt: skip


def _name(result: PhaseResult) -> str:
    return f"{result.phase.split()[0]}, {result.clients}"


def _count(result: PhaseResult) -> str:
    return f"{result.n} of {result.n + result.errors}" if result.errors else str(result.n)


def _arrivals(outcome: Outcome) -> TextTable:
    offered = sorted((r for r in outcome.results if r.rate is not None), key=lambda r: (r.rate or 0, r.server == COMB))
    lines = []
    for r in offered:
        figures = [r.ttft_p50, r.ttft_p90, r.ttft_p99, r.tpot_p50, r.late_p99]
        kept = (
            "-" if outcome.slo_s is None or r.ttft_p90 is None else _yes(r.ttft_p90 <= outcome.slo_s and not r.errors)
        )
        head = (f"{r.rate:g}", SHORT[r.server], _count(r))
        lines.append(
            (*head, "not run", *("-",) * 6)
            if r.skipped
            else (*head, *(_ms(figure) for figure in figures), _rate(r.throughput), kept)
        )
    remarks = (
        "TTFT in ms from arrival, whether or not earlier requests are answered. late: 99% of requests were sent within "
        "so many ms of their arrival. answers/s: until the end of arrivals, or the last answer if that is later.",
        *dict.fromkeys(f"Not run: {r.server} at {r.phase}: {r.skipped}." for r in offered if r.skipped),
    )
    columns = ("offered/s", "server", "n", "TTFT p50", "p90", "p99", "TPOT", "late", "answers/s", "in SLO")
    return TextTable("Poisson arrivals", columns, tuple(lines), remarks)


def _servers(outcome: Outcome) -> TextTable:
    lines, starts = [], (outcome.ready_s, outcome.first_answer_s)
    for server in SERVERS:
        samples = [sample for sample in outcome.memory if sample.server == server]
        if not samples:
            continue
        soak = [sample for sample in samples if sample.phase == SOAK]
        grown = growth(soak)
        lines.append(
            (
                server,
                *(f"{times[server]:.1f}" if server in times else "-" for times in starts),
                f"{samples[0].nbytes / MIB:.0f}", f"{samples[-1].nbytes / MIB:.0f}",
                f"{max(sample.nbytes for sample in samples) / MIB:.0f}",
                "-" if grown is None else f"{1000 * grown / MIB:+.1f} ({soak[-1].requests})",
            )
        )  # fmt: skip
    columns = (
        "server",
        "ready s",
        "first answer s",
        "MiB first",
        "MiB last",
        "MiB most",
        "MiB/1000 requests",
    )
    remarks = (
        "Memory: proportional set size of all processes of a server, caches and pool included, after the first phase, "
        "after the last, and the most. MiB/1000 requests: its growth over the later half of the soak (its length).",
        *_growing(outcome),
    )
    return TextTable("Start and memory", columns, tuple(lines), remarks)


def _growing(outcome: Outcome) -> list[str]:
    """Which processes grew in the soak."""
    soak = [sample for sample in outcome.memory if sample.phase == SOAK]
    grown = {part: growth(soak, part) for part in (soak[-1].parts if soak else ())}
    shown = [f"{part} {1000 * value / MIB:+.1f}" for part, value in grown.items() if value is not None]
    return [f"Of that: {', '.join(shown)}."] if shown else []


def _closed(outcome: Outcome, server: str) -> list[PhaseResult]:
    return [r for r in outcome.results if r.server == server and r.phase.startswith(f"{CACHED} ") and r.n]


def failures(outcome: Outcome, most: int = 3) -> list[str]:
    """What went wrong, the first few of each server."""
    found: list[str] = []
    for server in SERVERS:
        wrong = [record for record in outcome.records if record.server == server and record.error]
        found += [f"{server}, {record.phase}, request {record.number}: {record.error}" for record in wrong[:most]]
        found += [f"{server}: {len(wrong) - most} more"] if len(wrong) > most else []
    return found


# ---- the plot ----


def plot_serve(outcome: Outcome, path: str | Path, *, title: str = "") -> Path:
    """TTFT cold and cached (COMB Fig. 5a and 8), TTFT and throughput over the rate (Fig. 10), memory over a soak."""
    soak = [sample for sample in outcome.memory if sample.phase == SOAK]
    columns = 4 if soak else 3
    figure, axes = make_figure(4.4 * columns, 4.0, columns=columns)
    _bars(axes[0], outcome)
    _lines(axes[1], axes[2], outcome)
    if soak:
        _memory(axes[3], soak)
    return save(figure, axes, path, title)


def _bars(axes: Any, outcome: Outcome) -> None:
    phases = [p for p in dict.fromkeys(r.phase for r in outcome.results) if all(outcome.result(s, p) for s in SERVERS)]
    phases = [p for p in phases if p in (COLD, TOGETHER) or p.startswith(CACHED)]
    width = 0.4
    for side, server in enumerate(SERVERS):
        found = [outcome.result(server, phase) for phase in phases]
        places = [place + (side - 0.5) * width for place in range(len(phases))]
        middle = [1000 * (r.ttft_p50 or 0) if r else 0 for r in found]
        above = [1000 * ((r.ttft_p90 or 0) - (r.ttft_p50 or 0)) if r else 0 for r in found]
        axes.bar(places, middle, width, color=COLOURS[server], label=server)
        axes.errorbar(places, middle, [[0] * len(places), above], fmt="none", color="black", linewidth=0.8, capsize=2)
        for place, value in zip(places, middle, strict=True):
            axes.text(place, 0.92 * value, f"{value:.0f}", color="white", ha="center", va="top", fontsize=6)
    axes.set_xticks(range(len(phases)), [_phase_label(outcome, phase) for phase in phases], fontsize="small")
    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.set_ylim(low / 2, 3 * high)  # room for the legend, and for the least bar
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_ylabel("time to first token, ms: median, line to p90")
    axes.legend(frameon=False, fontsize="small", loc="upper left", ncols=2)


def _phase_label(outcome: Outcome, phase: str) -> str:
    result = outcome.result(COMB, phase)
    return f"{phase.split()[0]}\n{'' if result is None else result.clients} at once"


def _lines(left: Any, right: Any, outcome: Outcome) -> None:
    drawn = sorted((r for r in outcome.results if r.rate and r.n), key=lambda r: r.rate or 0)
    rates = [r.rate for r in drawn]
    for server in SERVERS:
        points = [r for r in drawn if r.server == server]
        look = {"color": COLOURS[server], "marker": MARKERS[server], "markersize": 5}
        x = [r.rate for r in points]
        left.plot(x, [1000 * (r.ttft_p50 or 0) for r in points], label=f"{server}, median", **look)
        left.plot(x, [1000 * (r.ttft_p90 or 0) for r in points], label=f"{server}, p90", linestyle=":", **look)
        right.plot(x, [r.throughput for r in points], label=server, **look)
    if outcome.slo_s is not None:
        left.axhline(1000 * outcome.slo_s, color="#d62728", linewidth=1, label="SLO on p90")
    right.plot(rates, rates, color="#bbbbbb", linewidth=1, zorder=0, label="all that is offered")
    left.set_ylabel("time to first token, ms, waiting included")
    right.set_ylabel("answers per second")
    for axes in (left, right):
        axes.set_yscale("log")
        axes.set_xlabel("requests offered per second")
        axes.set_xscale("log")  # what one server can do may be a small part of what the other can
        axes.legend(frameon=False, fontsize="small")
        axes.xaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_major_formatter("{x:g}")


def _memory(axes: Any, soak: Sequence[Memory]) -> None:
    for server in dict.fromkeys(sample.server for sample in soak):
        own = [sample for sample in soak if sample.server == server]
        axes.plot([s.requests for s in own], [s.nbytes / MIB for s in own], color=COLOURS[server], label=server)
    axes.set_xlabel("requests of the soak")
    axes.set_ylabel("memory of all processes, MiB")
    axes.set_ylim(0, 1.2 * max(sample.nbytes for sample in soak) / MIB)
    axes.legend(frameon=False, fontsize="small")


def _ms(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _interval(value: Ratio | None) -> str:
    if value is None:
        return "-"
    middle, low, high = (f"{v:.2f}" if v < 10 else f"{v:.1f}" for v in (value.value, value.low, value.high))
    return f"{middle} ({low}-{high})"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
