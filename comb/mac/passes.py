"""A forward pass of the decoder: where its queries stand, and what of it MAC leaves to exact attention."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from comb.backbones.attention_calls import AttentionCall
from comb.backbones.forward import cache_in, keeps_nothing
from comb.linking.cache import RoomyLayer, ScatterCache, ScatteredRows, ScatterLayer
from comb.waits import truths

# kinds of cache layer that hold all keys in order, as attention sees them; not every version of transformers has all
_GROWING = ("DynamicLayer", "LinearAttentionAndFullAttentionLayer", RoomyLayer.__name__, ScatterLayer.__name__)
_OPTIONS = {
    "sliding_window": "sliding window",
    "softcap": "soft cap",
    "s_aux": "attention sinks",
    "position_bias": "position bias",
    "cache": "paged cache",
}
_KINDS = {"Sliding": "sliding window", "Static": "static cache", "Quant": "quantised cache"}
_MAX_CHECKED = 2**26


@dataclass
class DecoderPass:
    decodes: bool  # one token per row behind all others; anything else is a prompt, or a part of one
    cache: Any
    rows: ScatteredRows | None  # the queries where they are scattered (linking); None: they are the last N
    start: Tensor | None  # keys of padding in front of each row [B]; None where `unclear` says what the mask is
    mask_length: int | None  # keys that the mask covers
    positions: Tensor | None  # that the rotary embedding is given, [B or 1, N]; None: key indices
    unclear: str
    audited: bool = False  # exact attention is computed as well
    # that attention got in this pass, and whether they are causal with padding in front and nothing else
    masks: list[tuple[Tensor, bool]] = field(default_factory=list)

    def key_indices(self, call: AttentionCall, device: torch.device | None = None) -> Tensor:
        """Key indices [N] of a call's queries, on their device or another."""
        device = device or call.query.device
        if self.rows is not None:
            return self.rows.on(device)
        length = call.keys.shape[2]
        return torch.arange(length - call.query.shape[2], length, device=device)

    def plain_mask(self, call: AttentionCall) -> bool:
        """Whether attention gets no other mask than its arguments promise; layers that share a mask share the answer.

        Some models choose keys inside of their layers (chunks, indexers, dynamic masks) and say so in the mask only.
        """
        if call.mask is None:
            return True
        if not any(mask is call.mask for mask, _ in self.masks):
            self.masks.append((call.mask, self._causal(call, call.mask)))
        return next(plain for mask, plain in self.masks if mask is call.mask)

    def _causal(self, call: AttentionCall, mask: Tensor) -> bool:
        if self.start is None or mask.shape[-1] != call.keys.shape[2] or mask.shape[1] != 1:
            return False
        start, index = self.start.to(mask.device)[:, None, None, None], self.key_indices(call).to(mask.device)
        place = torch.arange(mask.shape[-1], device=mask.device)
        portion = max(1, _MAX_CHECKED // (len(self.start) * mask.shape[-1]))
        for part in range(0, len(index), portion):
            some, stands = mask[:, :, part : part + portion], index[part : part + portion, None]
            # anything between nothing and the least number is a bias
            boolean = mask.dtype == torch.bool
            seen, shut = (some, ~some) if boolean else (some == 0, some <= torch.finfo(mask.dtype).min)
            allowed = (place >= start) & (place <= stands)
            if not bool((torch.where(allowed, seen, shut) | (stands < start)).all()):
                return False
        return True


class PassReader:
    """Reads the arguments of a decoder's passes; keeps tensors that are the same from pass to pass."""

    def __init__(self, decoder: Any) -> None:
        self._signature = inspect.signature(decoder.forward)
        self._unpadded: Tensor | None = None
        self._padding: Tensor | None = None

    def read(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DecoderPass:
        """Where the queries of a pass stand, as far as its arguments say."""
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        given = {**bound, **bound.get("kwargs", {})}
        given.pop("kwargs", None)
        inputs = given.get("input_ids")
        inputs = given.get("inputs_embeds") if inputs is None else inputs
        assert inputs is not None
        rows, tokens = inputs.shape[:2]
        cache, mask, positions = cache_in(given), given.get("attention_mask"), given.get("position_ids")
        last = self._unpadded
        if last is None or len(last) != rows or last.device != inputs.device:
            self._unpadded = torch.zeros(rows, dtype=torch.long, device=inputs.device)
        start: Tensor | None = self._unpadded
        scattered, unclear, mask_length = None, "", None
        if isinstance(cache, ScatterCache):
            scattered = cache.rows  # its masks are comb's own: causal by position
        elif isinstance(mask, Tensor) and mask.ndim == 2:
            mask_length = mask.shape[1]
            seen = mask != 0
            start = seen.int().argmax(dim=1).to(inputs.device)
            inside = torch.arange(mask_length, device=mask.device) >= start[:, None].to(mask.device)
            plain, last = (seen == inside).all() & seen.any(dim=1).all(), self._padding
            if last is None or last.shape != start.shape or last.device != start.device:
                whole, same = bool(plain), False
            else:  # one wait for the device
                whole, same = truths(plain.to(start.device), (last == start).all())
            if not whole:
                start, unclear = None, "mask with holes"
            elif same:
                start = last  # that very tensor, so that layers needn't wait for the device to compare
            else:
                self._padding = start
        elif mask is not None:
            start, unclear = None, "mask of the caller's own"
        if isinstance(positions, Tensor) and positions.ndim != 2:
            unclear = "positions of several axes"
        # a single row that linking computes is still a part of a prompt: it may stand anywhere
        decodes = tokens == 1 and scattered is None
        return DecoderPass(decodes, cache, scattered, start, mask_length, positions, unclear)


def why_exact(call: AttentionCall, current: DecoderPass, index: int | None) -> str:
    """Why this call has to be left to exact attention; empty if it hasn't."""
    for option, reason in _OPTIONS.items():
        if call.options.get(option) is not None:
            return reason
    asked = call.options.get("output_attentions")
    if getattr(call.module.config, "output_attentions", False) if asked is None else asked:
        return "attention weights asked for"
    if call.dropout:
        return "dropout"
    if torch.is_grad_enabled() and call.query.requires_grad:
        return "gradients"
    held = cache_layer(current.cache, index)
    if current.cache is None or held is None or keeps_nothing(held):  # the layer reads another's keys
        return "no cache"
    if type(held).__name__ not in _GROWING:
        name = type(held).__name__
        return next((reason for part, reason in _KINDS.items() if part in name), f"cache of {name}")
    if current.unclear:
        return current.unclear
    length = call.keys.shape[2]
    if current.mask_length is not None and current.mask_length != length:
        return "mask of another length"
    return "" if current.plain_mask(call) else "mask of the layer's own"


def cache_layer(cache: Any, index: int | None) -> Any:
    """A layer of a cache; None where there is none."""
    layers = getattr(cache, "layers", None)
    return None if layers is None or index is None or index >= len(layers) else layers[index]
