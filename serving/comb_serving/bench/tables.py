"""Tables and plots of `comb bench serve`: what was aimed at, closed loops, Poisson arrivals, start and memory."""

from __future__ import annotations

from collections.abc import Sequence

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
    closed = [row for row in rows if row["phase"].startswith(f"{CACHED} ") and row["n"]]
    fewest = min((row["clients"] for row in closed if row["server"] == COMB), default=1)
    lines: list[Row] = []
    for name, phase, aim in (
        (f"cached TTFT, clients: {fewest}", f"{CACHED} {fewest}", 8),
        ("cold TTFT, clients: 1", COLD, 1),
        ("TTFT, all clients at once, same documents", TOGETHER, None),
    ):
        times = by.get((COMB, phase), {}).get("ratio")
        if times is not None:
            shown = {server: ms(by[server, phase]["ttft_p50"]) for server in (PLAIN, COMB)}
            met = times.median >= aim if aim else None
            lines.append({"name": name, **shown, "ratio": spread(times), "aim": aim, "met": met})
    plain, comb = (max((row["throughput"] or 0.0 for row in closed if row["server"] == server), default=0.0)
                   for server in (PLAIN, COMB))  # fmt: skip
    if plain and comb:
        lines.append(_rates("answers/s, closed loop", plain, comb))
    if facts.get("slo_s") is not None and any(row["rate"] for row in rows):
        kept = (sustained(rows, server, facts["slo_s"]) for server in (PLAIN, COMB))
        lines.append(_rates("requests/s offered and kept in the SLO", *kept))
    plain, comb = (facts.get("token_bytes", {}).get(server) for server in (PLAIN, COMB))
    if plain and comb:
        share = f"{100 * comb / plain:.1f}%"
        lines.append({"name": "K/V bytes per document token", PLAIN: f"{plain:.0f}", COMB: f"{comb:.0f}",
                      "ratio": share, "aim": "25%"})  # fmt: skip
    slo = "not known" if facts.get("slo_s") is None else f"{1000 * facts['slo_s']:.0f} ms"
    remarks = (
        "ratio: how many times better comb is (95% bootstrap interval of the ratio of medians). TTFT in ms, median. "
        f"SLO: 90% of the first tokens within {slo} of arrival, and no failed request. Bytes: what the pool takes, "
        "partly filled blocks included.",
    )
    aimed = Column("aim", "aim", lambda aim: aim if isinstance(aim, str) else f"at least {aim}")
    columns = [Column("", "name", names=True), *(Column(name, name) for name in (PLAIN, COMB, "ratio")), aimed,
               Column("met", "met", _yes)]  # fmt: skip
    return TextTable("comb serve against plain vLLM", columns, lines, remarks)


def _rates(name: str, plain: float | None, comb: float | None) -> Row:
    shown = {server: "none" if rate is None else f"{rate:.2f}" for server, rate in ((PLAIN, plain), (COMB, comb))}
    times = comb / plain if plain and comb else None
    return {"name": name, **shown, "ratio": times and f"{times:.1f}", "aim": 3, "met": times and times >= 3}


def _loops(rows: Sequence[Row]) -> TextTable:
    columns = (
        Column("phase", lambda row: f"{row['phase'].split()[0]}, {row['clients']}", names=True), _SERVER, _COUNT,
        *_TTFT, Column("ratio", "ratio", spread), _TPOT, Column("whole", "total_p50", ms), _SERVED,
        *(Column(name, lambda row, key=key: row[key] if row["server"] == COMB else None)  # type: ignore[misc]
          for name, key in (("hits", "hits"), ("new", "encoded"))),
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
    memory = [{**each, "mib": sum(each["parts"].values()) / MIB} for each in facts.get("memory", ())]
    lines = []
    for name in (PLAIN, COMB):
        sizes = [each["mib"] for each in memory if each["server"] == name]
        soak = [each for each in memory if (each["server"], each["phase"]) == (name, SOAK)]
        grown = growth(soak)
        if sizes:
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
        "after the last, and the most. MiB/1000 requests: its growth over the later half of the soak (its length)."
    ]
    soak = [each for each in memory if each["phase"] == SOAK]
    grown_parts = {part: growth(soak, part) for part in (soak[-1]["parts"] if soak else ())}
    if shown := [f"{part} {1000 * by / MIB:+.1f}" for part, by in grown_parts.items() if by is not None]:
        remarks.append(f"Of that: {', '.join(shown)}.")
    return TextTable("Start and memory", columns, lines, remarks)


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
