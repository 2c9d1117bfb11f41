"""Full recompute: documents go into the prompt as tokens and are prefilled every time. The reference for quality."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature
from itertools import chain
from typing import Any

import torch
from transformers import GenerationConfig

from comb.backbones.adapter import backbone_fingerprint
from comb.backbones.identity import exclusive, identity_of
from comb.cache.picache import PICache, TokenPICache
from comb.hybrid.caches import continued_cache
from comb.linking.support import distance, made_up_tokens, tolerance_of
from comb.methods.base import LinkRequest, Method
from comb.methods.decode_state import DecodeState, PastState, SegmentUse, why_not_continue
from comb.methods.registry import register
from comb.waits import on_device

_TOKENS = 6  # of a prompt that is tried


class TokensOnly(Method):
    """A PICache holds a segment's token ids only; documents are tokens of the prompt like any others."""

    keeps_tokens_only = True

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        fingerprint = self.fingerprint
        return [token_picache(fingerprint, segment) for segment in segments]

    def why_not_continue(self) -> str:
        return why_not_continue(self.backbone)

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        prompt, documents = inlined(row)
        self.check_prompt(documents, len(past.token_ids) + len(prompt) - documents)
        state = self.continue_tokens(past, prompt)
        state.recomputed = (documents,)
        state.uses = [[SegmentUse("inlined") for _ in row.picaches]]
        return state


@register("full")
class Full(TokensOnly):
    """Prefills prefix + documents + query on the plain backbone, every time."""

    unquantizable = "keeps token ids only"

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        if reason := why_not_decoded(self.backbone):
            raise ValueError(f"{type(self.backbone).__name__} can't be asked: {reason}")
        # token ids don't change with the weights, so taking it once is enough
        self._fingerprint = backbone_fingerprint(self.backbone)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    def link_batch(self, rows: Sequence[LinkRequest]) -> DecodeState:
        prompts = [inlined(row) for row in rows]
        for prompt, documents in prompts:
            self.check_prompt(documents, len(prompt) - documents)
        input_ids, attention_mask = self.tensors([prompt for prompt, _ in prompts])
        return DecodeState(
            self.backbone,
            input_ids,
            attention_mask,
            past_key_values=continued_cache(self.backbone),
            recomputed=tuple(documents for _, documents in prompts),
            uses=[[SegmentUse("inlined") for _ in row.picaches] for row in rows],
        )


def why_not_decoded(model: Any) -> str:
    """Why what ``generate`` begins with isn't what a model's own forward pass gives; empty if it is."""

    def find() -> str:
        table = model.get_input_embeddings().weight
        if table.is_meta:
            return ""
        ids = on_device(made_up_tokens(model, _TOKENS)[None], table.device)
        try:
            with exclusive(model):
                own_settings = getattr(model, "generation_config", None)
                try:
                    # its own (stop strings, which need a tokenizer; several answers) are no part of what is tried
                    model.generation_config = GenerationConfig(pad_token_id=0)
                    state = DecodeState(model, ids, torch.ones_like(ids), past_key_values=continued_cache(model))
                    found = state.logits[0]
                finally:
                    model.generation_config = own_settings
                # as `generate` does: layers that quantise activations (torch's dynamic quantisation) scale a token by
                # those beside it
                last = {"logits_to_keep": 1} if "logits_to_keep" in signature(model.forward).parameters else {}
                own = model(input_ids=ids, use_cache=False, **last).logits[0, -1]
        except (RuntimeError, TypeError, ValueError, KeyError, IndexError, AttributeError, AssertionError) as error:
            return f"transformers' `generate` doesn't run on it ({type(error).__name__}: {error})"
        # RoBERTa's positions begin behind its padding's, and `generate` numbers them from zero
        if distance(found, own) > tolerance_of(model):  # not finite: other checks say so
            return "transformers' `generate` gives it other positions or other tokens than its own forward pass has"
        return ""

    return str(identity_of(model).fact("decodes", find))


def inlined(row: LinkRequest) -> tuple[list[int], int]:
    """The row as one run of tokens, and how many of them are documents'."""
    segments, fresh = [token_ids(picache) for picache in row.picaches], row.fresh
    prompt = [*chain.from_iterable(chain(*pair) for pair in zip(fresh, segments, strict=False)), *fresh[-1]]
    return prompt, sum(map(len, segments))


def token_picache(fingerprint: str, segment: Sequence[int]) -> TokenPICache:
    """A PICache that holds nothing but the segment's token ids."""
    return TokenPICache(fingerprint, torch.tensor(list(segment), dtype=torch.int64))


def token_ids(picache: PICache) -> list[int]:
    """The segment's token ids. Raises ValueError if the PICache is another method's."""
    if not isinstance(picache, TokenPICache):
        raise ValueError(
            f"expected a TokenPICache (methods full and prefix), got a {type(picache).__name__}: "
            "PICaches can't be linked by another method than the one that compiled them"
        )
    ids: list[int] = picache.token_ids.tolist()
    return ids
