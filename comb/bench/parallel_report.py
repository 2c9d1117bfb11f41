"""Tables and plot of `comb bench parallel`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from comb.bench.parallel import ParallelResult, Simulated
from comb.bench.report import TextTable, mebibytes, ratio, short_milliseconds, spread
from comb.evaluation.plot import make_figure, save

STAGES = {"dispatch": "#4878cf", "transfer": "#ee854a", "combine": "#6acc64"}


def parallel_tables(measured: Sequence[ParallelResult], simulated: Sequence[Simulated]) -> list[TextTable]:
    """What was measured, then what other numbers of workers and another plan would do."""
    return [_measured(measured), *(_simulated(found) for found in simulated)]


def _measured(results: Sequence[ParallelResult]) -> TextTable:
    lines = tuple(
        (
            result.method,
            str(result.workers) if result.workers else "-",
            short_milliseconds(result.ttft_s),
            short_milliseconds(result.dispatch_s) if result.workers else "-",
            short_milliseconds(result.transfer_s) if result.workers else "-",
            short_milliseconds(result.combine_s),
            ratio(result.speedup),
            spread(result.combine_share, "{:.1f}", 100) if result.workers else "-",
            mebibytes(result.cache_bytes) if result.workers else "-",
        )
        for result in results
    )
    columns = ("method", "workers", "TTFT ms", "dispatch", "transfer", "combine", "1 worker/this", "combine %", "MiB")
    remarks = (
        f"{max((result.ttft_s.n for result in results), default=0)} interleaved repeats; median ±half the distance of "
        "the quartiles, ratios within a repeat with their quartiles. dispatch: the busiest worker's computing; "
        "transfer: what serialising, sending and checking could not hide behind it; combine: link and first token, in "
        "percent of the TTFT with one worker. full: everything prefilled here.",
    )
    return TextTable("A cold prompt over several workers", columns, lines, remarks)


def _simulated(found: Simulated) -> TextTable:
    lines = tuple(
        (
            str(result.workers),
            result.policy,
            *(_ms(s) for s in (result.ttft_s, result.dispatch_s, result.transfer_s, result.combine_s)),
            f"{result.speedup:.2f}",
            f"{result.over_optimum:.3f}",
            f"{result.worst_over_optimum:.3f}",
            f"{100 * result.exact:.0f}",
        )
        for result in found.results
    )
    columns = (
        "workers", "plan", "TTFT ms", "dispatch", "transfer", "combine", "speed-up", "over optimum", "worst", "exact %",
    )  # fmt: skip
    remarks = (
        "Simulated with the compile, transfer and combine times that one worker has shown. over optimum: the busiest "
        "worker's tokens over the least possible, mean and worst request; where the search for it gave up (exact %), "
        "over a bound that no plan can be below, so the true ratio is smaller.",
    )
    return TextTable(f"Simulated: {found.method}, {found.name}", columns, lines, remarks)


def plot_parallel(
    measured: Sequence[ParallelResult], simulated: Sequence[Simulated], path: str | Path, *, title: str = ""
) -> Path:
    """Stages of TTFT over workers, measured then simulated (HYPIC Fig. 14), and both plans over the optimum."""
    figure, both = make_figure(11, 4.2, columns=2)
    left, right = both
    method = next(result.method for result in measured if result.workers)
    bars = [
        (str(r.workers), r.dispatch_s.median, r.transfer_s.median, r.combine_s.median, "")
        for r in measured
        if r.method == method and r.workers
    ]
    known = {int(bar[0]) for bar in bars}
    own = [found for found in simulated if found.method == method]  # its prompt, and the trace behind all prompts
    bars += [
        (str(r.workers), r.dispatch_s, r.transfer_s, r.combine_s, "//")
        for r in (own[0].results if own else ())
        if r.policy == "lpt" and r.workers not in known
    ]
    for number, (_, *seconds, hatch) in enumerate(bars):
        bottom = 0.0
        for (stage, colour), value in zip(STAGES.items(), seconds, strict=True):
            label = stage if number == 0 else None
            left.bar(number, 1000 * value, bottom=bottom, color=colour, hatch=hatch, edgecolor="white", label=label)
            bottom += 1000 * value
    left.set_xticks(range(len(bars)), [bar[0] for bar in bars])
    left.set_xlabel("workers (hatched: simulated)")
    left.set_ylabel(f"cold time to first token, {method}, ms")
    left.legend(frameon=False, fontsize="small")
    for found in own[-1:]:
        for policy in dict.fromkeys(r.policy for r in found.results):
            points = [r for r in found.results if r.policy == policy]
            right.plot([r.workers for r in points], [r.over_optimum for r in points], marker="o", label=policy)
        right.set_xscale("log", base=2)
        right.set_ylabel("busiest worker over the least possible")
        right.set_xlabel(f"workers, simulated: {found.name}")
        right.legend(frameon=False, fontsize="small")
    return save(figure, both, path, title)


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f}" if seconds >= 0.01 else f"{1000 * seconds:.1f}"
