"""Passes of the backbone: over a segment to be compiled, and over chosen tokens inside cached keys and values.

A recomputing pass feeds the chosen tokens with their positions; each layer scatters their keys and values into the
`ScatterCache` and attends to all of it, under a mask by position (``key_pos <= query_pos``), never aligned to a corner:
a recomputed token can't see what stands behind it. Ways that give the same without the mask: `comb.linking.recomputed`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache

from comb.backbones.attention_calls import AttentionCall
from comb.backbones.forward import count_tokens, run_decoder, takes_positions
from comb.cache.picache import DecoderPICache
from comb.linking.cache import (
    LayerReached,
    RoomyLayer,
    ScatterCache,
    ScatteredRows,
    ordinary_cache,
    roomy_size,
)
from comb.linking.masks import Masks
from comb.linking.recomputed import recomputed_attention
from comb.waits import all_finite

# A portion reads all weights once and attends to the keys in front of its last row only. On a CPU small portions save
# more attention than they cost in weights; a GPU wants them larger.
_MAX_ROWS = 256
_MAX_ROWS_GPU = 1024
_MAX_MASK_ELEMENTS = 2**26


def compile_tokens(
    model: Any, fingerprint: str, token_ids: Sequence[int], before: Sequence[DecoderPICache] = ()
) -> DecoderPICache:
    """Keys and values [kv_heads, tokens, head_dim] of `token_ids`, by one pass. The caller holds the model's lock.

    Args:
        before: what stands in front, from the start of the prompt; without it `token_ids` begin at position zero.

    Raises:
        ValueError: when the backbone computes NaN or infinity.
    """
    start = sum(piece.num_tokens for piece in before)
    end = start + len(token_ids)
    # without a configuration every layer keeps all its tokens, also those behind a sliding window
    cache = DynamicCache()
    cache.layers = [RoomyLayer(keys, values, start) for keys, values in _joined(model, before, end)]
    ids = torch.tensor([list(token_ids)])
    positions = torch.arange(start, end)[None] if takes_positions(model) else None
    mask = torch.ones(1, end, dtype=torch.long)
    run_decoder(model, ids, cache, attention_mask=mask, position_ids=positions)
    layers: list[Any] = cache.layers
    keys, values = ([getattr(layer, name)[0, :, start:] for layer in layers] for name in ("keys", "values"))
    if not all_finite((*keys, *values)):
        raise ValueError(
            f"the backbone gave NaN or infinite keys or values for a segment of {len(token_ids)} tokens: its "
            f"weights are damaged or overflow in {str(model.dtype).removeprefix('torch.')}"
        )
    return DecoderPICache(fingerprint, tuple(keys), tuple(values), torch.tensor(list(token_ids)))


def cache_of(model: Any, pieces: Sequence[DecoderPICache], length: int) -> Cache:
    """An ordinary cache over all of `pieces`, of copies, with room for `length` tokens and a little more."""
    return ordinary_cache(model, _joined(model, pieces, length), sum(piece.num_tokens for piece in pieces))


def _joined(model: Any, pieces: Sequence[DecoderPICache], length: int) -> list[tuple[Tensor, Tensor]]:
    """Per layer, copies of all pieces' keys and values [1, kv_heads, tokens, head_dim], in buffers for `length`."""
    device = model.get_input_embeddings().weight.device
    tokens = sum(piece.num_tokens for piece in pieces)
    layers = []
    for number in range(len(pieces[0].keys) if pieces else 0):
        pair = []
        for parts in ([piece.keys[number] for piece in pieces], [piece.values[number] for piece in pieces]):
            near = [tensor.to(device) for tensor in parts]  # a prefix is there already, what a store keeps may not be
            room = near[0].new_empty(len(near[0]), roomy_size(max(length, tokens)) - tokens, near[0].shape[-1])
            pair.append(torch.cat([*near, room], dim=1)[None])
        layers.append((pair[0], pair[1]))
    return layers


