"""Tables and the figure of `comb bench mac` (paper Fig. 5 and 9, and what the paper has no figure of: drift)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comb.bench.mac import QualityResult, SweepPoint
from comb.bench.report import TextTable

_TITLES = {
    "context": "context, tokens",
    "tau": "threshold tau",
    "window": "window K, tokens",
    "band": "band r, tokens",
}


def stream_tables(points: Sequence[SweepPoint]) -> list[TextTable]:
    """One line per stream; the drift lines with the error at both ends of the decode."""
    lines = []
    sweep = ""
    for point in points:
        result = point.result
        lines.append(
            (
                point.sweep if point.sweep != sweep else "",
                point.value if isinstance(point.value, str) else f"{point.value:g}",
                f"{100 * result.hit_rate:.1f}",
                f"{100 * result.skip_ratio:.1f}",
                f"{100 * result.read_share:.1f}",
                str(result.most_read_on_hit),
                f"{result.error_mean:.3f}",
                f"{result.error_between(0, 0.1):.3f}",
                f"{result.error_between(0.9, 1):.3f}",
            )
        )
        sweep = point.sweep
    columns = ("sweep", "value", "hits %", "skip %", "read %", "hit reads", "error", "first 10%", "last 10%")
    remarks = (
        "hits: of all steps and heads. skip: share of the context not read, misses as 0. read: keys read over what "
        "exact attention reads. hit reads: the most keys that any hit read. error: relative, of the output over all "
        "heads, mean over steps, over the first and over the last tenth of the decode.",
    )
    return [TextTable("Streams", columns, tuple(lines), remarks)]


def quality_tables(results: Sequence[QualityResult]) -> list[TextTable]:
    """One line per task and configuration."""
    if not results:
        return []
    lines = []
    task = ""
    for result in results:
        lines.append(
            (
                result.task if result.task != task else "",
                result.name,
                str(result.n),
                *(f"{100 * value:.1f}" for value in (result.em, result.f1, result.found, result.same)),
                *("-" if value is None else f"{100 * value:.1f}" for value in (result.hit_rate, result.read_share)),
                "-" if result.error_max is None else f"{result.error_max:.2f}",
                str(result.exact_calls),
            )
        )
        task = result.task
    columns = ("task", "attention", "n", "EM %", "F1 %", "found %", "same %", "hits %", "read %", "worst", "exact")
    remarks = (
        "same: answers equal to exact attention's, token for token. read: of the keys of steps that MAC took part in. "
        "worst: the largest relative error that an audit found. exact: attention calls left to exact attention.",
    )
    return [TextTable("Answers with MAC on and off", columns, tuple(lines), remarks)]


def plot_mac(points: Sequence[SweepPoint], path: str | Path, *, title: str = "") -> Path:
    """Six panels: keys over context, sweeps of threshold, window and band, and drift over one decode."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from comb.evaluation.plot import save

    figure = Figure(figsize=(13, 7), layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(2, 3)
    _keys(grid[0, 0], _of(points, "context"))
    for axes, sweep in zip((grid[0, 1], grid[0, 2], grid[1, 0]), ("tau", "window", "band"), strict=True):
        _sweep(axes, _of(points, sweep), sweep)
    _drift(grid[1, 1], _of(points, "drift"))
    _trade_off(grid[1, 2], _of(points, "tau"))
    return save(figure, grid, path, title)


def _of(points: Sequence[SweepPoint], sweep: str) -> list[SweepPoint]:
    return [point for point in points if point.sweep == sweep]


def _keys(axes: Any, points: Sequence[SweepPoint]) -> None:
    contexts = [point.value for point in points]
    heads_steps = [point.result.spec.heads * point.result.spec.steps for point in points]
    for name, values, look in (
        ("exact", [point.result.keys_exact for point in points], "s--"),
        ("MAC, mean", [point.result.keys_read for point in points], "o-"),
    ):
        axes.plot(contexts, [value / count for value, count in zip(values, heads_steps, strict=True)], look, label=name)
    axes.plot(contexts, [point.result.most_read_on_hit for point in points], "^:", label="most on a hit")
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.set_xlabel(_TITLES["context"])
    axes.set_ylabel("keys read per head and step")
    axes.legend(frameon=False, fontsize="small")


def _sweep(axes: Any, points: Sequence[SweepPoint], sweep: str) -> None:
    values = [point.value for point in points]
    axes.plot(values, [100 * point.result.hit_rate for point in points], "o-", color="#4878cf", label="hits, %")
    axes.plot(values, [100 * point.result.skip_ratio for point in points], "s--", color="#6acc64", label="skipped, %")
    axes.set_ylim(-3, 103)
    axes.set_xlabel(_TITLES[sweep])
    axes.set_ylabel("% of steps, % of context")
    if sweep != "tau":
        axes.set_xscale("log", base=2)
    other = axes.twinx()
    other.plot(values, [point.result.error_mean for point in points], "^:", color="#d65f5f", label="error")
    other.set_ylabel("relative error", color="#d65f5f")
    other.set_ylim(bottom=0)
    lines = [*axes.get_lines(), *other.get_lines()]
    axes.legend(lines, [line.get_label() for line in lines], frameon=False, fontsize="small", ncols=3,
                loc="lower center", bbox_to_anchor=(0.5, 1.0))  # fmt: skip


def _drift(axes: Any, points: Sequence[SweepPoint]) -> None:
    colours = {"0.45": "#4878cf", "0.75": "#ee854a", "0.9": "#6acc64"}
    for point in points:
        name = str(point.value)
        errors = point.result.errors
        width = max(1, len(errors) // 16)
        smooth = [sum(errors[i : i + width]) / width for i in range(len(errors) - width + 1)]
        axes.plot(
            range(width, len(errors) + 1), smooth, "-" if name.startswith("capped") else ":", label=name,
            color=colours.get(name.rsplit(" ", 1)[-1]), linewidth=1.5 if name.startswith("capped") else 2.5,
        )  # fmt: skip
    axes.set_xlabel("decode step")
    axes.set_ylabel("relative error, running mean")
    axes.set_ylim(0, 1.4 * axes.get_ylim()[1])
    axes.legend(frameon=False, fontsize="x-small", ncols=2, loc="upper left")


def _trade_off(axes: Any, points: Sequence[SweepPoint]) -> None:
    axes.plot([100 * point.result.read_share for point in points], [point.result.error_mean for point in points], "o-")
    for point in points:
        place = (100 * point.result.read_share, point.result.error_mean)
        axes.annotate(f"{point.value:g}", place, textcoords="offset points", xytext=(4, 4), fontsize="x-small")
    axes.set_xlabel("keys read, % of exact (threshold beside the points)")
    axes.set_ylabel("relative error")
    axes.set_xlim(0, 105)
    axes.set_ylim(bottom=0)
