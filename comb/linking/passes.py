"""Recomputes chosen tokens of a prompt inside cached keys and values: one pass of the backbone over those rows alone.

A pass feeds the chosen tokens with their positions; each layer scatters their keys and values into the `ScatterCache`
and attends to all of it, under a mask by position (``key_pos <= query_pos``), never aligned to a corner: a recomputed
token can't see what stands behind it. Ways that give the same without the mask: `comb.linking.recomputed`.

`recompute` takes scattered rows at once. `recompute_in_order` is its plain twin: runs of neighbouring tokens one after
the other, each as an ordinary continuation of everything before it. It is the reference, and the path for models that
take no such mask (ALiBi).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicLayer

from comb.backbones.forward import count_tokens, run_decoder, takes_positions
from comb.linking.cache import LayerReached, ScatterCache, ScatteredRows, plain_layer
from comb.linking.masks import Masks
from comb.linking.recomputed import recomputed_attention

# A portion reads all weights once and attends to the keys in front of its last row only. On a CPU small portions save
# more attention than they cost in weights; a GPU wants them larger.
_MAX_ROWS = 256
_MAX_ROWS_GPU = 1024
_MAX_MASK_ELEMENTS = 2**26


def recompute(
    model: Any, cache: ScatterCache, token_ids: Tensor, positions: Tensor, masks: Masks, *, with_last: bool = False
) -> Tensor | None:
    """One pass over the rows at `positions` (sorted, [S]) of the prompt `token_ids` [N]; writes into `cache`.

    Very many rows are taken in portions, front to back, so that no mask grows beyond some 64 MB; that changes nothing,
    since no row sees a later one.

    Args:
        with_last: every portion has the last row with it, for rotary embeddings that look at the last position of a
            pass. No other row sees it, and the last portion computes it rightly.

    Returns:
        The last row's final hidden state [hidden], or None when the pass was stopped at ``cache.stop_layer``.
    """
    hidden: Tensor | None = None
    last, start = positions[-1:], 0
    device = model.get_input_embeddings().weight.device
    most = _MAX_ROWS if device.type == "cpu" else _MAX_ROWS_GPU
    while start < len(positions):
        size = _portion(positions, start, most)
        portion = positions[start : start + size]
        start += size
        cache.rows.positions = torch.cat([portion, last]) if with_last and start < len(positions) else portion
        built = masks.build(cache.rows, model)
        try:
            with recomputed_attention(model, cache.rows, masks.windowed(built)):
                hidden = run_decoder(
                    model, token_ids[cache.rows.positions][None], cache,
                    position_ids=cache.rows.on(device)[None], attention_mask=built,
                )[0, -1]  # fmt: skip
        except LayerReached:
            hidden = None
            count_tokens(len(cache.rows.positions) * (cache.stop_layer or 0) / len(cache.layers))
    return hidden


def recompute_in_order(model: Any, cache: ScatterCache, token_ids: Tensor, positions: Tensor) -> Tensor | None:
    """What `recompute` does, run by run: each run of neighbouring tokens continues an ordinary cache of all before it.

    Uses no mask but the model's own, so it works for any model with keys and values, and says what `recompute` must
    give. As many passes as there are runs.
    """
    hidden: Tensor | None = None
    takes = takes_positions(model)
    for first, last in ScatteredRows(cache.rows.length, positions).runs():
        before = DynamicCache()
        before.layers = [_beginning(layer, first) for layer in cache.layers]
        cache.rows.positions = torch.arange(first, last)
        where = cache.rows.positions[None]
        ids, mask = token_ids[cache.rows.positions][None], torch.ones(1, last, dtype=torch.long)
        hidden = run_decoder(model, ids, before, attention_mask=mask, position_ids=where if takes else None)[0, -1]
        try:
            for layer, grown in enumerate(before.layers):
                assert grown.keys is not None
                assert grown.values is not None
                cache.update(grown.keys[:, :, first:], grown.values[:, :, first:], layer)
        except LayerReached:
            hidden = None
    return hidden


def _beginning(layer: Any, length: int) -> DynamicLayer:
    return plain_layer(layer.keys[:, :, :length], layer.values[:, :, :length]) if length else DynamicLayer()


def _portion(positions: Tensor, start: int, most: int) -> int:
    size = min(most, len(positions) - start)
    while size > 1 and size * (int(positions[start + size - 1]) + 1) > _MAX_MASK_ELEMENTS:
        size //= 2
    return size
