"""Masks by position for scattered rows, in the form that a model's forward pass takes; for whole rows in training.

Shapes: S rows being computed, K keys; in training B rows, T tokens of the longest row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

from comb.backbones.attention_calls import STAND_INS, attention
from comb.backbones.forward import keeps_nothing
from comb.backbones.transformers_private import attention_name, attention_with_masks
from comb.linking.cache import ScatteredRows
from comb.linking.positions import UnmovableError

FRESH, PADDING = 0, -1
"""Segments of tokens outside of documents, which are numbered from 1, and of padding."""


@dataclass(frozen=True)
class Masks:
    """The sliding windows of a model's layers, by the names that its forward pass knows them under.

    `windows` holds one window (None: all earlier keys) per kind of layer; with a single kind the mask is passed as a
    tensor, otherwise as the mapping that models with several kinds take.
    """

    windows: tuple[tuple[str, int | None], ...]
    mapping: bool

    def build(self, rows: ScatteredRows, model: Any) -> Tensor | dict[str, Tensor]:
        """Masks [1, 1, S, visible keys] for `rows`: True (sdpa) or 0 (eager) where a row may look."""
        device = model.get_input_embeddings().weight.device
        positions = rows.on(device)[:, None]
        keys = torch.arange(rows.visible, device=device)
        causal = keys <= positions
        masks = {}
        for kind, window in self.windows:
            allowed = causal if window is None else causal & (keys > positions - window)
            masks[kind] = for_attention(allowed[None, None], model)
        return masks if self.mapping else next(iter(masks.values()))

    def windowed(self, built: Tensor | dict[str, Tensor]) -> list[tuple[Tensor, int | None]]:
        """What `build` has made, each mask with the window that it shows."""
        by_kind = built if isinstance(built, dict) else dict.fromkeys((kind for kind, _ in self.windows), built)
        return [(by_kind[kind], window) for kind, window in self.windows]


def for_attention(allowed: Tensor, model: Any) -> Tensor:
    """A mask in the form that the model's attention takes: bool for sdpa, 0 and the least number for eager."""
    if exact_attention(model) != "eager":
        return allowed
    shut = torch.finfo(model.dtype).min
    return torch.zeros(allowed.shape, dtype=model.dtype, device=allowed.device).masked_fill_(~allowed, shut)


def exact_attention(model: Any) -> str:
    """The attention implementation that `model` uses, or that the one it uses stands in for."""
    name = attention_name(model)
    return STAND_INS.get(name, name)


@contextmanager
def masked_attention(model: Any) -> Iterator[None]:
    """For a while, an attention that takes a mask tensor in place of one that doesn't (flash attention)."""
    now = attention_name(model)
    with attention(model, now if now in ("sdpa", "eager", *STAND_INS) else attention_with_masks(model)):
        yield


def mask_candidates(model: Any) -> list[Masks]:
    """Ways in which `model` may want its masks, most telling first; which one it understands is tried out."""
    layers = cache_kinds(model)
    window = [layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None for layer in layers]
    kinds: Mapping[str, int | None] = dict(
        zip(getattr(model.config.get_text_config(decoder=True), "layer_types", None) or (), window, strict=False)
    )
    candidates = [Masks(tuple(kinds.items()), True)] if kinds else []
    if len(set(window)) == 1:
        candidates.append(Masks((("all", window[0]),), False))
    return candidates


def cache_kinds(model: Any) -> list[Any]:
    """The layers of an empty cache for `model`, without those at its end that read the keys of others (Gemma 3n, 4).

    Raises:
        UnmovableError: when they aren't all keys and values per token, full or with a sliding window, or hold tokens
            that aren't the prompt's.
    """
    if getattr(model.config, "is_encoder_decoder", False):
        raise UnmovableError("it is an encoder-decoder")
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, NotImplementedError, ValueError) as error:
        raise UnmovableError(f"transformers has no key/value cache for it ({type(error).__name__}: {error})") from error
    while layers and keeps_nothing(layers[-1]):  # until transformers 5.22 they have no place in a cache
        layers.pop()
    kept = {type(layer).__name__ for layer in layers if not keeps_nothing(layer)}
    other = sorted(kept - {"DynamicLayer", "DynamicSlidingWindowLayer"})
    if other:
        raise UnmovableError(
            f"its cache has layers of type {', '.join(other)}, which keep a state, not keys and values per token"
        )
    if any(map(keeps_nothing, layers)):
        raise UnmovableError("between its layers with keys and values there are some without any")
    kinds = getattr(model.config.get_text_config(decoder=True), "layer_types", None) or ()
    if "chunked_attention" in kinds:
        raise UnmovableError(
            "its attention is cut into chunks at fixed positions, so what a token sees depends on its place"
        )
    return list(layers)


def visible(
    query: Tensor, key: Tensor, query_at: Tensor, key_at: Tensor, window: int | None = None, *, inner: int = 0
) -> Tensor:
    """Where tokens may look, bool [B, 1, T, K]: at their own segment, fresh ones at all, within `window`, no later.

    So documents see only themselves, as cached ones do.

    Args:
        query, key: segments [B, T] and [B, K].
        query_at, key_at: their positions [B or 1, T] and [B or 1, K].
        window: of a sliding-window layer: a token sees itself and window - 1 before it.
        inner: so many keys, the first ones, are seen by their own segments alone.
    """
    shown = (key != PADDING) & (torch.arange(key.shape[1], device=key.device) >= inner)
    query, key, shown = query[:, :, None], key[:, None, :], shown[:, None, :]
    distance = query_at[:, :, None] - key_at[:, None, :]
    near = (distance >= 0) if window is None else (distance >= 0) & (distance < window)
    # padding sees itself, so that no row of the softmax is empty
    return (((key == query) | ((query == FRESH) & shown)) & near)[:, None]
