"""Full recompute: documents go into the prompt as tokens and are prefilled every time. The reference for quality."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import torch

from comb.backbones.fingerprint import backbone_fingerprint
from comb.cache.picache import PICache, TokenPICache
from comb.hybrid.caches import continued_cache
from comb.linking.support import takes_padded_rows
from comb.methods import register
from comb.methods.base import DecodeState, LinkRequest, Method, SegmentUse
from comb.methods.continuation import continue_tokens, why_not_continue
from comb.methods.past_state import PastState


@register("full")
class Full(Method):
    """Prefills head + documents + query on the plain backbone; a PICache holds a segment's token ids only."""

    unquantizable = "keeps token ids only"
    keeps_tokens_only = True

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        # token ids don't change with the weights, so taking it once is enough
        self._fingerprint = backbone_fingerprint(self.backbone)

    @property
    def fingerprint(self) -> str:
        return self._fingerprint

    @property
    def batches(self) -> bool:
        """Rows are padded, which not every model takes."""
        return takes_padded_rows(self.backbone)

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        return [token_picache(self.fingerprint, segment) for segment in segments]

    def link_batch(self, rows: Sequence[LinkRequest]) -> DecodeState:
        if len(rows) > 1 and not self.batches:
            raise NotImplementedError(
                f"rows of {type(self.backbone).__name__} change each other in a padded batch: link one row"
            )
        prompts, recomputed = [], []
        for row in rows:
            prompt, documents = inlined(row)
            self.check_prompt(documents, len(prompt) - documents)
            prompts.append(prompt)
            recomputed.append(documents)
        input_ids, attention_mask = self.tensors(prompts)
        return DecodeState(
            self.backbone,
            input_ids,
            attention_mask,
            past_key_values=continued_cache(self.backbone),
            recomputed=tuple(recomputed),
            uses=[[SegmentUse("inlined") for _ in row.picaches] for row in rows],
        )

    def why_not_continue(self) -> str:
        return why_not_continue(self.backbone)

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        return continue_inlined(self, past, row)


def continue_inlined(method: Method, past: PastState, row: LinkRequest) -> DecodeState:
    """`Method.continue_row` with documents as tokens of the prompt."""
    prompt, documents = inlined(row)
    method.check_prompt(documents, len(past.token_ids) + len(prompt) - documents)
    state = continue_tokens(method, past, prompt)
    state.recomputed = (documents,)
    state.uses = [[SegmentUse("inlined") for _ in row.picaches]]
    return state


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
