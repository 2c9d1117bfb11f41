"""How recomputed tokens attend: which way a pass over scattered rows takes.

Under the mask by position, which is the plain way, or without: `grouped`, `varlen`, `flex`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from comb.backbones.attention_calls import ANSWERING, attention, stand_in
from comb.linking.answering import ScatteredAttention, WindowedMasks
from comb.linking.cache import ScatteredRows
from comb.linking.grouped import GroupedAttention
from comb.linking.masks import exact_attention
from comb.linking.varlen import RunPlan, VarlenAttention

VARIABLE = "COMB_RECOMPUTED_ATTENTION"
"""The environment variable that chooses one of `WAYS`; not set: by device and count."""

_LEAST_KEYS = 512  # on a CPU; below, answering the calls takes longer than it saves
# Flash attention is reckoned to take half as long for a tile as attention under a mask does, whose keys are repeated
# for each head beforehand: not measured
_MOST_TILES = 2.0


@contextmanager
def recomputed_attention(model: Any, rows: ScatteredRows, masks: WindowedMasks) -> Iterator[None]:
    """Within it, passes of `model` over `rows` attend in the way that is chosen; eager attention keeps its mask."""
    way = chosen(rows, model.get_input_embeddings().weight.device.type)
    if exact_attention(model) != "sdpa" or (made := WAYS[way](rows, masks)) is None:
        yield
        return
    with attention(model, stand_in("sdpa")):
        token = ANSWERING.set(made)
        try:
            yield
        finally:
            ANSWERING.reset(token)


def chosen(rows: ScatteredRows, device: str) -> str:
    """The way of a pass over `rows`, by name.

    Raises:
        ValueError: if the environment names one that there isn't.
    """
    if asked := os.environ.get(VARIABLE):
        if asked not in WAYS:
            raise ValueError(f"{VARIABLE} is {asked!r}; it can be {', '.join(WAYS)}, or not set")
        return asked
    if device == "cuda":
        plan = RunPlan(tuple(rows.runs()))
        return "varlen" if plan.tiles <= _MOST_TILES * plan.masked_tiles else "mask"
    return "grouped" if device == "cpu" and rows.length >= _LEAST_KEYS else "mask"


def _varlen(rows: ScatteredRows, masks: WindowedMasks) -> ScatteredAttention:
    return VarlenAttention(rows, masks, RunPlan(tuple(rows.runs())))


def _flex(rows: ScatteredRows, masks: WindowedMasks) -> ScatteredAttention:
    from comb.linking.flex import FlexAttention  # torch loads its compiler for it

    return FlexAttention(rows, masks)


def _mask(rows: ScatteredRows, masks: WindowedMasks) -> None:
    return None


WAYS: dict[str, Callable[[ScatteredRows, WindowedMasks], ScatteredAttention | None]] = {
    "mask": _mask, "grouped": GroupedAttention, "varlen": _varlen, "flex": _flex,
}  # fmt: skip
