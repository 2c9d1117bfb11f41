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

from rich.box import SIMPLE_HEAD
from rich.table import Table

from comb.evaluation.run import MethodResult, Timing

PACKAGES = ("comb-pic", "torch", "transformers", "tokenizers", "safetensors", "accelerate", "vllm")
COLUMNS = ("method", "EM %", "F1 %", "ROUGE-L", "TTFT cold", "TTFT cached", "B/token", "redone")
NOTE = (
    "{n} questions. TTFT: time to first token in ms, median (quartiles), one request at a time. B/token: bytes of "
    "cache per document token. redone: document tokens prefilled again per question."
)


def rows(results: Sequence[MethodResult]) -> list[tuple[str, ...]]:
    """One row of text per result, in the order of `COLUMNS`."""
    return [
        (
            result.method,
            f"{100 * result.em:.1f}",
            f"{100 * result.f1:.1f}",
            f"{100 * result.rouge_l:.1f}",
            _milliseconds(result.ttft_cold_s),
            _milliseconds(result.ttft_cached_s),
            f"{result.cache_bytes_per_document_token:.0f}",
            f"{result.recomputed_tokens:.0f}",
        )
        for result in results
    ]


def result_table(results: Sequence[MethodResult], title: str | None = None) -> Table:
    """A rich table that fits 80 columns; EM, F1 and ROUGE-L in percent, times as median with quartiles."""
    caption = NOTE.format(n=results[0].n) if results else None
    table = Table(
        title=title, caption=caption, title_justify="left", caption_justify="left", box=SIMPLE_HEAD, pad_edge=False
    )
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "method" else "right")
    for row in rows(results):
        table.add_row(*row)
    return table


def markdown_table(results: Sequence[MethodResult]) -> str:
    """The same table in Markdown."""
    lines = [COLUMNS, ("---",) + ("---:",) * (len(COLUMNS) - 1), *rows(results)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def environment(**settings: Any) -> dict[str, Any]:
    """What a number was made with: argv, versions, commit, machine, and the `settings` given (seed, data, ...)."""
    return {
        "argv": sys.argv,
        "versions": {"python": platform.python_version(), **_versions()},
        "commit": _commit(),
        "machine": {"system": platform.platform(), "cpus": os.cpu_count()},
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


def _milliseconds(timing: Timing | None) -> str:
    if timing is None:
        return "-"
    median, low, high = (_short(1000 * seconds) for seconds in (timing.median, timing.low, timing.high))
    return f"{median} ({low}-{high})"


def _short(value: float) -> str:
    return f"{value:.1f}" if value < 10 else f"{value:.0f}"


def _versions() -> dict[str, str]:
    found = {}
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
