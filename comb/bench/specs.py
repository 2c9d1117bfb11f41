"""Lists from the command line: methods (whose own parameters have commas in them), lengths, rates."""

from __future__ import annotations

import math
from collections.abc import Sequence

from comb import methods
from comb.evaluation.run import NO_DOCUMENTS


def split_methods(text: str) -> list[str]:
    """``"full,legolink:16,quantize=int8,comb"`` -> ``["full", "legolink:16,quantize=int8", "comb"]``, all checked.

    Raises:
        ValueError: for no method, an unknown one, or one given twice.
    """
    specs = methods.split_specs(text)
    if not specs:
        raise ValueError("--methods names no method: give at least one, for example full,legolink:16")
    for spec in specs:
        if specs.count(spec) > 1:
            raise ValueError(f"--methods names {spec} twice")
        if spec != NO_DOCUMENTS:
            methods.parse(spec)
    return specs


def without_control(specs: Sequence[str], command: str) -> list[str]:
    """`specs`; raises ValueError if the control "none" is among them, where documents are what is measured."""
    if NO_DOCUMENTS in specs:
        raise ValueError(f"comb bench {command} measures work on documents: leave the control {NO_DOCUMENTS!r} out")
    return list(specs)


def integers(text: str, option: str, *, least: int = 1) -> list[int]:
    """``"512,1024"`` -> ``[512, 1024]``, sorted, each once. Raises ValueError for anything else."""
    values = numbers(text, option, least=least)
    if any(value != int(value) for value in values):
        raise ValueError(f"{option} takes whole numbers separated by commas, got {text!r}")
    return [int(value) for value in values]


def numbers(text: str, option: str, *, least: float = 0.0, most: float = math.inf) -> list[float]:
    """``"0.5,2"`` -> ``[0.5, 2.0]``, sorted, each once, from `least` to `most`. Raises ValueError for anything else."""
    try:
        values = sorted({float(part) for part in text.split(",") if part.strip()})
    except ValueError:
        raise ValueError(f"{option} takes numbers separated by commas, got {text!r}") from None
    wrong = next((value for value in values if not least <= value <= most or not math.isfinite(value)), None)
    if wrong is not None or not values:
        found = "none" if wrong is None else f"{wrong:g}"
        upper = "" if most == math.inf else f" and at most {most:g}"
        raise ValueError(f"{option} takes numbers of at least {least:g}{upper}, got {found}")
    return values
