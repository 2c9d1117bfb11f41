"""Results of `comb bench` as tables for people and as files: JSON, Markdown and a plot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from comb.bench.asynchronous import AsyncResult
from comb.bench.context_length import LengthResult, growth_exponent
from comb.bench.needle import NeedleCell
from comb.evaluation.record import environment, write_json
from comb.evaluation.run import Timing
from comb.evaluation.table import text_table


@dataclass(frozen=True)
class TextTable:
    """A table before it is rendered: for the terminal or as Markdown."""

    title: str
    columns: tuple[str, ...]
    lines: tuple[tuple[str, ...], ...]
    remarks: tuple[str, ...] = ()

    def rich(self) -> Group:
        """For the terminal; remarks are as wide as it is, not as the table."""
        table = text_table(self.columns, self.lines, self.title)
        return Group(table, *(Text(remark, style="dim") for remark in self.remarks))

    def markdown(self) -> str:
        """For a file."""
        return f"### {self.title}\n\n{markdown(self.columns, self.lines, self.remarks)}"


def length_tables(results: Sequence[LengthResult]) -> list[TextTable]:
    """TTFT per length and method, and below it where it goes at the longest length."""
    lines = []
    tokens = None
    for result in results:
        shown = str(result.tokens) if result.tokens != tokens else ""
        tokens = result.tokens
        if result.refused:
            lines.append((shown, result.method, "refused", "-", "-", "-", "-", "-"))
            continue
        lines.append(
            (
                shown,
                result.method,
                short_milliseconds(result.ttft_cached_s),
                short_milliseconds(result.ttft_cold_s),
                ratio(result.speedup),
                str(result.recomputed_tokens),
                mebibytes(result.cache_bytes),
                mebibytes(result.peak_memory_bytes),
            )
        )
    columns = ("context", "method", "cached ms", "cold ms", "full/method", "redone", "cache MiB", "peak MiB")
    methods = list(dict.fromkeys(result.method for result in results))
    exponents = {method: growth_exponent(results, method) for method in methods}
    grown = [f"{method} {value:.2f}" for method, value in exponents.items() if value is not None]
    remarks = [
        "cached: link and first token; cold: with compiling; median ±half the distance of the quartiles. full/method: "
        "cached time of full over the method's in the same repeat, median (quartiles). redone: document tokens "
        "prefilled. peak: what linking and the first token add.",
        *([f"Growth of cached TTFT, as a power of the context: {', '.join(grown)}."] if grown else []),
        *refusals((f"{result.method} at {result.tokens}", result.refused) for result in results),
    ]
    tables = [TextTable("Time to first token against context length", columns, tuple(lines), tuple(remarks))]
    return tables + _stage_table(results)


def _stage_table(results: Sequence[LengthResult]) -> list[TextTable]:
    measured = [result for result in results if result.stages_s]
    if not measured:
        return []
    longest = max(result.tokens for result in measured)
    last = [result for result in measured if result.tokens == longest]
    known = ("assemble", "select", "recompute", "other linking", "first token")
    names = [name for name in known if any(name in result.stages_s for result in last)]
    names += [name for name in dict.fromkeys(s for result in last for s in result.stages_s) if name not in known]
    lines = tuple(
        (result.method, *(f"{1000 * result.stages_s[n]:.1f}" if n in result.stages_s else "-" for n in names))
        for result in last
    )
    return [TextTable(f"Where the cached TTFT goes at {longest} tokens, ms", ("method", *names), lines)]


def async_tables(results: Sequence[AsyncResult]) -> list[TextTable]:
    """One line per method, ratio and rate."""
    lines: list[tuple[str, ...]] = []
    for result in results:
        ccr = "-" if result.ccr is None else f"{result.ccr:g}"
        head = (result.method, ccr, "-" if result.refused else f"{result.rate:g}")
        if result.refused:
            line = (*head, "refused", *("-",) * 6)
            lines += [line] if line not in lines else []
            continue
        times = (result.ttft_median_s, result.ttft_p90_s, result.ttft_mean_s)
        lines.append(
            (
                *head,
                str(result.n),
                *("-" if value is None else f"{1000 * value:.0f}" for value in times),
                "-" if result.throughput is None else f"{result.throughput:.2f}",
                "-" if result.busy is None else f"{100 * result.busy:.0f}",
                "-" if result.hit_share is None else f"{100 * result.hit_share:.0f}",
            )
        )
    columns = ("method", "ccr", "offered/s", "n", "TTFT median", "p90", "mean", "served/s", "busy %", "hits %")
    remarks = (
        "TTFT in ms from arrival to first token, waiting included. ccr: the store's budget over what all users' "
        "PICaches need. busy: near 100 the queue only grows, and TTFT depends on how long the run is.",
        *refusals(
            (result.method if result.ccr is None else f"{result.method} at ccr {result.ccr:g}", result.refused)
            for result in results
        ),
    )
    return [TextTable("Poisson arrivals, one worker, first come first served", columns, tuple(lines), remarks)]


def needle_tables(cells: Sequence[NeedleCell]) -> list[TextTable]:
    """Depth over context length, per method: share of answers that hold the needle, and F1 behind it."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = sorted({cell.tokens for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    found = {(cell.method, cell.tokens, cell.depth): cell for cell in cells}
    lines = [
        (
            method if tokens == lengths[0] else "",
            str(tokens),
            *(_needle(found.get((method, tokens, depth))) for depth in depths),
        )
        for method in methods
        for tokens in lengths
    ]
    remarks = (
        "Percent of answers that hold the needle, and mean F1 in percent, by depth of the needle. "
        f"{max((cell.n for cell in cells), default=0)} haystacks per cell.",
        *refusals((f"{cell.method} at {cell.tokens}", cell.refused) for cell in cells),
    )
    columns = ("method", "tokens", *(f"{depth:g}%" for depth in depths))
    return [TextTable("Needle in a haystack", columns, tuple(lines), remarks)]


