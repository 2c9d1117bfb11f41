"""``python -m comb_training.answers CONFIG ...``: the same as ``comb answers``, for ``torchrun -m``."""

from __future__ import annotations

import typer

from comb_training.commands import answers

if __name__ == "__main__":
    typer.run(answers)
