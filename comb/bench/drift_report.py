"""Table and plot of `comb bench drift`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from comb.bench.drift import MethodDrift
from comb.bench.report import TextTable, refusals, spread
from comb.evaluation.plot import legend_beside, make_figure, save, styles
from comb.evaluation.run import Timing


def drift_table(results: Sequence[MethodDrift]) -> TextTable:
    """One line per method: its first and deepest linear layer."""
    lines = []
    for result in results:
        if result.refused:
            lines.append((result.method, "refused", *("-",) * 3))
            continue
        first, deepest = result.layers[0], result.layers[-1]
        shown = (_percent(first.error), _percent(deepest.error), spread(deepest.degrees, "{:.2f}"))
        lines.append((result.method, *shown, f"{result.recomputed_tokens:.0f}"))
    measured = [result for result in results if result.layers]
    columns = ("method", "first layer, %", "deepest layer, %", "angle, degrees", "redone")
    remarks = [
        "Distance of the state behind the prompt from full recompute's, relative, in the Frobenius norm, and its "
        "direction; median (quartiles) over prompts. redone: document tokens prefilled again per prompt.",
        *(f"{each.n} prompts; linear layers {', '.join(str(d.layer) for d in each.layers)}." for each in measured[:1]),
        *refusals((result.method, result.refused) for result in results),
    ]
    return TextTable("State drift", columns, tuple(lines), tuple(remarks))


def plot_drift(results: Sequence[MethodDrift], path: str | Path, *, title: str = "") -> Path:
    """Relative error over depth, quartiles shaded."""
    drawn = [result for result in results if not result.refused]
    looks = styles([result.method for result in drawn])
    figure, axes = make_figure(7.6, 4.0)
    for result in drawn:
        look = looks[result.method]
        places = [layer.layer for layer in result.layers]
        axes.plot(
            places, [100 * layer.error.median for layer in result.layers],
            color=look.colour, marker=look.marker, markersize=0.7 * look.size, label=result.method,
        )  # fmt: skip
        axes.fill_between(
            places, [100 * layer.error.low for layer in result.layers],
            [100 * layer.error.high for layer in result.layers], color=look.colour, alpha=0.15, linewidth=0,
        )  # fmt: skip
    axes.set_xlabel("layer")
    axes.set_xticks(sorted({layer.layer for result in drawn for layer in result.layers}))
    axes.set_ylabel("relative error of the state, %")
    axes.set_ylim(bottom=0)
    legend_beside(axes)
    return save(figure, axes, path, title)


def _percent(error: Timing) -> str:
    """``8.9 (8.1-9.6)``; rounding alone is ``<0.001``."""
    return "<0.001" if error.high < 1e-5 else spread(error, "{:.1f}", 100)
