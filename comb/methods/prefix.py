"""Prefix caching: exact reuse of the longest stored prompt prefix, as serving engines do today.

The backbone's keys and values of each document are kept under a key of *everything before and including it*, so a
document is reused only behind the same head and the same documents in the same order. Each entry holds the
document's own tokens only: a prompt of N documents costs N entries of one document each, not N prefixes. On a hybrid
backbone an entry also holds the states of the linear layers at its end. The head is the backbone's, as for all methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from comb.backbones.exclusive import exclusive
from comb.backbones.forward import counted_passes
from comb.backbones.identity import weights_fingerprint
from comb.cache.picache import PICache
from comb.cache.store import PICacheStore
from comb.hybrid.caches import run
from comb.methods.base import DecodeState, LinkRequest, Method, SegmentUse
from comb.methods.continuation import pass_size, why_not_continue
from comb.methods.exact_prefix import PrefixPieces, acquire_piece
from comb.methods.full import continue_inlined, token_ids, token_picache, why_not_decoded
from comb.methods.heads import head_cache_of
from comb.methods.past_state import PastState
from comb.methods.registry import register


@register("prefix")
class Prefix(Method):
    """Reuses keys and values of head + doc1 + ... + docN; gives what `full` gives.

    `compile` of a single segment keeps its token ids, for there is nothing position-independent to keep. `link`
    prefills what no stored prefix covers and stores it.

    Args:
        store: where documents are kept; a private one when not given.
        salt: separates tenants that must not share prefixes.

    Raises:
        ValueError: when the model's own forward pass doesn't go on from its cache as from the tokens in it, or its keys
            depend on the length of the prompt.
    """

    keeps_tokens_only = True
    needs_store = True
    unquantizable = "promises what full recompute gives, bit for bit"

    def __init__(self, model: Any, *, store: PICacheStore | None = None, salt: str = "", **parameters: Any) -> None:
        super().__init__(model, **parameters)
        reason = why_not_continue(self.backbone) or why_not_decoded(self.backbone)
        if reason:
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
        # the last token is always computed anew: its logits are what decoding starts from
        head = tuple(row.head_ids) if segments or row.query_ids else ()
        gaps = [[], *fresh[1:-1]]
        pieces = [gap + segment for gap, segment in zip(gaps, segments, strict=False)]
        prompt = [*head, *chain.from_iterable(pieces), *(fresh[-1] if segments or not head else row.query_ids)]
        input_ids, attention_mask = self.tensors([prompt])
        state = DecodeState(self.backbone, input_ids, attention_mask, uses=[[]])
        try:
            with exclusive(self.backbone), counted_passes() as passed:
                found = PrefixPieces()
                if head:
                    found, state.head_tokens = head_cache_of(self.backbone).find(self.backbone, head, self.salt)
                found = self._documents(found, pieces if fresh[-1] else pieces[:-1], state)
                self._go_on_from(found, prompt, state)
                state.passed = passed.tokens
        except BaseException:
            state.release()
            raise
        assert state.uses is not None
        state.uses[0] += [SegmentUse("inlined")] * (len(segments) - len(state.uses[0]))
        state.recomputed = (
            sum(len(segment) for segment, use in zip(segments, state.uses[0], strict=True) if use.state != "hit"),
        )
        return state

    def why_not_continue(self) -> str:
        return why_not_continue(self.backbone)

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """As with `full`: prefixes are stored when a prompt is linked from its start."""
        return continue_inlined(self, past, row)

    def _documents(self, found: PrefixPieces, pieces: Sequence[list[int]], state: DecodeState) -> PrefixPieces:
        """`found` and behind it every piece (fresh tokens + segment) in order, from the store or computed now."""
        assert state.uses is not None
        for piece in pieces:
            reference = acquire_piece(self.store, self.backbone, found, piece, self.salt)
            state.on_release.append(reference.release)
            found = found.and_then(piece, reference.picache)
            nbytes = reference.picache.nbytes
            state.uses[0].append(SegmentUse("hit" if reference.hit else "compiled", reference.tier, nbytes))
        return found

    def _go_on_from(self, found: PrefixPieces, prompt: Sequence[int], state: DecodeState) -> None:
        start = len(found.token_ids)
        if not start:
            return
        state.past_key_values = found.past(self.backbone, len(prompt)).cache
        state.step = pass_size(self.backbone)
        if state.step is not None:  # `generate` would take the rest of the prompt at once
            run(self.backbone, list(prompt[start:-1]), state.past_key_values, start, step=state.step)
