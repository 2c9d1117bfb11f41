"""Serving comb checkpoints on vLLM: `comb serve` (docs/serving-http.md) and what runs inside vLLM (docs/serving.md)."""

from __future__ import annotations

from typing import Any

__all__ = ["LLM"]


def __getattr__(name: str) -> Any:
    if name == "LLM":  # not at import: the command line reads this package at every start
        from comb_serving.offline import LLM

        return LLM
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
