"""Results as a table for people, and as JSON that says how it was made."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.markup import escape
from rich.table import Table

from comb.evaluation.run import MethodResult, Timing

PACKAGES = ("comb-pic", "transformers", "tokenizers", "safetensors", "accelerate", "vllm")
COLUMNS = ("method", "EM %", "F1 %", "ROUGE-L", "TTFT cold", "TTFT cached", "B/token", "redone")
_LONGEST_NAME = 18  # of a method, before it folds
MEASURED = ("KL", "top-1", "peak")
"""Columns that are there only if some method has a value for them; with them, times are written shorter."""
WIDE = (*COLUMNS[:4], "KL", "top-1", "cold ms", "cached ms", *COLUMNS[6:], "peak")
NOTE = (
    "{n} questions. {times}, one request at a time. B/token: bytes of "
    "cache per document token. redone: document tokens prefilled again per question."
)
TIMES = "TTFT: time to first token in ms, median (quartiles)"
SHORT_TIMES = "cold, cached: time to first token, median ±half the distance of the quartiles"
NOTES = {
    "KL": "KL: from full recompute's next-token distribution, nats per token of its own answer.",
    "top-1": "top-1: how often both have the same likeliest token, %.",
    "peak": "peak: MiB that linking and the first token add.",
}


def columns(results: Sequence[MethodResult]) -> tuple[str, ...]:
    """`COLUMNS`, and among them those of `MEASURED` that some result has a value for."""
    found = {
        "KL": any(result.kl is not None for result in results),
        "top-1": any(result.top1_agreement is not None for result in results),
        "peak": any(result.peak_memory_bytes is not None for result in results),
    }
    return tuple(name for name in WIDE if found.get(name, True)) if any(found.values()) else COLUMNS


def rows(results: Sequence[MethodResult]) -> list[tuple[str, ...]]:
    """One row of text per result, in the order of `columns`."""
    names = columns(results)
    return [tuple(cells[name] for name in names) for cells in map(_cells, results)]


def _cells(result: MethodResult) -> dict[str, str]:
    if result.refused:
        return {**dict.fromkeys((*COLUMNS, *WIDE), "-"), "method": result.method, "EM %": "refused"}
    return {
        "method": result.method,
        "EM %": f"{100 * result.em:.1f}",
        "F1 %": f"{100 * result.f1:.1f}",
        "ROUGE-L": f"{100 * result.rouge_l:.1f}",
        "KL": "-" if result.kl is None else divergence(result.kl),
        "top-1": "-" if result.top1_agreement is None else f"{100 * result.top1_agreement:.1f}",
        "TTFT cold": milliseconds(result.ttft_cold_s),
        "TTFT cached": milliseconds(result.ttft_cached_s),
        "cold ms": short_milliseconds(result.ttft_cold_s),
        "cached ms": short_milliseconds(result.ttft_cached_s),
        "B/token": f"{result.cache_bytes_per_document_token:.0f}",
        "redone": f"{result.recomputed_tokens:.0f}",
        "peak": "-" if result.peak_memory_bytes is None else f"{result.peak_memory_bytes / 2**20:.1f}",
    }


def remarks(results: Sequence[MethodResult]) -> list[str]:
    """One line for each method that was refused, or has a note."""
    said = [(result.method, f" refused: {result.refused}") for result in results if result.refused]
    said += [(result.method, f": {result.note}") for result in results if result.note]
    named = {text: [method for method, its in said if its == text] for text in dict.fromkeys(text for _, text in said)}
    # what holds for all methods is said once, without their names
    return [
        text.removeprefix(": ") if len(methods) == len(results) > 1 else f"{', '.join(methods)}{text}"
        for text, methods in named.items()
    ]


def result_table(results: Sequence[MethodResult], title: str | None = None) -> Table:
    """A rich table that fits 80 columns (100 with `MEASURED`); EM, F1 and ROUGE-L in percent, times with quartiles."""
    below = "\n".join(filter(None, [notes(results), *remarks(results)]))
    names = columns(results)
    return text_table(names, rows(results), title, below)


def notes(results: Sequence[MethodResult]) -> str:
    """What the columns mean, in one paragraph."""
    names = columns(results)
    counts = [result.n for result in results if not result.refused]
    times = TIMES if names == COLUMNS else SHORT_TIMES
    first = [NOTE.format(n=counts[0], times=times)] if counts else []
    return " ".join([*first, *(NOTES[name] for name in names if name in NOTES), *_intervals(results)])


def _intervals(results: Sequence[MethodResult]) -> list[str]:
    """How far exact match may be from what it would be over all questions of the kind."""
    known = [(result.method, result.intervals["em"]) for result in results if "em" in result.intervals]
    if not known:
        return []
    said = ", ".join(f"{name} {100 * low:.1f}-{100 * high:.1f}" for name, (low, high) in known)
    return [f"EM, 95% intervals (bootstrap over questions): {said}."]


def text_table(
    names: Sequence[str],
    lines: Sequence[Sequence[str]],
    title: str | None = None,
    caption: str | None = None,
    *,
    left: Sequence[str] = ("method",),
) -> Table:
    """A rich table; the columns in `left` begin at the left, the others are numbers."""
    table = Table(
        title=title,
        caption=escape(caption) if caption else None,
        title_justify="left",
        caption_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    for name in names:
        text = name in left
        longest = max((len(line[names.index(name)]) for line in lines), default=0)
        width = min(longest, _LONGEST_NAME) if text else None
        table.add_column(name, justify="left" if text else "right", overflow="fold", no_wrap=not text, min_width=width)
    for line in lines:
        table.add_row(*line)
    return table


def markdown_table(results: Sequence[MethodResult]) -> str:
    """The same table in Markdown."""
    return markdown(columns(results), rows(results), remarks(results))


def markdown(names: Sequence[str], lines: Sequence[Sequence[str]], remarks: Sequence[str] = ()) -> str:
    """A Markdown table, and a list of remarks below it."""
    rules = ("---",) + ("---:",) * (len(names) - 1)
    table = ["| " + " | ".join(line) + " |" for line in (names, rules, *lines)]
    below = ["", *(f"- {remark}" for remark in remarks)] if remarks else []
    return "\n".join([*table, *below]) + "\n"


def environment(**settings: Any) -> dict[str, Any]:
    """What a number was made with: argv, versions, commit, machine, and the `settings` given (seed, data, ...)."""
    gpus = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return {
        "argv": sys.argv,
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count(), "gpus": gpus},
        **settings,
    }


def write_results(path: str | Path, results: Sequence[MethodResult], **settings: Any) -> None:
    """Writes results with `environment` as JSON, atomically."""
    write_json(path, {**environment(**settings), "results": [result.to_dict() for result in results]})


def write_json(path: str | Path, content: Mapping[str, Any]) -> None:
    """Writes JSON atomically: a reader never sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=2, default=str) + "\n", encoding="utf-8")
    temporary.replace(path)


