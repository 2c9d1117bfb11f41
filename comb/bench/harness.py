"""One frame for every benchmark: options to a command, rows to a table, JSON, Markdown and a plot, once.

A benchmark is a function of its options and of a `BenchmarkReport`, in a file of its own in this folder (or in a folder
that an extension names with ``benchmarks.look_in``); `comb bench` walks the folders. Its options are a dataclass: each
field is an option of the command; bases for models, questions and random models are in `comb.bench.options`.

    @dataclass(frozen=True)
    class SpeedOptions(OutOptions):
        repeats: Annotated[int, typer.Option(min=1, help="measurements")] = 5

    def tables(rows):
        columns = [Column("method", "method", names=True), Column("ms", "seconds", ms, "median ±half the quartiles")]
        return [TextTable("Speed", columns, rows)]

    def panels(rows):
        return [Lines(rows, "tokens", "seconds", "tokens", "seconds")]

    @benchmark("speed", tables, panels)
    def speed(options: SpeedOptions, report: BenchmarkReport) -> None:
        '''The help text of `comb bench speed`.'''
        report.heading = "what was measured, on what"
        for ...:
            report.add({"method": ..., "tokens": ..., "seconds": Timing.of(...)})   # or {"refused": why not}
        report.facts["load"] = ...          # what else the JSON shall say, beside options and environment

With ``--out`` the JSON is written after every row; tables and plot come at the end, also of a run that was broken off.
Options, tables and panels stand in files that import no torch, as `comb bench --help` doesn't: what measures imports it
where it is used.
"""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_type_hints

import typer
from rich.console import Console
from tqdm import tqdm

from comb.backbones.unpublished import public
from comb.bench import benchmarks
from comb.evaluation.plot import Panel, draw
from comb.evaluation.record import check_writable, environment, write_json
from comb.evaluation.table import Row, TextTable, Timing

K = TypeVar("K")
T = TypeVar("T")
Tables = Callable[[list[Row]], Sequence[TextTable]]
Panels = Callable[[list[Row]], Sequence[Panel]]
_WIDTH = 110


@dataclass(frozen=True)
class OutOptions:
    """What every benchmark takes."""

    out: Annotated[Path | None, typer.Option(help="JSON for the results; a .md table and a .png plot go beside it")] = (
        None
    )


@dataclass
class BenchmarkReport:
    """What a run has found so far."""

    name: str
    options: OutOptions
    tables: Tables  # of the rows; the benchmark may replace it
    panels: Panels
    heading: str = ""  # over the tables
    rows: list[Row] = field(default_factory=list)
    facts: Row = field(default_factory=dict)  # what else the JSON says
    begun: float = field(default_factory=time.perf_counter)

    def __post_init__(self) -> None:
        asked = {each.name: getattr(self.options, each.name) for each in fields(self.options) if each.name != "out"}
        self._made_with = environment(benchmark=self.name, **asked)
        # a file has no width: there tables are whole
        narrow = Console().is_terminal or "COLUMNS" in os.environ
        self.console = Console() if narrow else Console(width=_WIDTH)

    def add(self, row: Row) -> None:
        """One more result, which is in the file at once."""
        self.rows.append(row)
        self.write()

    def write(self) -> None:
        """Writes the JSON as it is now, if it is asked for."""
        if self.options.out is not None:
            write_json(self.options.out, {**self._made_with, **self.facts, "results": self.rows})

    def say(self, text: str) -> None:
        """A line on the terminal, with the seconds since the start in front."""
        seconds = time.perf_counter() - self.begun
        self.console.print(f"{seconds:6.1f} s  {text}", markup=False, soft_wrap=True)

    def finish(self) -> None:
        """Prints the tables, and writes JSON, Markdown and the plot."""
        tables, out = self.tables(self.rows) if self.rows else [], self.options.out
        self.console.print(self.heading, markup=False)
        self.console.print(*tables, sep="\n")
        if out is None:
            return
        self.write()
        written = [out, out.with_suffix(".md")]
        heading = public(self.heading, here=True)
        written[1].write_text("\n".join([f"## {heading}\n", *(t.markdown() for t in tables)]), encoding="utf-8")
        if any(not row.get("refused") for row in self.rows) and (panels := self.panels(self.rows)):
            try:
                written.append(draw(panels, out.with_suffix(".png"), title=heading))
            except ImportError:
                self.console.print("no plot: matplotlib is not installed (pip install 'comb-pic[demo]')", markup=False)
        self.console.print(f"written: {', '.join(map(str, written))}", markup=False, soft_wrap=True)


Benchmark = Callable[[Any, BenchmarkReport], None]


def benchmark(name: str, tables: Tables, panels: Panels = lambda rows: ()) -> Callable[[Benchmark], Benchmark]:
    """Makes a function of its options and a `BenchmarkReport` the command ``comb bench NAME``."""

    def add(run: Benchmark) -> Benchmark:
        kind = get_type_hints(run)["options"]
        hints = get_type_hints(kind, include_extras=True)

        def command(**given: Any) -> None:
            options = kind(**given)
            check_out(options.out)
            report = BenchmarkReport(name, options, tables, panels)
            try:
                run(options, report)
            except BaseException:
                if report.rows:
                    report.say("broken off; what was measured until then:")
                    report.finish()
                raise
            report.finish()

        command.__doc__ = run.__doc__
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # how typer learns of the options
            [
                inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=each.default,
                                  annotation=hints[each.name])
                for each in fields(kind)
            ]
        )  # fmt: skip
        benchmarks.register(name)(command)
        return run

    return add


def check_out(out: Path | None) -> None:
    """Raises ValueError unless `out` can take JSON, with a plot and a table beside it."""
    if out is not None:
        check_writable(out.parent, out.name)
    if out is not None and out.suffix != ".json":
        raise ValueError(f"--out is the JSON file, with .png and .md beside it: expected a name in .json, got {out}")
    if out is not None and out.name == "results.json" and (out.parent / "config.json").exists():
        raise ValueError(
            f"{out} is where `comb eval` leaves what the adapter's card shows: choose another name for --out"
        )


def in_turns(calls: Mapping[K, Callable[[], T]], repeats: int) -> dict[K, list[T]]:
    """What each call returns in each repeat. All take their turn in a repeat: a slow moment meets them all."""
    found: dict[K, list[T]] = {name: [] for name in calls}
    for _ in tqdm(range(repeats), "repeats", leave=False):
        for name, call in calls.items():
            found[name].append(call())
    return found


def ratios(over: Sequence[float], under: Sequence[float]) -> Timing | None:
    """Ratios within a repeat, with their quartiles; None where there is nothing to compare with."""
    return Timing.of([one / other for one, other in zip(over, under, strict=False)]) if over else None
