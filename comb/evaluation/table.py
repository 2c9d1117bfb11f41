"""Tables for people: rows and a declaration of their columns in; the terminal's table and Markdown out."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Row = dict[str, Any]
"""What was measured once, by name. Where nothing could be, ``row["refused"]`` says why."""


@dataclass(frozen=True)
class Timing:
    """Seconds: the median of `n` measurements with the quartiles around it."""

    median: float
    low: float
    high: float
    n: int

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Timing:
        """Of at least one measurement."""
        if len(seconds) == 1:
            return cls(seconds[0], seconds[0], seconds[0], 1)
        low, median, high = statistics.quantiles(seconds, n=4, method="inclusive")
        return cls(median, low, high, len(seconds))


@dataclass(frozen=True)
class Column:
    """One column."""

    name: str
    value: str | Callable[[Row], Any]  # its key in a row, or a function of the row
    form: Callable[[Any], str] = str  # writes a value that isn't None, which is ``-``
    note: str = ""  # what it means, for the remarks
    names: bool = False  # it says which row this is, and so stays when nothing was measured

    def cell(self, row: Row) -> str:
        if row.get("refused") and not self.names:
            return "-"
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return "-" if value is None else self.form(value)


@dataclass(frozen=True)
class TextTable:
    """A table before it is drawn: `rich` prints it as it is, `markdown` is for a file."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Row]
    remarks: Sequence[str] = ()

    def lines(self) -> list[tuple[str, ...]]:
        """The cells as text; a row that was refused says so in its first column that isn't a name."""
        first = next((column for column in self.columns if not column.names), None)
        return [
            tuple("refused" if row.get("refused") and column is first else column.cell(row) for column in self.columns)
            for row in self.rows
        ]

    def notes(self) -> list[str]:
        """What columns mean, the remarks, and why rows were refused."""
        meanings = [f"{column.name}: {column.note}." for column in self.columns if column.note]
        refused: dict[str, dict[str, None]] = {}  # names by reason: one line for each
        for row in self.rows:
            if row.get("refused"):
                refused.setdefault(row["refused"], {})[self._name(row)] = None
        reasons = (f"{', '.join(names)} refused: {reason}" for reason, names in refused.items())
        return [*([" ".join(meanings)] if meanings else []), *self.remarks, *reasons]

    def _name(self, row: Row) -> str:
        """``naive at offered/s 2``."""
        (_, first), *further = [(column.name, column.cell(row)) for column in self.columns if column.names]
        return " at ".join(filter(None, [first, ", ".join(f"{name} {cell}" for name, cell in further if cell != "-")]))

    def __rich__(self) -> Group:
        """For the terminal; notes are as wide as it is, not as the table."""
        heads = [column.name for column in self.columns]
        table = FittedTable(heads, self.lines(), self.title, left=[c.name for c in self.columns if c.names])
        return Group(table, *(Text(note, style="dim") for note in self.notes()))

    def markdown(self) -> str:
        """For a file."""
        heads = tuple(column.name for column in self.columns)
        rules = tuple("---" if column.names else "---:" for column in self.columns)
        lines = ["| " + " | ".join(line) + " |" for line in (heads, rules, *self.lines())]
        return "\n".join([f"### {self.title}", "", *lines, "", *(f"- {note}" for note in self.notes())]) + "\n"


@dataclass(frozen=True)
class FittedTable:
    """A table for the terminal: columns that have no room beside the others stand below them, and no word is lost."""

    names: Sequence[str]
    lines: Sequence[Sequence[str]]
    title: str | None = None
    caption: str | None = None
    left: Sequence[str] = ("method",)  # names of columns that begin at the left; the others are numbers

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Table]:
        """One or more tables, each beginning with the columns that say which row this is."""
        leading = max(
            1, next((place for place, name in enumerate(self.names) if name not in self.left), len(self.names))
        )
        said, rest, title = [*range(leading)], [*range(leading, len(self.names))], self.title
        while True:
            room = (n for n in range(len(rest), 1, -1) if self._width([*said, *rest[:n]]) <= options.max_width)
            count = next(room, 1)
            shown, rest = [*said, *rest[:count]], rest[count:]
            caption = escape(self.caption) if self.caption and not rest else None
            table = Table(
                title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD,
                pad_edge=False, collapse_padding=True,
            )  # fmt: skip
            fits = self._width(shown) <= options.max_width
            for name in (self.names[place] for place in shown):
                justify: Literal["left", "right"] = "left" if name in self.left else "right"
                table.add_column(name, justify=justify, overflow="fold", no_wrap=fits)
            for line in self.lines:
                table.add_row(*(line[place] for place in shown))
            yield table
            if not rest:
                return
            title = None

    def _width(self, places: Sequence[int]) -> int:
        """In columns of the terminal, of a table of these columns; two are between two of them, and one at each end."""
        cells = ((self.names[place], *(line[place] for line in self.lines)) for place in places)
        return sum(max(map(cell_len, column)) for column in cells) + 2 * len(places)


@contextmanager
def or_refused(row: dict[str, Any], name: str = "refused") -> Iterator[None]:
    """Puts what stopped the block into ``row[name]``, on one line: a model that doesn't fit, or no memory."""
    import torch

    from comb.cache.store import StoreFullError

    refusals = (ValueError, MemoryError, NotImplementedError, StoreFullError, torch.OutOfMemoryError)
    try:
        yield
    except (ValueError, MemoryError, RuntimeError) as error:
        # "allocate memory" is how torch's CPU allocator says that memory runs out
        if not isinstance(error, refusals) and "allocate memory" not in str(error):
            raise
        row[name] = " ".join(str(error).split()) or type(error).__name__


def us(timing: Timing) -> str:
    """The median in microseconds."""
    return f"{1e6 * timing.median:.0f}"


def ms(seconds: Timing | float) -> str:
    """``12`` or ``1.2``; of a timing ``12 ±5.5``: the median, and half the distance of the quartiles."""
    if isinstance(seconds, Timing):
        return f"{ms(seconds.median)} ±{ms((seconds.high - seconds.low) / 2)}"
    return f"{1000 * seconds:.1f}" if 1000 * seconds < 10 else f"{1000 * seconds:.0f}"


def spread(timing: Timing, form: Callable[[float], str] = lambda v: f"{v:.2f}" if v < 10 else f"{v:.1f}") -> str:
    """``3.12 (2.90-3.40)``: median and quartiles, each written by `form`."""
    return f"{form(timing.median)} ({form(timing.low)}-{form(timing.high)})"


def percent(share: float) -> str:
    """``0.123`` -> ``12.3``."""
    return f"{100 * share:.1f}"


def fixed(digits: int) -> Callable[[float], str]:
    """A form with so many digits behind the point."""
    return lambda value: f"{value:.{digits}f}"


def divergence(kl: float) -> str:
    """A KL in nats: ``0`` only if it is exactly that; rounding may leave a tiny negative number."""
    if kl == 0 or abs(kl) < 1e-6:
        return "0" if kl == 0 else "<1e-6"
    return f"{kl:.3f}" if abs(kl) >= 0.001 else f"{kl:.0e}"
