"""`comb demo`: its options; `comb_training.cli.demonstration` is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console


def demo(
    output_dir: Annotated[Path, typer.Option(help="Folder for adapter, table and plots.")] = Path("out/demo"),
    train_seconds: Annotated[float, typer.Option(help="Seconds of training.")] = 120.0,
    questions: Annotated[int, typer.Option(help="Held-out questions in the table.")] = 200,
    seed: Annotated[int, typer.Option(help="Of data and training.")] = 0,
) -> None:
    """The whole story on a CPU in minutes: train, save, reload, ask, compare."""
    from comb_training.cli.demonstration import run_demo

    if not run_demo(output_dir, train_seconds=train_seconds, questions=questions, seed=seed, console=Console()):
        raise typer.Exit(1)
