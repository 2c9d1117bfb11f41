"""Prefix caching: exact reuse of the longest prompt prefix that was computed before, as serving engines do today.

A document is reused only behind the same tokens and the same documents in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from comb.backbones.forward import counted_passes
from comb.backbones.identity import exclusive, weights_fingerprint
from comb.cache.picache import PICache
from comb.hybrid.caches import run
from comb.methods.base import DecodeState, LinkRequest, Method, SegmentUse
from comb.methods.continuation import pass_size, why_not_continue
from comb.methods.full import continue_inlined, token_ids, token_picache, why_not_decoded
from comb.methods.past_state import PastState
from comb.methods.prefixes import Prefix, prefixes_of
from comb.methods.registry import register


@register("prefix")
class PrefixMethod(Method):
    """Reuses keys and values (and a hybrid's states) of what is in front + doc1 + ... + docN; gives what `full` gives.

    `compile` of a single segment keeps its token ids, for there is nothing position-independent to keep. `link`
    computes what no earlier prompt of the backbone has begun with, and keeps it (`comb.methods.prefixes`).

    Raises:
        ValueError: when the model's own forward pass doesn't go on from its cache as from the tokens in it, or its keys
            depend on the length of the prompt.
    """

    keeps_tokens_only = True
    unquantizable = "promises what full recompute gives, bit for bit"

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        reason = why_not_continue(self.backbone) or why_not_decoded(self.backbone)
        if reason:
            raise ValueError(f"method 'prefix' can't be used with this model: {reason}; use method='full'")

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.backbone)

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        fingerprint = self.fingerprint
        return [token_picache(fingerprint, segment) for segment in segments]

    def link_row(self, row: LinkRequest) -> DecodeState:
        segments, fresh = [token_ids(picache) for picache in row.picaches], row.fresh
        self.check_prompt(sum(map(len, segments)), sum(map(len, fresh)))
        # the last token is always computed anew: its logits are what decoding starts from
        head = list(row.head_ids) if segments or row.query_ids else []
        pieces = [gap + segment for gap, segment in zip([[], *fresh[1:-1]], segments, strict=False)]
        tail = fresh[-1] if segments or not head else list(row.query_ids)
        prompt = [*head, *chain.from_iterable(pieces), *tail]
        input_ids, attention_mask = self.tensors([prompt])
        state, uses = DecodeState(self.backbone, input_ids, attention_mask), list[SegmentUse]()
        with exclusive(self.backbone), counted_passes() as passed:
            found, known = Prefix(), prefixes_of(self.backbone)
            if head:
                found, state.head_tokens = known.find(self.backbone, head, row.salt)
            for piece in pieces if tail else pieces[:-1]:
                before = found.nbytes
                found, reused = known.find(self.backbone, [*found.token_ids, *piece], row.salt)
                nbytes = found.nbytes - before
                uses.append(SegmentUse("hit" if reused == len(found.token_ids) else "compiled", "device", nbytes))
            if found.token_ids:
                state.past_key_values = found.past(self.backbone, len(prompt)).cache
                state.step = pass_size(self.backbone)
                if state.step is not None:  # `generate` would take the rest of the prompt at once
                    start = len(found.token_ids)
                    run(self.backbone, prompt[start:-1], state.past_key_values, start, step=state.step)
            state.passed = passed.tokens
        uses += [SegmentUse("inlined")] * (len(segments) - len(uses))
        state.uses = [uses]
        anew = (len(ids) for ids, use in zip(segments, uses, strict=True) if use.state != "hit")
        state.recomputed = (sum(anew),)
        return state

    def why_not_continue(self) -> str:
        return why_not_continue(self.backbone)

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """As with `full`: prefixes are stored when a prompt is linked from its start."""
        return continue_inlined(self, past, row)
