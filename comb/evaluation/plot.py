"""Plots as PNG beside the tables: quality against time to first token, and the loss of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comb.evaluation.run import NO_DOCUMENTS, MethodResult

METRICS = {"em": "exact match, %", "f1": "F1, %", "rouge_l": "ROUGE-L, %"}
# one colour and marker per family of methods, as in EPIC Fig. 6
FAMILIES = {
    NO_DOCUMENTS: ("#9a9a9a", "."),
    "full": ("#000000", "*"),
    "prefix": ("#7f7f7f", "v"),
    "naive": ("#d62728", "X"),
    "legolink": ("#1f5fbf", "o"),
    "attnlink": ("#2a8f3c", "^"),
    "cacheblend": ("#f07800", "s"),
    "block": ("#8c564b", "h"),
    "comb": ("#8a2bc2", "D"),
}
_OTHERS = ("#17a2b8", "#e377c2", "#9c8f1c", "#4b0f3a")
_LIGHTEST = 0.6


@dataclass(frozen=True)
class Style:
    """How one method is drawn."""

    colour: str
    marker: str
    size: float


def styles(methods: Sequence[str]) -> dict[str, Style]:
    """One style per method: a family shares colour and marker, its members get darker in the order given."""
    members: dict[str, list[str]] = {}
    for method in dict.fromkeys(methods):
        members.setdefault(_family(method), []).append(method)
    unknown = [family for family in members if family not in FAMILIES]
    found = {}
    for family, names in members.items():
        if family in FAMILIES:
            base, marker = FAMILIES[family]
        else:
            base, marker = _OTHERS[unknown.index(family) % len(_OTHERS)], "p"
        for place, name in enumerate(names):
            lightness = _LIGHTEST * (1 - place / (len(names) - 1)) if len(names) > 1 else 0.0
            found[name] = Style(_lighter(base, lightness), marker, 13 if marker == "*" else 8)
    return {method: found[method] for method in methods}


def _family(method: str) -> str:
    name = method.partition(":")[0]
    return "legolink" if name == "legolink-0" else name


def _lighter(colour: str, share: float) -> str:
    """`colour` mixed with `share` of white."""
    channels = (int(colour[start : start + 2], 16) for start in (1, 3, 5))
    return "#" + "".join(f"{round(channel + share * (255 - channel)):02x}" for channel in channels)


def plot_results(
    results: Sequence[MethodResult], path: str | Path, *, title: str = "", metric: str = "em", zoom: bool = False
) -> Path:
    """Quality against time to first token: hollow cold, filled cached (EPIC Fig. 6). Refused methods are left out.

    Args:
        metric: em, f1 or rouge_l.
        zoom: the quality axis covers what the methods reach, instead of everything from zero.

    Raises:
        ImportError: if matplotlib is not installed (the `demo` extra brings it).
        ValueError: for another metric.
    """
    if metric not in METRICS:
        raise ValueError(f"the metric of a plot is one of {', '.join(METRICS)}, not {metric!r}")
    drawn = [result for result in results if not result.refused]
    looks = styles([result.method for result in drawn])
    figure, axes = make_figure(7.2, 4.2)
    times: list[float] = []
    for result in drawn:
        cold, cached = result.ttft_cold_s, result.ttft_cached_s
        look, height = looks[result.method], 100 * float(getattr(result, metric))
        if cold is None or cached is None or result.method == NO_DOCUMENTS:
            axes.axhline(height, color=look.colour, linestyle=":", label=f"{result.method} ({height:.0f}%)")
            continue
        ends = 1000 * cold.median, 1000 * cached.median
        times += ends
        axes.plot(ends, [height, height], color=look.colour, linewidth=1, alpha=0.6)
        marker = {"marker": look.marker, "color": look.colour, "linestyle": "none"}
        axes.plot(ends[:1], [height], markerfacecolor="white", markersize=0.8 * look.size, zorder=3, **marker)
        axes.plot(ends[1:], [height], markersize=look.size, zorder=4, label=result.method, **marker)
    axes.set_xlabel("time to first token, ms (hollow: cold, filled: cached)")
    axes.set_ylabel(METRICS[metric])
    if times and max(times) > 30 * min(times):
        axes.set_xscale("log")
    else:
        axes.set_xlim(left=0)
    axes.set_ylim(*_quality_range([100 * float(getattr(r, metric)) for r in drawn if r.method != NO_DOCUMENTS], zoom))
    legend_beside(axes)
    return save(figure, axes, path, title)


def _quality_range(values: Sequence[float], zoom: bool) -> tuple[float, float]:
    lowest, highest = min(values, default=0.0), max(values, default=100.0)
    if not zoom:
        return -3, 103
    margin = max(1.0, 0.12 * (highest - lowest))
    return lowest - margin, highest + margin


Curve = Sequence[tuple[int, float]]
"""(step, value) pairs."""


def plot_training(
    losses: Curve, path: str | Path, *, heldout: Curve = (), scores: Mapping[str, Curve] | None = None, title: str = ""
) -> Path:
    """Loss per target token over optimizer steps, on held-out data too, and beside it scores in 0..1 if there are any.

    Raises:
        ImportError: if matplotlib is not installed (the `demo` extra brings it).
    """
    scores = {name: curve for name, curve in (scores or {}).items() if curve}
    figure, axes = make_figure(10.0 if scores else 6.4, columns=2 if scores else 1)
    left, *right = getattr(axes, "flat", [axes])
    left.plot(*zip(*losses, strict=True), label="training")
    if heldout:
        left.plot(*zip(*heldout, strict=True), marker="o", label="held-out")
        left.legend(frameon=False)
    left.set_ylabel("loss per target token")
    left.set_ylim(bottom=0)
    for name, curve in scores.items():
        steps, values = zip(*curve, strict=True)
        right[0].plot(steps, [100 * value for value in values], marker="o", label=name)
    for one in right:
        one.set_ylabel("held-out answers, %")
        one.set_ylim(0, 100)
        one.legend(frameon=False)
    for one in (left, *right):
        one.set_xlabel("step")
    return save(figure, axes, path, title)


def make_figure(width: float = 6.4, height: float = 4.0, columns: int = 1) -> tuple[Any, Any]:
    """A figure of so many inches and its axes (an array of them for several columns)."""
    # the object interface draws without pyplot, so no display and no global state are involved
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(1, columns)


def legend_beside(axes: Any) -> None:
    """A legend to the right of the axes, where it covers no point."""
    if not axes.get_legend_handles_labels()[0]:
        return
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1.0), borderaxespad=0.0, frameon=False, fontsize="small")


def save(figure: Any, axes: Any, path: str | Path, title: str) -> Path:
    """Draws title and grid, and writes the figure; `axes` may be several."""
    several = list(getattr(axes, "flat", [axes]))
    if len(several) > 1:
        figure.suptitle(title, fontsize="medium")
    else:
        several[0].set_title(title, fontsize="medium")
    for one in several:
        one.grid(alpha=0.3)
        one.set_axisbelow(True)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return Path(path)
