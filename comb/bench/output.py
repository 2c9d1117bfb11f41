"""Tables on the terminal and files beside them, for the commands below `comb bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from comb.bench.report import TextTable

_WIDTH = 110


def wide_console() -> Any:
    from rich.console import Console

    console = Console()
    # the tables need some 105 columns; on a narrower terminal lines wrap, which is better than columns that vanish
    return console if console.width >= _WIDTH else Console(width=_WIDTH)


def show(
    out: Path | None,
    results: Sequence[Any],
    tables: Sequence[TextTable],
    draw: Callable[[Path], Path] | None,
    *,
    heading: str = "",
    **settings: Any,
) -> None:
    """Prints tables and writes files."""
    console = wide_console()
    if heading:
        console.print(heading, markup=False)
    for table in tables:
        console.print(table.rich())
    text = "\n".join([*([f"## {heading}\n"] if heading else []), *(table.markdown() for table in tables)])
    write(out, results, text, draw, **settings)


def write(
    out: Path | None, results: Sequence[Any], text: str, draw: Callable[[Path], Path] | None, **settings: Any
) -> None:
    if out is None:
        return
    from comb.bench.report import write_report

    written, missing = write_report(out, results, text, draw, settings)
    console = wide_console()
    if missing:
        console.print(f"no plot: {missing}", markup=False)
    console.print(f"written: {', '.join(written)}", markup=False, soft_wrap=True)