def _needle(cell: NeedleCell | None) -> str:
    if cell is None or cell.found is None or cell.f1 is None:
        return "refused" if cell is not None else "-"
    return f"{100 * cell.found:.0f} ({100 * cell.f1:.0f})"


def ratio(timing: Timing | None) -> str:
    """``3.12 (2.90-3.40)``, from ten on with one decimal."""
    if timing is None:
        return "-"
    median, low, high = (f"{v:.2f}" if v < 10 else f"{v:.1f}" for v in (timing.median, timing.low, timing.high))
    return f"{median} ({low}-{high})"


def spread(timing: Timing, form: str, scale: float = 1) -> str:
    """``8.9 (8.1-9.6)``: median and quartiles times `scale`, each written like `form`."""
    median, low, high = (form.format(scale * value) for value in (timing.median, timing.low, timing.high))
    return f"{median} ({low}-{high})"


def mebibytes(count: int | None) -> str:
    """``1536`` KiB -> ``1.5``."""
    return "-" if count is None else f"{count / 2**20:.1f}"


def refusals(items: Iterable[tuple[str, str]]) -> list[str]:
    """``a, b refused: reason``, one line per reason."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in items:
        if reason and name not in by_reason.setdefault(reason, []):
            by_reason[reason].append(name)
    return [f"{', '.join(names)} refused: {reason}" for reason, names in by_reason.items()]


def check_out(out: Path | None) -> None:
    """Raises ValueError unless `out` can take JSON, with a plot and a table beside it."""
    if out is not None and out.suffix != ".json":
        raise ValueError(f"--out is the JSON file, with .png and .md beside it: expected a name in .json, got {out}")
    if out is not None and out.name == "results.json" and (out.parent / "config.json").exists():
        raise ValueError(
            f"{out} is where `comb eval` leaves what the adapter's card shows: choose another name for --out"
        )


def write_report(
    out: Path, results: Sequence[Any], text: str, draw: Callable[[Path], Path] | None, settings: Mapping[str, Any]
) -> tuple[list[str], str]:
    """Writes JSON, Markdown and, if anything is to be drawn, a plot beside each other.

    Returns:
        The files, and why there is no plot ("" where there is one).
    """
    write_json(out, {**environment(**settings), "results": [result.to_dict() for result in results]})
    table = out.with_suffix(".md")
    table.write_text(text, encoding="utf-8")
    written = [str(out), str(table)]
    if draw is None:
        return written, "nothing was measured"
    try:
        written.append(str(draw(out.with_suffix(".png"))))
    except ImportError:
        return written, "matplotlib is not installed (pip install 'comb-pic[demo]')"
    return written, ""


def markdown(names: Sequence[str], lines: Sequence[Sequence[str]], remarks: Sequence[str] = ()) -> str:
    """A Markdown table, and a list of remarks below it."""
    rules = ("---",) + ("---:",) * (len(names) - 1)
    table = ["| " + " | ".join(line) + " |" for line in (names, rules, *lines)]
    below = ["", *(f"- {remark}" for remark in remarks)] if remarks else []
    return "\n".join([*table, *below]) + "\n"


def short_milliseconds(timing: Timing | None) -> str:
    """``12 ±5.5``: the median, and half the distance of the quartiles."""
    if timing is None:
        return "-"
    return f"{_short(1000 * timing.median)} ±{_short(500 * (timing.high - timing.low))}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"