def recompute(
    model: Any, cache: ScatterCache, token_ids: Tensor, positions: Tensor, masks: Masks, *, with_last: bool = False
) -> None:
    """One pass over the rows at `positions` (sorted, [S]) of the prompt `token_ids` [N]; writes into `cache`.

    Very many rows are taken in portions, front to back, so that no mask grows beyond some 64 MB; that changes nothing,
    since no row sees a later one.

    Args:
        with_last: every portion has the last row with it, for rotary embeddings that look at the last position of a
            pass. No other row sees it, and the last portion computes it rightly.
    """
    last, start = positions[-1:], 0
    device = model.get_input_embeddings().weight.device
    most = _MAX_ROWS if device.type == "cpu" else _MAX_ROWS_GPU
    while start < len(positions):
        size = min(most, len(positions) - start)
        while size > 1 and size * (int(positions[start + size - 1]) + 1) > _MAX_MASK_ELEMENTS:
            size //= 2
        portion = positions[start : start + size]
        start += size
        cache.rows.carried = with_last and start < len(positions)
        cache.rows.positions = torch.cat([portion, last]) if cache.rows.carried else portion
        built = masks.build(cache.rows, model)
        try:
            with recomputed_attention(model, cache.rows, masks.windowed(built)):
                run_decoder(
                    model, token_ids[cache.rows.positions][None], cache,
                    position_ids=cache.rows.on(device)[None], attention_mask=built,
                )  # fmt: skip
        except LayerReached:
            count_tokens(len(cache.rows.positions) * (cache.stop_layer or 0) / len(cache.layers))


def recompute_in_order(model: Any, cache: ScatterCache, token_ids: Tensor, positions: Tensor) -> Tensor:
    """The plain twin of `recompute`: each run of neighbouring tokens continues an ordinary cache of all before it.

    Uses no mask but the model's own, so it works for any model with keys and values (ALiBi), and says what `recompute`
    must give. As many passes as there are runs. Returns the last row's final hidden state [hidden].
    """
    takes = takes_positions(model)
    for first, last in ScatteredRows(cache.rows.length, positions).runs():
        before = DynamicCache()
        # a layer's weights may lie on another device than what it is given: these follow
        before.layers = [RoomyLayer(each.keys[:, :, :first], each.values[:, :, :first], first) for each in cache.layers]
        cache.rows.positions = torch.arange(first, last)
        where = cache.rows.positions[None]
        ids, mask = token_ids[cache.rows.positions][None], torch.ones(1, last, dtype=torch.long)
        hidden = run_decoder(model, ids, before, attention_mask=mask, position_ids=where if takes else None)[0, -1]
        with suppress(LayerReached):
            for layer, grown in enumerate(before.layers):
                assert grown.keys is not None
                assert grown.values is not None
                cache.update(grown.keys[:, :, first:], grown.values[:, :, first:], layer)
    return hidden


class QueryAttention:
    """Adds up, over layers and heads, the attention that rows from position `start` on pay to each token. What a model
    adds to its scores (soft caps, sinks) doesn't count here.

    Shapes: H query heads in G groups, S rows being computed, K keys that they may see, N tokens of the prompt.
    """

    def __init__(self, rows: ScatteredRows, start: int) -> None:
        self.rows = rows
        self.start = start
        self._sums: dict[torch.device, Tensor] = {}

    @property
    def paid(self) -> Tensor:
        """The sums [N], float32, on the CPU. They are added up where the layers are, and waited for here."""
        total = torch.zeros(self.rows.length)
        for part in self._sums.values():
            total += part.cpu()
        return total

    def __call__(self, call: AttentionCall) -> None:
        """One layer's call: queries [1, H, S, D], keys [1, G, K, D], and a mask [1, 1, S, K] of bools or numbers."""
        first = int((self.rows.positions < self.start).sum())  # rows are sorted: those that ask are the last ones
        asking = len(self.rows.positions) - first - self.rows.carried
        if asking <= 0:
            return
        paid = call.scores(first)[..., :asking, :].softmax(-1).sum(dim=(0, 1, 2, 3))
        if paid.device not in self._sums:
            self._sums[paid.device] = torch.zeros(self.rows.length, device=paid.device)
        self._sums[paid.device][: len(paid)] += paid
