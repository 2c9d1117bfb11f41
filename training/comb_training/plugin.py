"""What training adds to the library: datasets, the nano backbones, and the commands train, answers, eval and demo.

Imported at the first look into a registry, so it must stay light: nothing here imports more than `comb` itself does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer


def register() -> None:
    """Says where dataset readers and the nano backbones are found; calling it again changes nothing."""
    from comb.backbones import backbones
    from comb.documents.datasets import datasets

    datasets.look_in("comb_training.data.readers")
    backbones.look_in("comb_training.nano")


def add_commands(app: typer.Typer) -> None:
    """Adds the commands to the `comb` application."""
    from comb_training.cli.answers import answers
    from comb_training.cli.demo import demo
    from comb_training.cli.evaluate import evaluate
    from comb_training.cli.train import train

    for name, command in (("train", train), ("answers", answers), ("eval", evaluate), ("demo", demo)):
        app.command(name)(command)
