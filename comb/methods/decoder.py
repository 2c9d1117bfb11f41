"""What all training-free methods share: segments compile to the decoder's keys and values, and one pass links them.

A method of this family is a choice of document tokens to recompute: it overrides `Decoder.select`, or is a `Looking`
where it has to look into the cache.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from comb.backbones.exclusive import exclusive
from comb.backbones.forward import counted_passes
from comb.backbones.identity import identity_of
from comb.backbones.rotary import compile_limit, why_length_dependent
from comb.backbones.stages import StageTimes
from comb.cache.picache import DecoderPICache, PICache
from comb.linking.cache import ScatterCache, Span, assemble
from comb.linking.compile import compile_tokens
from comb.linking.masks import masked_attention
from comb.linking.passes import recompute, recompute_in_order
from comb.linking.support import LinkSupport, find_support
from comb.methods.base import DecodeState, LinkRequest
from comb.methods.checks import check_share, own_picache, usable_with_model
from comb.methods.continuation import continue_tokens
from comb.methods.heads import behind_head
from comb.methods.past_state import PastState
from comb.methods.takes_primer import TakesPrimer


@dataclass
class PromptLayout:
    """One prompt on its way from PICaches to a cache that generation continues.

    Args:
        token_ids: [N], the whole prompt; document tokens among them.
        spans: of the segments, in order.
        fresh: sorted positions of everything that isn't a document: head, gaps, query.
        end: tokens that the cache is to hold; N, or N - 1 when the last one is left for `generate`.
        support: how the model is linked. times: of what is done with it.
        past: what a cache covers already, of the head or of an earlier turn; None when there is none.
    """

    token_ids: Tensor
    spans: list[Span]
    fresh: list[int]
    end: int
    support: LinkSupport
    times: StageTimes
    past: PastState | None = None

    @property
    def start(self) -> int:
        """Tokens that `past` covers."""
        return 0 if self.past is None else len(self.past.token_ids)

    @property
    def fresh_rows(self) -> list[int]:
        """Fresh positions that the cache is to hold."""
        return [position for position in self.fresh if position < self.end]


class Decoder(TakesPrimer):
    """Compile: the decoder's keys and values of a segment alone, from position zero. Link: see `link_row`.

    Keys are rotated once, in float32, from where they were compiled to where they are linked.

    Raises:
        ValueError: when the model's keys and values can't be moved; the message says why.
    """

    compile_name = "decoder"
    rotates = True
    """Whether keys are moved to their places."""
    with_last_token = False
    """Whether the prompt's last token is computed with the others, instead of being left for `generate` alone."""
    chooses_by_query = False
    """Whether another query has other document tokens recomputed."""
    exact_for_one = True
    """Whether one document at the start of a prompt is what it is in full recompute, unless there is a primer."""

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        if self.primer:
            self.exact_for_one = False

    def check_model(self) -> None:
        with usable_with_model(self):
            _ = self.support

    @property
    def support(self) -> LinkSupport:
        """How this model is linked; asked anew when its weights, dtype or attention have changed."""
        return find_support(self.backbone)

    @property
    def max_segment_tokens(self) -> int | None:
        limit = compile_limit(self.backbone)
        return None if limit is None else limit - 1 - self.compiled_from

    def select(self, spans: Sequence[Span]) -> list[int]:
        """Sorted positions of the document tokens to recompute; none unless a method says so."""
        return []

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One DecoderPICache per segment, each from a forward pass of its own.

        Raises:
            ValueError: for an empty or over-long segment, or when the backbone computes NaN or infinity.
        """
        self.check_segments(segments)
        fingerprint = self.fingerprint
        with exclusive(self.backbone):
            front = self.front()
            return [compile_tokens(self.backbone, fingerprint, segment, front) for segment in segments]

    def front(self) -> list[DecoderPICache]:
        """What segments are compiled behind, computed once for each state of the weights; nothing if they are alone.
        The caller holds the backbone's lock."""
        if not (ids := self.compiled_behind):
            return []
        kept: dict[str, DecoderPICache] = identity_of(self.backbone).fact(("front", tuple(ids)), dict)
        if not kept:  # a pass of this compile's, which is counted
            kept["front"] = compile_tokens(self.backbone, "", ids)
        return list(kept.values())

    @property
    def drops_front(self) -> bool:
        """Whether segments know themselves behind text that linked prompts don't have."""
        return bool(self.primer)

    @property
    def compiled_from(self) -> int:
        """Position of a segment's first token while it is compiled."""
        return len(self.compiled_behind)

    def why_not_continue(self) -> str:
        return why_length_dependent(self.backbone)

    def link_row(self, row: LinkRequest, past: PastState | None = None) -> DecodeState:
        """One pass over gaps, query and the selected document tokens, into the cached head and the re-rotated rest.

        The prompt's last token is left for ``generate``, whose first step gives its logits. When nothing but the query
        has to be computed (nothing is selected), ``generate`` does all of it and there is no pass here.
        """
        fingerprint = self.fingerprint
        picaches = [self._own(picache, fingerprint) for picache in row.picaches]
        self.check_row(row, past)
        with exclusive(self.backbone), counted_passes() as passed:
            past, head_tokens, row = behind_head(self, row, past)
            state = self._linked(row, picaches, past)
            state.passed, state.head_tokens = state.passed + passed.tokens, head_tokens
            return state

    def _linked(self, row: LinkRequest, picaches: Sequence[DecoderPICache], past: PastState | None) -> DecodeState:
        if past is not None and not picaches:
            return continue_tokens(self, past, row.fresh[-1])
        layout = self._lay_out(row, picaches, past)
        input_ids, attention_mask = self.tensors([layout.token_ids.tolist()])
        state = DecodeState(self.backbone, input_ids, attention_mask, seconds=layout.times)
        if not picaches:
            return state
        with layout.times.timed("assemble"):
            cache = self.assemble(layout, picaches)
        chosen = self.recompute(layout, cache)
        kept = min(layout.end, len(layout.token_ids) - 1)
        state.past_key_values = cache.dynamic(self.backbone, kept) if kept else None
        # a prompt that ends with a document has its last token computed by `generate`
        last = len(layout.token_ids) - 1
        state.recomputed = (len(chosen) + (layout.spans[-1].end == last + 1 and last not in chosen),)
        return state

    def recompute(self, layout: PromptLayout, cache: ScatterCache) -> list[int]:
        """Computes fresh and selected tokens; returns the positions of document tokens that were recomputed."""
        chosen = self.choose(layout, cache)
        if self._lacks_sink(layout.spans):
            chosen = sorted({0, *chosen})
        rows = sorted({*chosen, *layout.fresh_rows})
        if rows:
            with layout.times.timed("recompute"):
                self.run(layout, cache, rows)
        return chosen

    def choose(self, layout: PromptLayout, cache: ScatterCache) -> list[int]:
        """Sorted positions of the document tokens to recompute, of those that `cache` holds."""
        return [position for position in self.select(layout.spans) if position < layout.end]

    def run(self, layout: PromptLayout, cache: ScatterCache, rows: Sequence[int]) -> Tensor | None:
        """One pass over `rows`, by the fast path where the model takes it, else in order."""
        positions = torch.tensor(list(rows))
        masks = layout.support.masks
        if masks is None:
            return recompute_in_order(self.backbone, cache, layout.token_ids, positions)
        with masked_attention(self.backbone):
            with_last = layout.support.positions.limit is not None
            return recompute(self.backbone, cache, layout.token_ids, positions, masks, with_last=with_last)

    def _own(self, picache: PICache, fingerprint: str) -> DecoderPICache:
        return own_picache(
            self, picache, DecoderPICache, fingerprint,
            links="the decoder's keys and values", other="another model, dtype or method",
        )  # fmt: skip

    def _lay_out(self, row: LinkRequest, picaches: Sequence[DecoderPICache], past: PastState | None) -> PromptLayout:
        tokens: list[int] = [] if past is None else list(past.token_ids)
        spans: list[Span] = []
        fresh: list[int] = []
        for index, ids in enumerate(row.fresh):
            fresh += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
            if index < len(picaches):
                spans.append(Span(len(tokens), picaches[index].num_tokens, first=not tokens))
                tokens += segment_ids(picaches[index])
        support = self.support
        limit = support.positions.limit
        if self.primer or (limit is not None and len(tokens) > limit):
            # compiled behind a primer, or with the frequencies of short prompts, also the first one differs here
            spans = [replace(span, first=False) for span in spans]
        times = StageTimes(self.backbone.get_input_embeddings().weight.device)
        layout = PromptLayout(torch.tensor(tokens), spans, fresh, len(tokens) - 1, support, times, past)
        documents_end = spans[-1].end if spans else 0
        if limit is not None and len(tokens) > limit:
            layout.end = len(tokens)  # such embeddings look at the last position of a pass
        elif self.recomputes_nothing(spans) and (not fresh or fresh[0] >= documents_end):
            layout.end = min(layout.end, documents_end)
        elif self.with_last_token:
            layout.end = len(tokens)
        return layout

    def recomputes_nothing(self, spans: Sequence[Span]) -> bool:
        """Whether no document token will be recomputed."""
        return not self.select(spans) and not self._lacks_sink(spans)

    def _lacks_sink(self, spans: Sequence[Span]) -> bool:
        """Whether the prompt begins with a document that knows itself behind something that isn't there: its first
        token has to become the prompt's attention sink."""
        return self.drops_front and bool(spans) and spans[0].start == 0

    def assemble(self, layout: PromptLayout, picaches: Sequence[DecoderPICache]) -> ScatterCache:
        """All layers' keys and values [1, H, end, D]: cached ones moved to their places, zeros elsewhere."""
        return assemble(
            layout.support.positions, picaches, layout.spans,
            end=layout.end, length=len(layout.token_ids), compiled_from=self.compiled_from, rotate=self.rotates,
            device=self.backbone.get_input_embeddings().weight.device,
            before=None if layout.past is None else layout.past.cache, start=layout.start,
        )  # fmt: skip


class Looking(Decoder):
    """A share of the document tokens is recomputed, chosen by a look into the linked cache.

    A segment that begins the prompt was compiled in its place: it is right already.
    """

    positional = ("ratio",)

    def __init__(self, model: Any, *, ratio: float = 0.15, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        check_share(f"{self.name}:ratio", ratio)
        self.ratio = float(ratio)

    @abstractmethod
    def look(self, layout: PromptLayout, cache: ScatterCache) -> list[int]:
        """`choose`, for a prompt with segments that don't begin it."""

    def recomputes_nothing(self, spans: Sequence[Span]) -> bool:
        return all(span.first for span in spans)

    def choose(self, layout: PromptLayout, cache: ScatterCache) -> list[int]:
        if self.recomputes_nothing(layout.spans):
            return []
        with layout.times.timed("select"):
            return self.look(layout, cache)


def segment_ids(picache: DecoderPICache) -> list[int]:
    """The segment's token ids. Raises ValueError for a PICache made without them."""
    if picache.token_ids is None:
        raise ValueError(
            "this PICache holds no token ids, so its tokens can't be recomputed: compile the document again"
        )
    ids: list[int] = picache.token_ids.tolist()
    return ids
