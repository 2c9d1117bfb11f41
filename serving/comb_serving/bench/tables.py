"""Tables and plots of `comb bench serve`: what was aimed at, closed loops, Poisson arrivals, start and memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from comb.bench.harness import Row
from comb.evaluation.plot import Bars, Lines, Panel
from comb.evaluation.table import Column, TextTable, fixed, ms, spread
from comb_serving.bench.figures import growth, keeps_slo, sustained
from comb_serving.bench.servers import COMB, PLAIN

COLD, CACHED, TOGETHER, SOAK = "cold", "cached", "together", "soak"
MIB = 2**20
_TTFT = (Column("TTFT p50", "ttft_p50", ms), Column("p90", "ttft_p90", ms), Column("p99", "ttft_p99", ms))
_SERVER = Column("server", "server", lambda name: name.split()[0], names=True)
_COUNT = Column("n", lambda row: f"{row['n']} of {row['n'] + row['errors']}" if row["errors"] else row["n"])
_TPOT, _SERVED = Column("TPOT", "tpot_p50", ms), Column("answers/s", "throughput", fixed(2))


def tables(rows: Sequence[Row], facts: Row) -> list[TextTable]:
    """Four tables, of what there is; `facts` as in `comb_serving.bench.serve.ServeRun`."""
    found = [_aims(rows, facts), _loops(rows), _arrivals(rows, facts), _servers(facts)]
    return [table for table in found if table.rows]


def _aims(rows: Sequence[Row], facts: Row) -> TextTable:
    """Of what both servers have done."""
    by = {(row["server"], row["phase"]): row for row in rows}
    closed = {name: [row for row in rows if row["server"] == name and _is_cached(row) and row["n"]]
              for name in (PLAIN, COMB)}  # fmt: skip
    fewest = min((row["clients"] for row in closed[COMB]), default=1)
    lines: list[Row] = []
    for name, phase, least in (
        (f"cached TTFT, clients: {fewest}", f"{CACHED} {fewest}", 8),
        ("cold TTFT, clients: 1", COLD, 1),
        ("TTFT, all clients at once, same documents", TOGETHER, None),
    ):
        times = by.get((COMB, phase), {}).get("ratio")
        if times is not None:
            shown = [ms(by[server, phase]["ttft_p50"]) for server in (PLAIN, COMB)]
            lines.append(_aim(name, shown, spread(times), times.median, least))
    best = [max((row["throughput"] or 0.0 for row in closed[name]), default=0.0) for name in (PLAIN, COMB)]
    if all(best):
        lines.append(_times("answers/s, closed loop", *best))
    if facts.get("slo_s") is not None and any(row["rate"] for row in rows):
        plain, comb = (sustained(rows, name, facts["slo_s"]) for name in (PLAIN, COMB))
        name = "requests/s offered and kept in the SLO"
        if plain and comb:
            lines.append(_times(name, plain, comb))
        else:
            shown = ["none" if rate is None else f"{rate:.2f}" for rate in (plain, comb)]
            lines.append({**_aim(name, shown, None, 0, 3), "met": None})
    sizes = [facts.get("token_bytes", {}).get(name) for name in (PLAIN, COMB)]
    if all(sizes):
        shown = [f"{size:.0f}" for size in sizes]
        share = f"{100 * sizes[1] / sizes[0]:.1f}%"
        lines.append({**_aim("K/V bytes per document token", shown, share, 0, None), "aim": "25%"})
    slo = "not known" if facts.get("slo_s") is None else f"{1000 * facts['slo_s']:.0f} ms"
    remarks = (
        "ratio: how many times better comb is (95% bootstrap interval of the ratio of medians). TTFT in ms, median. "
        f"SLO: 90% of the first tokens within {slo} of arrival, and no failed request. Bytes: what the pool takes, "
        "partly filled blocks included.",
    )
    columns = [Column("", "name", names=True), *(Column(name, name) for name in (PLAIN, COMB, "ratio", "aim", "met"))]
    return TextTable("comb serve against plain vLLM", columns, lines, remarks)


def _is_cached(row: Row) -> bool:
    return str(row["phase"]).startswith(f"{CACHED} ")


def _aim(name: str, shown: Sequence[str], ratio: str | None, value: float, least: float | None) -> Row:
    aim = {"aim": "-" if least is None else f"at least {least}", "met": None if least is None else _yes(value >= least)}
    return {"name": name, PLAIN: shown[0], COMB: shown[1], "ratio": ratio, **aim}


def _times(name: str, plain: float, comb: float) -> Row:
    return _aim(name, [f"{plain:.2f}", f"{comb:.2f}"], f"{comb / plain:.1f}", comb / plain, 3)


def _loops(rows: Sequence[Row]) -> TextTable:
    columns = (
        Column("phase", lambda row: f"{row['phase'].split()[0]}, {row['clients']}", names=True), _SERVER, _COUNT,
        *_TTFT, Column("ratio", "ratio", spread), _TPOT, Column("whole", "total_p50", ms), _SERVED,
        Column("hits", _of_comb("hits")), Column("new", _of_comb("encoded")),
    )  # fmt: skip
    remarks = [
        "Times in ms: TTFT from sending to the first token, TPOT per further token, whole to the last one, medians. "
        "ratio: plain vLLM's median TTFT over comb's (95% bootstrap interval). Behind the phase how many clients. "
        "cold: documents never seen before; cached: from the pool of documents, in any order; together: all at once "
        "about the same documents. hits, new: documents found and encoded. With few requests p99 is the slowest."
    ]
    again = sum(
        row["encoded"] for row in rows if row["server"] == COMB and row["n"] and row["phase"] not in (COLD, SOAK)
    )
    if again:
        remarks.append(f"{again} documents had left the pool and were encoded again: --pool-bytes is too small.")
    phases = list(dict.fromkeys(row["phase"] for row in rows))
    lines = sorted((row for row in rows if not row["rate"]), key=lambda row: phases.index(row["phase"]))
    return TextTable("Time to first token, closed loops", columns, lines, remarks)


def _of_comb(name: str) -> Any:
    return lambda row: row[name] if row["server"] == COMB else None


def _arrivals(rows: Sequence[Row], facts: Row) -> TextTable:
    columns = (
        Column("offered/s", "rate", "{:g}".format, names=True), _SERVER, _COUNT, *_TTFT, _TPOT,
        Column("late", "late_p99", ms), _SERVED,
        Column("in SLO", lambda row: keeps_slo(row, facts.get("slo_s")), _yes),
    )  # fmt: skip
    remarks = [
        "TTFT in ms from arrival, whether or not earlier requests are answered. late: 99% of requests were sent within "
        "so many ms of their arrival. answers/s: until the end of arrivals, or the last answer if that is later.",
    ]
    lines = sorted((row for row in rows if row["rate"]), key=lambda row: (row["rate"], row["server"] == COMB))
    return TextTable("Poisson arrivals", columns, lines, remarks)


def _servers(facts: Row) -> TextTable:
    lines = []
    for name in (PLAIN, COMB):
        samples = [sample for sample in facts.get("memory", ()) if sample["server"] == name]
        if samples:
            sizes = [sum(sample["parts"].values()) / MIB for sample in samples]
            soak = [sample for sample in samples if sample["phase"] == SOAK]
            grown = growth(soak)
            lines.append({
                "name": name, "ready": facts["ready_s"].get(name), "answer": facts["first_answer_s"].get(name),
                "first": sizes[0], "last": sizes[-1], "most": max(sizes),
                "grown": None if grown is None else f"{1000 * grown / MIB:+.1f} ({soak[-1]['requests']})",
            })  # fmt: skip
    columns = (
        Column("server", "name", names=True), Column("ready s", "ready", fixed(1)),
        Column("first answer s", "answer", fixed(1)), Column("MiB first", "first", fixed(0)),
        Column("MiB last", "last", fixed(0)), Column("MiB most", "most", fixed(0)),
        Column("MiB/1000 requests", "grown"),
    )  # fmt: skip
    remarks = [
        "Memory: proportional set size of all processes of a server, caches and pool included, after the first phase, "
        "after the last, and the most. MiB/1000 requests: its growth over the later half of the soak (its length).",
        *_growing([sample for sample in facts.get("memory", ()) if sample["phase"] == SOAK]),
    ]
    return TextTable("Start and memory", columns, lines, remarks)


def _growing(soak: Sequence[Row]) -> list[str]:
    """Which processes grew in the soak."""
    grown = {part: growth(soak, part) for part in (soak[-1]["parts"] if soak else ())}
    shown = [f"{part} {1000 * value / MIB:+.1f}" for part, value in grown.items() if value is not None]
    return [f"Of that: {', '.join(shown)}."] if shown else []


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def panels(rows: Sequence[Row], facts: Row) -> list[Panel]:
    """TTFT cold and cached (COMB Fig. 5a and 8), TTFT and throughput over the rate (Fig. 10), memory over a soak."""
    measured = [row for row in rows if row["n"]]
    loops = [row for row in measured if not row["rate"] and row["phase"] != SOAK]
    offered = [row for row in measured if row["rate"]]
    slo = facts.get("slo_s")
    times = [{"line": f"{row['server']}, {name}", "rate": row["rate"], "ttft": row[key]}
             for row in offered for name, key in (("median", "ttft_p50"), ("p90", "ttft_p90"))]  # fmt: skip
    soak = [{**sample, "mib": sum(sample["parts"].values()) / MIB} for sample in facts.get("memory", ())
            if sample["phase"] == SOAK]  # fmt: skip
    found: list[Panel] = [
        Bars(
            loops, lambda row: f"{row['server']}, {row['phase'].split()[0]}, {row['clients']} at once",
            lambda row: {"median": row["ttft_p50"], "to p90": row["ttft_p90"] - row["ttft_p50"]},
            "time to first token, ms",
        ),
        Lines(times, "rate", "ttft", "requests offered per second", "time to first token, ms, waiting included",
              by="line", scale=1000, log="xy", level=None if slo is None else 1000 * slo),
        Lines(offered, "rate", "throughput", "requests offered per second", "answers per second", by="server",
              log="xy", diagonal="all that is offered"),
    ]  # fmt: skip
    if soak:
        found.append(
            Lines(soak, "requests", "mib", "requests of the soak", "memory of all processes, MiB", by="server")
        )
    return found
