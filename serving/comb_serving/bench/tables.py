"""From records to figures (percentiles, ratios with intervals, the slope of memory), tables and plots."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from comb.evaluation.plot import Bars, Lines, Panel
from comb.evaluation.table import Column, Row, TextTable, Timing, fixed, ms, spread
from comb_serving.bench.client import RequestRecord
from comb_serving.bench.workload import COMB, PLAIN

COLD, CACHED, TOGETHER, SOAK = "cold", "cached", "together", "soak"
AS_SENT, REORDERED = "as sent", "reordered"
MIB = 2**20


def tables(rows: Sequence[Row], facts: Row) -> list[TextTable]:
    """Three tables, of what there is; `facts` as in `comb_serving.bench.serve.ServeRun`."""
    found = [_outcome(rows, facts), _phases(rows), _servers(facts)]
    return [table for table in found if table.rows]


def trace_tables(rows: Sequence[Row]) -> list[TextTable]:
    """A trace's ways to be sent, one line each."""
    columns = (
        Column("server", "server", names=True), Column("prompts", "phase", names=True),
        Column("n", lambda row: f"{row['n']} of {row['n'] + row['errors']}" if row["errors"] else row["n"]),
        Column("prompt tokens", "prompt_tokens"), Column("computed", "computed"), Column("compiled", "compiled"),
        Column("later, %", lambda row: f"{100 * row['later_share']:.1f}"),
        Column("TTFT p50", "ttft_p50", ms), Column("p95", "ttft_p95", ms), Column("sooner", "ratio", spread),
        Column("answers/s", "throughput", fixed(2)), Column("same", "same", fixed(2)), Column("KL", "kl", fixed(3)),
    )  # fmt: skip
    remarks = [
        "TTFT in ms. computed: prompt tokens that weren't cached; compiled: to be linked, beside them; later: computed "
        "in the second half. sooner: how many times, second half, the first token comes sooner than from plain vLLM "
        "for the prompts as sent (95%). reordered: the client puts what comes most often first. same, KL: answers over "
        "linked segments against plain vLLM's, equal texts and the first token's divergence."
    ]
    return [TextTable("Clients that change nothing", columns, rows, remarks)] if rows else []


def trace_panels(rows: Sequence[Row]) -> list[Panel]:
    """TTFT of the ways to send a trace."""
    return [
        Bars(
            [row for row in rows if row["n"]], lambda row: f"{row['server']}, {row['phase']}",
            lambda row: {"median": row["ttft_p50"], "to p95": row["ttft_p95"] - row["ttft_p50"]},
            "time to first token, ms",
        )
    ]  # fmt: skip


def _outcome(rows: Sequence[Row], facts: Row) -> TextTable:
    """Of what both servers have done."""
    by = {(row["server"], row["phase"]): row for row in rows}
    lines: list[Row] = []
    for phase in dict.fromkeys(row["phase"] for row in rows if not row["rate"]):
        if (times := by.get((COMB, phase), {}).get("ratio")) is not None:
            shown = {server: ms(by[server, phase]["ttft_p50"]) for server in (PLAIN, COMB)}
            lines.append({"name": f"TTFT ms, {phase}", **shown, "ratio": spread(times)})

    def both(name: str, figures: Sequence[float | None], form: str, *, less: bool = False) -> None:
        plain, comb = figures
        if plain or comb:
            ratio = None if not plain or not comb else f"{100 * comb / plain:.1f}%" if less else f"{comb / plain:.1f}"
            shown = {server: form % figure if figure else "none" for server, figure in ((PLAIN, plain), (COMB, comb))}
            lines.append({"name": name, **shown, "ratio": ratio})

    peaks = [max((row["throughput"] or 0.0 for row in rows if row["server"] == server and not row["rate"]), default=0.0)
             for server in (PLAIN, COMB)]  # fmt: skip
    both("answers/s, closed loop", peaks, "%.2f")
    if facts.get("slo_s") is not None:
        kept = [sustained(rows, server, facts["slo_s"]) for server in (PLAIN, COMB)]
        both(f"highest rate with p90 within {1000 * facts['slo_s']:.0f} ms", kept, "%.2f")
    sizes = [facts.get("token_bytes", {}).get(server) for server in (PLAIN, COMB)]
    both("K/V bytes per document token", sizes, "%.0f", less=True)
    remarks = [
        "ratio: how many times better comb is (95% bootstrap interval of the ratio of medians). TTFT is a median."
    ]
    columns = [Column("", "name", names=True), *(Column(name, name) for name in (PLAIN, COMB, "ratio"))]
    return TextTable("comb serve against plain vLLM", columns, lines, remarks)


