"""`comb demo`: its options; `comb_training.cli.demonstration` is what runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

NANO = "nano"


def demo(
    context: typer.Context,
    model: Annotated[
        str, typer.Option(help="nano: trains an encoder. Another that configs/ has a recipe for, smollm2-135m: asks.")
    ] = NANO,
    adapter: Annotated[
        Path | None, typer.Option(help="Folder of a trained adapter to ask; default: the one in training/adapters.")
    ] = None,
    output_dir: Annotated[Path, typer.Option(help="nano: folder for adapter, table and plots.")] = Path("out/demo"),
    train_steps: Annotated[int, typer.Option(min=1, help="nano: steps of training.")] = 300,
    questions: Annotated[int, typer.Option(min=1, help="nano: held-out questions in the table.")] = 200,
    seed: Annotated[int, typer.Option(help="nano: of data and training.")] = 0,
) -> None:
    """The whole story on a CPU in minutes: train, save, reload, ask, compare. Or a real model, which is only asked."""
    console = Console()
    if model != NANO or adapter is not None:
        from comb_training.cli.demonstration import run_real_demo

        trains = ("output_dir", "train_steps", "questions", "seed")
        # by name, not by class: typer has a copy of click of its own
        given = [name for name in trains if getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"]
        if given:
            option = "--" + given[0].replace("_", "-")
            raise ValueError(f"{option} is for the demo that trains; with --model or --adapter nothing is trained")
        run_real_demo(model, adapter, console)
        return
    from comb_training.cli.demonstration import run_demo

    passed = run_demo(output_dir, train_steps=train_steps, questions=questions, seed=seed, console=console)
    console.print("The same questions put to a real language model: [bold]comb demo --model smollm2-135m[/bold]")
    if not passed:
        raise typer.Exit(1)
