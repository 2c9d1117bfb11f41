"""Prefix caching: exact reuse of the longest stored prompt prefix, as serving engines do today.

The backbone's keys and values of each document are kept under a key of *everything before and including it*, so a
document is reused only behind the same head and the same documents in the same order. Each entry holds the
document's own tokens only: a prompt of N documents costs N entries of one document each, not N prefixes. On a hybrid
backbone an entry also holds the states of the linear layers at its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, DynamicCache, DynamicLayer

from comb.backbones.exclusive import exclusive
from comb.backbones.identity import weights_fingerprint
from comb.cache.picache import DecoderPICache, PICache, content_key
from comb.cache.store import PICacheStore
from comb.hybrid.caches import run
from comb.hybrid.picache import HybridPICache
from comb.hybrid.snapshot import extend, restore
from comb.hybrid.support import find_hybrid_support, is_hybrid
from comb.linking.positions import UnmovableError
from comb.methods import register
from comb.methods.base import DecodeState, LinkRequest, Method, SegmentUse
from comb.methods.continuation import length_dependent_rope, why_not_continue
from comb.methods.full import continue_inlined, token_ids, token_picache
from comb.methods.past_state import PastState


@register("prefix")
class Prefix(Method):
    """Reuses keys and values of head + doc1 + ... + docN; gives what `full` gives.

    `compile` of a single segment keeps its token ids, for there is nothing position-independent to keep. `link`
    prefills what no stored prefix covers and stores it.

    Args:
        store: where prefixes are kept; a private one when not given.
        salt: separates tenants that must not share prefixes.

    Raises:
        ValueError: when the model's cache can't be cut at a token (sliding windows) or its keys depend on the length
            of the prompt.
    """

    keeps_tokens_only = True
    needs_store = True
    unquantizable = "promises what full recompute gives, bit for bit"

    def __init__(self, model: Any, *, store: PICacheStore | None = None, salt: str = "", **parameters: Any) -> None:
        super().__init__(model, **parameters)
        self._hybrid = is_hybrid(self.backbone)
        reason = self._why_not_hybrid() if self._hybrid else why_not(self.backbone)
        if reason is not None:
            raise ValueError(f"method 'prefix' can't be used with this model: {reason}; use method='full'")
        self.store = PICacheStore() if store is None else store
        self.salt = salt

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.backbone)

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        fingerprint = self.fingerprint
        return [token_picache(fingerprint, segment) for segment in segments]

    def link_row(self, row: LinkRequest) -> DecodeState:
        segments, fresh = [token_ids(picache) for picache in row.picaches], row.fresh
        self.check_prompt(sum(map(len, segments)), sum(map(len, fresh)))
        pieces = [before + segment for before, segment in zip(fresh, segments, strict=False)]
        input_ids, attention_mask = self.tensors([[*chain.from_iterable(pieces), *fresh[-1]]])
        state = DecodeState(self.backbone, input_ids, attention_mask)
        # the last token is always computed anew: its logits are what decoding starts from
        reusable = pieces if fresh[-1] else pieces[:-1]
        try:
            kept = self._prefix(reusable, state)
        except BaseException:
            state.release()
            raise
        uses = state.uses[0] if state.uses else []
        uses += [SegmentUse("inlined")] * (len(segments) - len(reusable))
        state.uses = [uses]
        state.recomputed = (
            sum(len(segment) for segment, use in zip(segments, uses, strict=True) if use.state != "hit"),
        )
        if kept and self._hybrid:
            self._restore(state, [piece for piece in kept if isinstance(piece, HybridPICache)])
        elif kept:
            state.past_key_values = _cache(
                self.backbone, [piece for piece in kept if isinstance(piece, DecoderPICache)]
            )
        return state

    def why_not_continue(self) -> str:
        return why_not_continue(self.backbone)

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """As with `full`: prefixes are stored when a prompt is linked from its start."""
        return continue_inlined(self, past, row)

    def _why_not_hybrid(self) -> str | None:
        try:
            find_hybrid_support(self.backbone)
        except UnmovableError as reason:
            return str(reason)
        return None

    def _restore(self, state: DecodeState, kept: Sequence[Any]) -> None:
        token_ids: list[int] = state.input_ids[0].tolist()
        start = sum(piece.num_tokens for piece in kept)
        with exclusive(self.backbone):
            state.past_key_values = restore(self.backbone, kept, len(token_ids))
            state.step = find_hybrid_support(self.backbone).step
            if state.step is not None:  # `generate` would take the rest of the prompt at once
                run(self.backbone, token_ids[start:-1], state.past_key_values, start, step=state.step)

    def _prefix(self, pieces: Sequence[list[int]], state: DecodeState) -> list[Any]:
        """Stored or newly computed keys and values of every piece (fresh tokens + segment) in order."""
        fingerprint = self.fingerprint
        kept: list[DecoderPICache | HybridPICache] = []
        uses: list[SegmentUse] = []
        tokens: list[int] = []
        for piece in pieces:
            start, tokens = len(tokens), tokens + piece
            # where the piece starts belongs to the key: the same tokens may be cut into other documents
            key = content_key(
                tokens, fingerprint=fingerprint, method=f"prefix@{start}", dtype=self.dtype, salt=self.salt
            )
            handle = self.store.acquire([key], partial(self._extend, fingerprint, tuple(kept), piece))[0]
            state.on_release.append(handle.release)
            expected = HybridPICache if self._hybrid else DecoderPICache
            if not isinstance(handle.picache, expected) or handle.picache.num_tokens != len(piece):
                raise ValueError(f"the store holds something else under {key[:12]}: {handle.picache!r}")
            kept.append(handle.picache)
            uses.append(SegmentUse("hit" if handle.hit else "compiled", handle.tier, handle.picache.nbytes))
        state.uses = [uses]
        return kept

    def _extend(
        self, fingerprint: str, before: Sequence[Any], piece: Sequence[int], missing: Sequence[int]
    ) -> list[PICache]:
        """Keys and values of `piece` behind `before`, by a forward pass of the backbone over `piece` alone."""
        if self._hybrid:
            with exclusive(self.backbone):
                support = find_hybrid_support(self.backbone)
                return [extend(self.backbone, support, fingerprint, before, piece)]
        start = sum(picache.num_tokens for picache in before)
        cache = _cache(self.backbone, before) if before else DynamicCache(config=self.backbone.config)
        input_ids, _ = self.tensors([piece])
        mask = torch.ones(1, start + len(piece), dtype=torch.long, device=input_ids.device)
        with exclusive(self.backbone):
            self.backbone(input_ids, attention_mask=mask, past_key_values=cache, use_cache=True, logits_to_keep=1)
        layers: list[Any] = cache.layers
        keys = tuple(_tail(layer.keys, start, len(piece)) for layer in layers)
        values = tuple(_tail(layer.values, start, len(piece)) for layer in layers)
        return [DecoderPICache(fingerprint, keys, values)]


def why_not(model: Any) -> str | None:
    """Why a model's prefixes can't be stored and continued exactly; None if they can."""
    if getattr(model, "is_encoder_decoder", False) or getattr(model.config, "is_encoder_decoder", False):
        return "it is an encoder-decoder"
    try:
        layers = DynamicCache(config=model.config).layers
    except (AttributeError, KeyError, NotImplementedError, ValueError) as error:
        return f"transformers has no key/value cache for it ({type(error).__name__}: {error})"
    other = sorted({type(layer).__name__ for layer in layers if type(layer) is not DynamicLayer})
    if other:
        sliding = any("Sliding" in name for name in other)
        why = (
            "sliding-window layers drop the keys and values of early tokens"
            if sliding
            else "linear (recurrent) layers keep a state, not keys and values per token"
        )
        return f"its cache has layers of type {', '.join(other)}, and {why}"
    return length_dependent_rope(model) or None


def _cache(model: Any, pieces: Sequence[DecoderPICache]) -> Cache:
    """A cache [1, kv_heads, tokens, head_dim] per layer over all pieces, on the device of each layer's weights."""
    cache = DynamicCache(config=model.config)
    device = model.get_input_embeddings().weight.device
    for index in range(len(pieces[0].keys)):
        keys = torch.cat([piece.keys[index] for piece in pieces], dim=-2)[None]
        values = torch.cat([piece.values[index] for piece in pieces], dim=-2)[None]
        cache.update(keys.to(device), values.to(device), index)
    return cache


def _tail(tensor: Tensor | None, start: int, length: int) -> Tensor:
    if tensor is None or tensor.shape[-2] != start + length:
        found = "nothing" if tensor is None else f"{tensor.shape[-2]} tokens"
        raise ValueError(f"the backbone left {found} in a cache layer, expected {start + length} tokens")
    return tensor[0, :, start:]
