"""Plots as PNG beside the tables: quality against time to first token, and the loss of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comb.evaluation.run import MethodResult


def plot_results(results: Sequence[MethodResult], path: str | Path, *, title: str = "") -> Path:
    """Exact match against time to first token: hollow cold, filled cached, one colour per method.

    Raises:
        ImportError: if matplotlib is not installed (the `demo` extra brings it).
    """
    figure, axes = _figure()
    colours = [f"C{number}" for number in range(10)]
    for number, result in enumerate(results):
        cold, cached = result.ttft_cold_s, result.ttft_cached_s
        colour, height = colours[number % len(colours)], 100 * result.em
        if cold is None or cached is None:
            axes.axhline(height, color=colour, linestyle=":", label=result.method)
            continue
        ends = 1000 * cold.median, 1000 * cached.median
        axes.plot(ends, [height, height], color=colour, linewidth=1)
        axes.scatter(ends[:1], [height], facecolors="none", edgecolors=colour, s=60, zorder=3)
        axes.scatter(ends[1:], [height], color=colour, s=60, zorder=3, label=result.method)
    axes.set_xlabel("time to first token, ms (hollow: cold, filled: cached)")
    axes.set_ylabel("exact match, %")
    axes.set_xlim(left=0)
    axes.set_ylim(-3, 103)
    axes.legend()
    return _save(figure, axes, path, title)


def plot_losses(losses: Sequence[tuple[int, float]], path: str | Path, *, title: str = "") -> Path:
    """Loss per target token over optimizer steps.

    Raises:
        ImportError: if matplotlib is not installed (the `demo` extra brings it).
    """
    figure, axes = _figure()
    axes.plot([step for step, _ in losses], [loss for _, loss in losses])
    axes.set_xlabel("step")
    axes.set_ylabel("loss per target token")
    axes.set_ylim(bottom=0)
    return _save(figure, axes, path, title)


def _figure() -> tuple[Any, Any]:
    # the object interface draws without pyplot, so no display and no global state are involved
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 4.0), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def _save(figure: Any, axes: Any, path: str | Path, title: str) -> Path:
    axes.set_title(title)
    axes.grid(alpha=0.3)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return Path(path)