def _phases(rows: Sequence[Row]) -> TextTable:
    columns = (
        Column("phase", "phase", names=True), Column("server", "server", lambda name: name.split()[0], names=True),
        Column("n", lambda row: f"{row['n']} of {row['n'] + row['errors']}" if row["errors"] else row["n"]),
        Column("TTFT p50", "ttft_p50", ms), Column("p90", "ttft_p90", ms), Column("p99", "ttft_p99", ms),
        Column("late", "late_p99", ms), Column("answers/s", "throughput", fixed(2)),
        Column("hits", "hits"), Column("new", "encoded"),
    )  # fmt: skip
    remarks = [
        "In ms. cold: documents never seen before; cached: from the pool of documents, in any order, by so many "
        "clients; together: all at once about the same documents; N/s: Poisson arrivals, TTFT from arrival, whether or "
        "not earlier requests are answered. late: 99% were sent within so many ms of their "
        "arrival. hits, new: documents found and encoded."
    ]
    warm = [row for row in rows if row["server"] == COMB and row["phase"] not in (COLD, SOAK)]
    if again := sum(row["encoded"] for row in warm if row["n"]):
        remarks.append(f"{again} documents had left the pool and were encoded again: --pool-bytes is too small.")
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    return TextTable("Phases", columns, sorted(rows, key=lambda row: phases.index(row["phase"])), remarks)


def _servers(facts: Row) -> TextTable:
    memory = [{**each, "mib": sum(each["parts"].values()) / MIB} for each in facts.get("memory", ())]
    lines = []
    for name in (PLAIN, COMB):
        sizes = [each["mib"] for each in memory if each["server"] == name]
        grown = growth([each for each in memory if (each["server"], each["phase"]) == (name, SOAK)])
        if sizes:
            lines.append({
                "name": name, "ready": facts["ready_s"].get(name), "answer": facts["first_answer_s"].get(name),
                "last": sizes[-1], "most": max(sizes), "grown": None if grown is None else 1000 * grown / MIB,
            })  # fmt: skip
    columns = (
        Column("server", "name", names=True), Column("ready s", "ready", fixed(1)),
        Column("first answer s", "answer", fixed(1)), Column("MiB last", "last", fixed(0)),
        Column("MiB most", "most", fixed(0)), Column("MiB/1000 requests", "grown", "{:+.1f}".format),
    )  # fmt: skip
    remarks = [
        "Memory: proportional set size of all processes of a server, caches and pool included. MiB/1000 requests: its "
        "growth over the later half of the soak."
    ]
    soak = [each for each in memory if each["phase"] == SOAK]
    grown_parts = {part: growth(soak, part) for part in (soak[-1]["parts"] if soak else ())}
    if shown := [f"{part} {1000 * by / MIB:+.1f}" for part, by in grown_parts.items() if by is not None]:
        remarks.append(f"Of that: {', '.join(shown)}.")
    return TextTable("Start and memory", columns, lines, remarks)


def panels(rows: Sequence[Row], facts: Row) -> list[Panel]:
    """TTFT cold and cached (COMB Fig. 5a and 8), TTFT over the rate (Fig. 10)."""
    measured = [row for row in rows if row["n"]]
    loops = [row for row in measured if not row["rate"] and row["phase"] != SOAK]
    offered = [row for row in measured if row["rate"]]
    slo = facts.get("slo_s")
    return [
        Bars(
            loops, lambda row: f"{row['server']}, {row['phase'].split()[0]}, {row['clients']} at once",
            lambda row: {"median": row["ttft_p50"], "to p90": row["ttft_p90"] - row["ttft_p50"]},
            "time to first token, ms",
        ),
        Lines(offered, "rate", "ttft_p90", "requests offered per second", "p90 of the time to first token, ms",
              by="server", scale=1000, log="xy", level=None if slo is None else 1000 * slo),
    ]  # fmt: skip


