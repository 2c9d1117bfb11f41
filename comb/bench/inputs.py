"""Moved to `comb.bench.options`."""

from __future__ import annotations

from typing import Any

from comb.bench.options import RandomModelOptions


def make_random(sizes: dict[str, int], positions: int, dtype: str, device: str, *, seed: int = 0) -> Any:
    """`RandomModelOptions.load`."""
    return RandomModelOptions(dtype=dtype, device=device, seed=seed, **sizes).load(positions)  # type: ignore[arg-type]
