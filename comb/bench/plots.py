"""Plots of `comb bench`: lines over context length and request rate, grids of needles."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comb.bench.asynchronous import AsyncResult
from comb.bench.context_length import LengthResult
from comb.bench.needle import NeedleCell
from comb.evaluation.plot import legend_beside, make_figure, save, styles

STAGES = {
    "assemble": "#4878cf",
    "select": "#ee854a",
    "recompute": "#d65f5f",
    "other linking": "#b8b8b8",
    "first token": "#6acc64",
}
_DASHES = ("-", "--", ":", "-.")


def plot_context_length(results: Sequence[LengthResult], path: str | Path, *, title: str = "") -> Path:
    """TTFT over context length (EPIC Fig. 9), and where it goes at the longest one."""
    drawn = [result for result in results if result.ttft_cached_s is not None]
    methods = list(dict.fromkeys(result.method for result in drawn))
    looks = styles(methods)
    figure, both = make_figure(11, 4.2, columns=2)
    left, right = both
    for method in methods:
        points = [result for result in drawn if result.method == method]
        look = looks[method]
        left.plot(
            [point.tokens for point in points],
            [1000 * point.ttft_cached_s.median for point in points if point.ttft_cached_s],
            color=look.colour, marker=look.marker, markersize=0.7 * look.size, label=method,
        )  # fmt: skip
        left.fill_between(
            [point.tokens for point in points],
            [1000 * point.ttft_cached_s.low for point in points if point.ttft_cached_s],
            [1000 * point.ttft_cached_s.high for point in points if point.ttft_cached_s],
            color=look.colour, alpha=0.15, linewidth=0,
        )  # fmt: skip
    left.set_xlabel("context, tokens")
    left.set_ylabel("cached time to first token, ms")
    left.set_xlim(left=0)
    left.set_ylim(bottom=0)
    left.legend(frameon=False, fontsize="small")
    _stages(right, drawn)
    return save(figure, both, path, title)


def _stages(axes: Any, drawn: Sequence[LengthResult]) -> None:
    """Horizontal bars, one per method, of the stages at the longest context."""
    longest = max((result.tokens for result in drawn), default=0)
    bars = [result for result in drawn if result.tokens == longest]
    starts = [0.0] * len(bars)
    names = dict.fromkeys([*STAGES, *(stage for bar in bars for stage in bar.stages_s)])
    for number, stage in enumerate(names):
        widths = [1000 * bar.stages_s.get(stage, 0.0) for bar in bars]
        if any(widths):
            colour = STAGES.get(stage, f"C{number % 10}")
            axes.barh(range(len(bars)), widths, left=starts, color=colour, label=stage, height=0.7)
        starts = [start + width for start, width in zip(starts, widths, strict=True)]
    axes.set_yticks(range(len(bars)), [bar.method for bar in bars])
    axes.invert_yaxis()
    axes.set_xlabel(f"where it goes at {longest} tokens, ms")
    if bars:
        axes.legend(frameon=False, fontsize="small", loc="lower right")


def plot_async(results: Sequence[AsyncResult], path: str | Path, *, title: str = "") -> Path:
    """Median TTFT and throughput over the request rate (EPIC Fig. 8); one dash pattern per context-cache ratio."""
    drawn = [result for result in results if not result.refused]
    looks = styles(list(dict.fromkeys(result.method for result in drawn)))
    ratios = sorted({result.ccr for result in drawn if result.ccr is not None}, reverse=True) or [1.0]
    figure, both = make_figure(11, 4.2, columns=2)
    left, right = both
    for method, look in looks.items():
        own = [result for result in drawn if result.method == method]
        for number, ccr in enumerate([None, *ratios], start=-1):
            points = [result for result in own if result.ccr == ccr]
            if not points:
                continue
            look_of = {
                "color": look.colour, "marker": look.marker, "markersize": 0.7 * look.size,
                "linestyle": _DASHES[max(number, 0) % len(_DASHES)],
            }  # fmt: skip
            rates = [point.rate for point in points]
            label = method if len(ratios) == 1 or ccr is None else f"{method}, ccr {ccr:g}"
            left.plot(rates, [1000 * (point.ttft_median_s or 0) for point in points], **look_of)
            right.plot(rates, [point.throughput for point in points], label=label, **look_of)
    rates = sorted({result.rate for result in drawn})
    right.plot(rates, rates, color="#bbbbbb", linewidth=1, zorder=0, label="all that is offered")
    left.set_ylabel("median time to first token, ms, waiting included")
    left.set_yscale("log")
    right.set_ylabel("requests served per second")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.set_xlabel("requests offered per second")
        axes.set_xlim(left=0)
    legend_beside(right)
    return save(figure, both, path, title)


def plot_needles(cells: Sequence[NeedleCell], path: str | Path, *, title: str = "", metric: str = "found") -> Path:
    """One heat map per method: depth over context length, grey where nothing was measured."""
    methods = list(dict.fromkeys(cell.method for cell in cells))
    lengths = sorted({cell.tokens for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    per_row = min(4, len(methods))
    per_column = -(-len(methods) // per_row)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    size = (1.6 + per_row * max(2.4, 0.62 * len(lengths)), 0.9 + per_column * max(2.2, 0.5 * len(depths)))
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(per_column, per_row, squeeze=False, sharex=True, sharey=True)
    image = None
    for axes, method in zip(grid.flat, methods, strict=False):
        values = {(cell.depth, cell.tokens): getattr(cell, metric) for cell in cells if cell.method == method}
        table = [[_percent(values.get((depth, tokens))) for tokens in lengths] for depth in depths]
        image = axes.imshow(table, cmap="RdYlGn", vmin=0, vmax=100, aspect="auto")
        axes.set_facecolor("#dddddd")
        for row, line in enumerate(table):
            for column, value in enumerate(line):
                text = "-" if value != value else f"{value:.0f}"
                colour = "white" if value < 15 or value > 85 else "black"
                axes.text(column, row, text, color=colour, ha="center", va="center", fontsize="small")
        axes.set_title(method, fontsize="small")
        axes.set_xticks(range(len(lengths)), [str(tokens) for tokens in lengths], fontsize="small")
        axes.set_yticks(range(len(depths)), [f"{depth:g}%" for depth in depths], fontsize="small")
    for axes in grid.flat[len(methods) :]:
        axes.set_axis_off()
    figure.supxlabel("context, tokens", fontsize="small")
    figure.supylabel("depth of the needle", fontsize="small")
    figure.suptitle(title, fontsize="medium")
    if image is not None:
        name = {"found": "answers that hold the needle, %", "f1": "F1, %"}[metric]
        figure.colorbar(image, ax=grid, label=name)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return Path(path)


def _percent(share: float | None) -> float:
    return float("nan") if share is None else 100 * share
