"""Command lines made from the fields of a recipe."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, TypeVar

Recipe = TypeVar("Recipe", bound=Any)


def parse_recipe(
    recipe: Recipe, output: Path, description: str | None, argv: Sequence[str] | None
) -> tuple[Recipe, Path]:
    """`recipe`, a dataclass that holds the defaults, with what the command line changes; and where the result goes."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--output", type=Path, default=output, help="folder to write the checkpoint to")
    for name, value in asdict(recipe).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    options = vars(parser.parse_args(argv))
    target: Path = options.pop("output")
    return replace(recipe, **options), target
