"""Results of `comb bench` as tables for people and as files: JSON, Markdown and a plot."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.text import Text

from comb.bench.harness import check_out
from comb.evaluation.record import environment, write_json
from comb.evaluation.run import Timing
from comb.evaluation.table import text_table

__all__ = ["TextTable", "check_out", "write_report"]


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
