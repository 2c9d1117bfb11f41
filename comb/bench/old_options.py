"""Moved to `comb.bench.options`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from comb.bench.options import OfRandomModel, Seed

__all__ = ["OfRandomModel", "Out", "Seed"]

Out = Annotated[Path | None, typer.Option(help="JSON for the results; a .md table and a .png plot go beside it")]
