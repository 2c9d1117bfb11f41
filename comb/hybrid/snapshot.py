"""Snapshots of a hybrid prompt's prefix: states at its end, and keys and values of its last piece.

For exact prefix reuse: nothing is moved or composed, the states are those of this very prefix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from comb.backbones.state_cache import count_in
from comb.hybrid.caches import attention_layers, give_room, new_cache, read_state, run, write_state
from comb.hybrid.picache import HybridPICache, SegmentState
from comb.hybrid.support import HybridSupport


@torch.no_grad()
def extend(
    model: Any, support: HybridSupport, fingerprint: str, before: Sequence[HybridPICache], piece: Sequence[int]
) -> HybridPICache:
    """The snapshot behind `piece`, which follows the pieces of `before`; computes `piece` alone."""
    start = sum(picache.num_tokens for picache in before)
    cache = restore(model, before, start + len(piece))
    run(model, list(piece), cache, start, step=support.step if start else None)
    linear = {}
    for number in support.linear:
        columns, state = read_state(cache, number)
        linear[number] = SegmentState(columns, state)
    attention = {
        number: (layer.keys[0, :, start:].clone(), layer.values[0, :, start:].clone())
        for number, layer in attention_layers(cache).items()
    }
    held = torch.tensor(list(piece))
    return HybridPICache(fingerprint, held, 0, len(piece), linear, attention, leading=not before)


def restore(model: Any, pieces: Sequence[HybridPICache], length: int) -> Any:
    """A cache behind all of `pieces`, with room for `length` tokens; empty without pieces."""
    cache = new_cache(model)
    if not pieces:
        return cache
    device = model.get_input_embeddings().weight.device
    for number, part in pieces[-1].linear.items():
        row = [None if tensor is None else tensor[None].to(device) for tensor in (part.columns, part.state)]
        write_state(cache, number, row[0], row[1])
    count_in(cache, sum(piece.num_tokens for piece in pieces))
    for number in pieces[0].attention:
        # a head is on the device already, what a store keeps may not be
        keys, values = (
            torch.cat([piece.attention[number][part].to(device) for piece in pieces], dim=1)[None] for part in (0, 1)
        )
        cache.update(keys, values, number)
    give_room(cache, length)
    return cache
