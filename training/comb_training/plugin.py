"""What training adds to the library: datasets, the nano backbones, and the commands train, answers, eval and demo.

Imported at the first look into a registry, so it must stay light: nothing here imports more than `comb` itself does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comb.backbones.loading import backbones
from comb.documents.datasets import datasets

if TYPE_CHECKING:
    import typer


def register() -> None:
    """Says where dataset readers and the nano backbones are found; calling it again changes nothing."""
    datasets.look_in("comb_training.data.readers")
    backbones.look_in("comb_training.nano.checkpoints")


def add_commands(app: typer.Typer) -> None:
    """Adds the commands to the `comb` application."""
    from comb.bench.harness import benchmarks
    from comb_training.cli import commands

    app.command("train")(commands.train)
    app.command("answers")(commands.answers)
    app.command("eval")(commands.evaluate)
    app.command("demo")(commands.demo)
    benchmarks.look_in("comb_training.bench")