# ---- figures ----


def summarize(
    records: Sequence[RequestRecord], server: str, phase: str, *, clients: int = 0, rate: float | None = None,
    window_s: float = 0.0,
) -> dict[str, Any]:  # fmt: skip
    """The figures of one phase, times in seconds over good answers; without one only the errors are counted.

    ``throughput`` is good answers per second, from the start to the last token, or to the end of arrivals (`window_s`).
    ``late_p99`` is of sending behind arrival: what the client itself could not keep up with.
    """
    good = [record for record in records if not record.error]
    ttft = [record.ttft_s for record in good]
    lasted = max([window_s, *(record.due_s + record.total_s for record in good)])
    return {
        "server": server, "phase": phase, "clients": clients, "rate": rate,
        "n": len(good), "errors": len(records) - len(good),
        **{f"ttft_p{percent}": percentile(ttft, percent) for percent in (50, 90, 95, 99)},
        "throughput": len(good) / lasted if lasted else None,
        "late_p99": percentile([record.late_s for record in good], 99),
        "hits": sum(record.hits for record in good), "encoded": sum(record.encoded for record in good),
    }  # fmt: skip


def alike(records: Sequence[RequestRecord], others: Sequence[RequestRecord]) -> dict[str, float | None]:
    """How far answers are from others to the same prompts, both greedy.

    ``same``: the share of equal texts. ``kl``: KL(others || records) of the first token, in nats, over the tokens that
    others find likeliest and one class for all else; what isn't among the likeliest here counts as the last of them, so
    it is too little rather than too much.
    """
    by = {record.number: record for record in others if not record.error}
    same, divergences = [], []
    for record in records:
        if record.error or (other := by.get(record.number)) is None:
            continue
        same.append(record.text == other.text)
        if not record.first or not other.first:
            divergences.append(math.nan)
            continue
        least = min(record.first.values())
        pairs = [(math.exp(value), math.exp(record.first.get(token, least))) for token, value in other.first.items()]
        rest = [max(1e-9, 1 - sum(side)) for side in zip(*pairs, strict=True)]
        divergences.append(math.fsum(p * math.log(p / q) for p, q in [*pairs, (rest[0], rest[1])]))
    if not same:
        return {"same": None, "kl": None}
    return {"same": sum(same) / len(same), "kl": sum(divergences) / len(divergences)}


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Interpolated between order statistics; None of nothing."""
    import numpy as np  # here and below: `comb bench --help` comes by

    return float(np.percentile(values, percent)) if len(values) else None


def ratio(above: Sequence[float], below: Sequence[float]) -> Timing | None:
    """Ratio of two samples' medians, with its 95% bootstrap percentile interval as low and high (Efron 1979).

    Both are resampled on their own. None where one of them is empty.
    """
    import numpy as np

    if not above or not below:
        return None
    rng = np.random.default_rng(0)

    def drawn(values: Sequence[float]) -> Any:
        array = np.asarray(values)
        return np.median(array[rng.integers(len(array), size=(2000, len(array)))], axis=1)

    low, high = np.percentile(drawn(above) / drawn(below), [2.5, 97.5])
    return Timing(float(np.median(above) / np.median(below)), float(low), float(high), len(above) + len(below))


def sustained(rows: Sequence[Row], server: str, slo_s: float) -> float | None:
    """The highest rate of arrivals at which p90 of TTFT was within the SLO, without an error."""
    kept = [row["rate"] for row in rows if row["server"] == server and row["rate"] and row["n"]
            and row["ttft_p90"] <= slo_s and not row["errors"]]  # fmt: skip
    return max(kept, default=None)


def growth(samples: Sequence[Row], part: str | None = None) -> float | None:
    """Bytes of memory per request, of one part or of all; None with fewer than three samples.

    By least squares over the later half of the requests: in the earlier one pool and caches fill.
    """
    import numpy as np

    half = max((sample["requests"] for sample in samples), default=0) / 2
    late = [sample for sample in samples if sample["requests"] >= half]
    if len({sample["requests"] for sample in late}) < 3:
        return None
    nbytes = [sum(s["parts"].values()) if part is None else s["parts"].get(part, 0) for s in late]
    return float(np.polyfit([sample["requests"] for sample in late], nbytes, 1)[0])
