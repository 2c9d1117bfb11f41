"""Moved to `comb.bench.options`."""

from comb.bench.options import integers, numbers

__all__ = ["integers", "numbers"]