def milliseconds(timing: Timing | None) -> str:
    """``12 (9.1-20)``: the median with its quartiles."""
    if timing is None:
        return "-"
    median, low, high = (_short(1000 * seconds) for seconds in (timing.median, timing.low, timing.high))
    return f"{median} ({low}-{high})"


def short_milliseconds(timing: Timing | None) -> str:
    """``12 ±5.5``: the median, and half the distance of the quartiles."""
    if timing is None:
        return "-"
    return f"{_short(1000 * timing.median)} ±{_short(500 * (timing.high - timing.low))}"


def divergence(kl: float) -> str:
    """A KL in nats: ``0`` only if it is exactly that; rounding may leave a tiny negative number."""
    if kl == 0 or abs(kl) < 1e-6:
        return "0" if kl == 0 else "<1e-6"
    return f"{kl:.3f}" if abs(kl) >= 0.001 else f"{kl:.0e}"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _versions() -> dict[str, str]:
    found: dict[str, str] = {"torch": torch.__version__}  # with what it was built for, which its metadata may not name
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _commit() -> str | None:
    """The commit of the source tree, "-dirty" behind it if files differ; None when not run from one."""
    folder = Path(__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=12", "--match="],
            cwd=folder, capture_output=True, text=True, timeout=10, check=True,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    return described.stdout.strip() or None
