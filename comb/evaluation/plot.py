"""Plots as PNG beside the tables: panels that are declared like a table's columns, and the two plots of training."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comb.evaluation.setting import NO_DOCUMENTS
from comb.evaluation.table import Row, Timing

METRICS = {"em": "exact match, %", "f1": "F1, %", "contains": "gold answer contained, %", "rouge_l": "ROUGE-L, %"}
_MARKERS = "osD^vXP*"
_EXACT = 1e-3  # nats: what is below is full recompute, to rounding


@dataclass(frozen=True)
class Lines:
    """`y` over `x`: one line per name, its quartiles shaded where values are timings. Refused rows are left out."""

    rows: Sequence[Row]
    x: str
    y: str  # key of the values
    xlabel: str
    ylabel: str
    by: str = "method"  # key of the name of a row's line
    scale: float = 1.0
    log: str = ""  # axes with a logarithmic scale: "x", "y" or "xy"
    level: float | None = None  # a dashed horizontal line

    def draw(self, axes: Any) -> None:
        curves: dict[str, list[tuple[float, Any]]] = {}
        for row in self.rows:
            if not row.get("refused") and row.get(self.y) is not None:
                curves.setdefault(row[self.by], []).append((row[self.x], row[self.y]))
        for number, (name, points) in enumerate(curves.items()):
            x, values = zip(*sorted(points, key=lambda point: point[0]), strict=True)
            times = [v if isinstance(v, Timing) else Timing(v, v, v, 1) for v in values]
            low, middle, high = ([self.scale * getattr(t, end) for t in times] for end in ("low", "median", "high"))
            axes.plot(x, middle, **_look(number), markersize=4, label=name)
            axes.fill_between(x, low, high, color=_look(number)["color"], alpha=0.15, linewidth=0)
        if self.level is not None:
            axes.axhline(self.level, color="black", linewidth=0.8, linestyle="--")
        # a linear axis holds zero, so that lengths on it can be compared, and ends behind the last point, which
        # matplotlib's own margin, a share of the points' spread, doesn't see to where they are all far from zero
        found = axes.dataLim
        for axis, start, end in (("x", found.x0, found.x1), ("y", found.y0, found.y1)):
            bottom = 1.05 * start if curves and start < 0 else 0
            top = 1.05 * end if curves and end > 0 else 0 if bottom else None
            axes.set(**{f"{axis}scale": "log"} if axis in self.log else {f"{axis}lim": (bottom, top)})
        axes.set(xlabel=self.xlabel, ylabel=self.ylabel)
        if len(curves) > 1:
            axes.legend(frameon=False, fontsize="x-small")


@dataclass(frozen=True)
class Bars:
    """A horizontal bar per row, made of `parts`: seconds by name, drawn in ms."""

    rows: Sequence[Row]
    label: Callable[[Row], str]
    parts: Callable[[Row], dict[str, float]]
    xlabel: str

    def draw(self, axes: Any) -> None:
        found = [self.parts(row) for row in self.rows]
        starts = [0.0] * len(found)
        for name in in_order(found):
            widths = [1000 * parts.get(name, 0.0) for parts in found]
            axes.barh(range(len(found)), widths, left=starts, label=name, height=0.7)
            starts = [start + width for start, width in zip(starts, widths, strict=True)]
        axes.set_yticks(range(len(found)), [self.label(row) for row in self.rows])
        axes.invert_yaxis()
        axes.set_xlabel(self.xlabel)
        if found:
            _legend_beside(axes)


@dataclass(frozen=True)
class Quality:
    """Quality against time to first token: hollow cold, filled cached (EPIC Fig. 6), a dotted line without times."""

    rows: Sequence[Row]  # of `summarize`; refused methods are left out
    metric: str = "em"
    name: str = ""  # of the questions

    def draw(self, axes: Any) -> None:
        for number, row in enumerate(row for row in self.rows if not row.get("refused")):
            name, height, look = row["method"], 100 * row[self.metric], _look(number)
            if row["ttft_cold_s"] is None or name == NO_DOCUMENTS:
                axes.axhline(height, color=look["color"], linestyle=":", label=f"{name} ({height:.0f}%)")
                continue
            times = [1000 * row[key].median for key in ("ttft_cold_s", "ttft_cached_s")]
            axes.plot(times, [height, height], **look, label=name)
            axes.plot(times[:1], [height], **look, markerfacecolor="white")
        axes.margins(y=0.12)
        axes.set_xlim(left=0)
        xlabel = "time to first token, ms (hollow: cold, filled: cached)"
        axes.set(xlabel=xlabel, ylabel=METRICS[self.metric], title=self.name)
        _legend_beside(axes)


@dataclass(frozen=True)
class Frontier:
    """What a method leaves of full recompute over what it costs: its KL with the 95% interval, on a log axis."""

    rows: Sequence[Row]  # of `summarize`; those that are refused, have no KL or no documents are left out
    cost: str  # key of what it costs; where that is None there is no point
    xlabel: str
    name: str = ""

    def draw(self, axes: Any) -> None:
        from matplotlib.ticker import LogLocator, NullLocator

        # numbered as in `Quality`, whose legend stands for both
        asked = enumerate(row for row in self.rows if not row.get("refused"))
        shown = ((number, row) for number, row in asked if row.get("kl") and row["method"] != NO_DOCUMENTS)
        points = [(number, row, row[self.cost]) for number, row in shown if row[self.cost] is not None]
        most = max((cost for *_, cost in points), default=1.0)
        for place, (number, row, cost) in enumerate(sorted(points, key=lambda point: -point[1]["kl"])):
            low, high = row["intervals"]["kl"]
            low, kl, high = (max(_EXACT, value) for value in (low, row["kl"], high))
            reach = [[kl - low], [high - kl]]
            axes.errorbar(cost, kl, yerr=reach, **_look(number), markersize=5, elinewidth=0.8, capsize=2)
            # by turns to either side, where there is room, so that names of near points don't cover each other
            left = place % 2 == 1 and cost > 0.4 * most
            axes.annotate(
                row["method"], (cost, kl), xytext=(-6, 3) if left else (6, 3), textcoords="offset points",
                fontsize="x-small", ha="right" if left else "left",
            )  # fmt: skip
        axes.set(yscale="log", xlim=(0, 1.35 * most))
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_major_formatter("{x:g}")
        axes.set(xlabel=self.xlabel, ylabel="KL to full recompute, nats/token", title=self.name)


Panel = Lines | Bars | Quality | Frontier


def draw(panels: Sequence[Panel], path: str | Path, *, title: str = "") -> Path:
    """Draws panels beside each other, four in a row, and writes them.

    Raises:
        ImportError: if matplotlib is not installed (the `demo` extra brings it).
    """
    # the object interface draws without pyplot, so no display and no global state are involved
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    columns = min(4, len(panels))
    lines = -(-len(panels) // columns)
    width = 4.6 * columns + 1.5
    figure = Figure(figsize=(width, 3.4 * lines + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    several = list(figure.subplots(lines, columns, squeeze=False).flat)
    for panel, axes in zip(panels, several, strict=False):
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
        panel.draw(axes)
    for axes in several[len(panels) :]:
        axes.set_axis_off()
    # so many characters to an inch, or it would be cut off on both sides
    figure.suptitle(textwrap.fill(title, int(11 * width)), fontsize="medium")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return Path(path)


Curve = Sequence[tuple[int, float]]  # steps and values


def plot_training(
    losses: Curve, path: str | Path, *, heldout: Curve, closed: Curve, loss: str = "loss per target token", title: str
) -> Path:
    """The loss over optimizer steps, on held-out data too, and beside it the share of the KL closed, where measured.

    Args:
        loss: what it is, and in which unit.

    Raises:
        ImportError: as `draw` does.
    """
    steps = [("training", losses), ("held-out", heldout)]
    rows = [{"line": line, "step": step, "value": value} for line, curve in steps for step, value in curve]
    panels = [Lines(rows, "step", "value", "step", loss, by="line")]
    if closed:
        shares = [{"line": "closed", "step": step, "value": value} for step, value in closed]
        panels.append(Lines(shares, "step", "value", "step", "held-out: KL closed, %", by="line", scale=100))
    return draw(panels, path, title=title)


def in_order(found: Iterable[Mapping[str, Any]]) -> list[str]:
    """All names, in the order of the mappings that have most of them: `full` alone doesn't know every stage."""
    return list(dict.fromkeys(name for each in sorted(found, key=len, reverse=True) for name in each))


def _look(number: int) -> dict[str, str]:
    """Colour and marker of the number-th line: matplotlib's ten colours, and markers of another period."""
    return {"color": f"C{number % 10}", "marker": _MARKERS[number % len(_MARKERS)]}


def _legend_beside(axes: Any) -> None:
    """A legend to the right of the axes, where it covers no point."""
    if axes.get_legend_handles_labels()[0]:
        axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), frameon=False, fontsize="small")
