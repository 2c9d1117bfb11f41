"""What all training-free methods share: segments compile to the decoder's keys and values, and one pass links them.

A method of this family is a choice of document tokens to recompute: it overrides `Decoder.select`.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicCache

from comb.backbones.exclusive import exclusive
from comb.backbones.forward import run_decoder, takes_positions
from comb.backbones.identity import weights_fingerprint
from comb.cache.picache import DecoderPICache, PICache
from comb.linking.cache import ScatterCache, Span, assemble
from comb.linking.masks import masked_attention
from comb.linking.passes import recompute, recompute_in_order
from comb.linking.support import LinkSupport, find_support
from comb.methods.base import DecodeState, LinkRequest, Method
from comb.methods.checks import own_picache, usable_with_model
from comb.methods.continuation import continue_tokens
from comb.methods.past_state import PastState


@dataclass
class PromptLayout:
    """One prompt on its way from PICaches to a cache that generation continues.

    Args:
        token_ids: [N], the whole prompt; document tokens among them.
        spans: of the segments, in order.
        fresh: sorted positions of everything that isn't a document: head, gaps, query.
        end: tokens that the cache is to hold; N, or N - 1 when the last one is left for `generate`.
        support: how the model is linked.
        past: what the cache of an earlier turn covers already; None when the prompt is linked from its start.
    """

    token_ids: Tensor
    spans: list[Span]
    fresh: list[int]
    end: int
    support: LinkSupport
    past: PastState | None = None
    seconds: dict[str, float] = field(default_factory=dict)

    @property
    def start(self) -> int:
        """Tokens that `past` covers."""
        return 0 if self.past is None else len(self.past.token_ids)

    @property
    def fresh_rows(self) -> list[int]:
        """Fresh positions that the cache is to hold."""
        return [position for position in self.fresh if position < self.end]

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Adds the seconds spent inside to ``seconds[stage]``."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - start


class Decoder(Method):
    """Compile: the decoder's keys and values of a segment alone, from position zero. Link: see `link_row`.

    Keys are rotated once, in float32, from where they were compiled to where they are linked.

    Raises:
        ValueError: when the model's keys and values can't be moved; the message says why.
    """

    compile_name = "decoder"
    rotates = True
    """Whether keys are moved to their places."""

    def __init__(self, model: Any, **parameters: Any) -> None:
        super().__init__(model, **parameters)
        with usable_with_model(self):
            _ = self.support

    @property
    def support(self) -> LinkSupport:
        """How this model is linked; asked anew when its weights, dtype or attention have changed."""
        return find_support(self.backbone)

    @property
    def fingerprint(self) -> str:
        return weights_fingerprint(self.backbone)

    @property
    def max_segment_tokens(self) -> int | None:
        limits = [self.max_prompt_tokens, self.support.positions.max_segment_tokens]
        known = [limit for limit in limits if limit is not None]
        return min(known) - 1 - len(self.dummy_ids()) if known else None

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
        return [self._compile(fingerprint, list(segment)) for segment in segments]

    def _compile(self, fingerprint: str, segment: list[int]) -> PICache:
        before = self.dummy_ids()
        # without a configuration every layer keeps all its tokens, also those behind a sliding window
        cache = DynamicCache()
        ids = torch.tensor([[*before, *segment]])
        with exclusive(self.backbone):
            positions = torch.arange(ids.shape[1])[None] if takes_positions(self.backbone) else None
            run_decoder(self.backbone, ids, cache, attention_mask=torch.ones_like(ids), position_ids=positions)
        layers: list[Any] = cache.layers
        keys, values = ([getattr(layer, name)[0, :, len(before) :] for layer in layers] for name in ("keys", "values"))
        if not all(bool(torch.isfinite(tensor).all()) for tensor in (*keys, *values)):
            raise ValueError(
                f"the backbone gave NaN or infinite keys or values for a segment of {len(segment)} tokens: its "
                f"weights are damaged or overflow in {self.dtype}"
            )
        return DecoderPICache(fingerprint, tuple(keys), tuple(values), torch.tensor(segment))

    def dummy_ids(self) -> list[int]:
        """Tokens in front of a segment while it is compiled, whose keys and values are dropped."""
        return []

    def why_not_continue(self) -> str:
        if self.support.positions.length_dependent:
            return "its rotary embedding changes all keys with the length of the prompt"
        return ""

    def continue_row(self, past: PastState, row: LinkRequest) -> DecodeState:
        """`link_row` behind `past`, whose keys and values are copied; nothing in there is computed again."""
        if not row.picaches:
            fresh = row.fresh[-1]
            self.check_prompt(0, len(past.token_ids) + len(fresh))
            return continue_tokens(self, past, fresh)
        return self.link_row(row, past)

    def link_row(self, row: LinkRequest, past: PastState | None = None) -> DecodeState:
        """One pass over head, gaps, query and the selected document tokens, into the re-rotated cached rest.

        The prompt's last token is left for ``generate``, whose first step gives its logits. When nothing but the query
        has to be computed (no head, nothing selected), ``generate`` does all of it and there is no pass here.
        """
        fingerprint = self.fingerprint
        picaches = [self._own(picache, fingerprint) for picache in row.picaches]
        with exclusive(self.backbone):
            layout = self._lay_out(row, picaches, past)
            input_ids, attention_mask = self.tensors([layout.token_ids.tolist()])
            state = DecodeState(self.backbone, input_ids, attention_mask, seconds=layout.seconds)
            # another prompt may have left a rotary embedding with its own, longer reach
            state.prepare = functools.partial(layout.support.positions.settle, len(layout.token_ids))
            if not picaches:
                return state
            with layout.timed("assemble"):
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
        chosen = [position for position in self.select(layout.spans) if position < layout.end]
        rows = sorted({*chosen, *layout.fresh_rows})
        if rows:
            with layout.timed("recompute"):
                self.run(layout, cache, rows)
        return chosen

    def run(self, layout: PromptLayout, cache: ScatterCache, rows: Sequence[int]) -> Tensor | None:
        """One pass over `rows`, by the fast path where the model takes it, else in order."""
        positions = torch.tensor(list(rows))
        masks = layout.support.masks
        if masks is None:
            return recompute_in_order(self.backbone, cache, layout.token_ids, positions)
        with masked_attention(self.backbone):
            with_last = layout.support.positions.length_dependent
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
        documents = sum(span.length for span in spans)
        self.check_prompt(documents, len(tokens) - documents)
        support = self.support
        limit = support.positions.max_segment_tokens
        if limit is not None and len(tokens) > limit:
            # compiled with the frequencies of short prompts, also the first one differs in a long prompt
            spans = [replace(span, first=False) for span in spans]
        layout = PromptLayout(torch.tensor(tokens), spans, fresh, len(tokens) - 1, support, past)
        documents_end = spans[-1].end if spans else 0
        if self.recomputes_nothing(spans) and (not fresh or fresh[0] >= documents_end):
            layout.end = min(layout.end, documents_end)
        elif support.positions.length_dependent:
            layout.end = len(tokens)  # such embeddings look at the last position of a pass
        return layout

    def recomputes_nothing(self, spans: Sequence[Span]) -> bool:
        """Whether no document token will be recomputed."""
        return not self.select(spans)

    def assemble(self, layout: PromptLayout, picaches: Sequence[DecoderPICache]) -> ScatterCache:
        """All layers' keys and values [1, H, end, D]: cached ones moved to their places, zeros elsewhere."""
        return assemble(
            layout.support.positions, picaches, layout.spans,
            end=layout.end, length=len(layout.token_ids), compiled_from=len(self.dummy_ids()), rotate=self.rotates,
            device=self.backbone.get_input_embeddings().weight.device,
            before=None if layout.past is None else layout.past.cache, start=layout.start,
        )  # fmt: skip


def segment_ids(picache: DecoderPICache) -> list[int]:
    """The segment's token ids. Raises ValueError for a PICache made without them."""
    if picache.token_ids is None:
        raise ValueError(
            "this PICache holds no token ids, so its tokens can't be recomputed: compile the document again"
        )
    ids: list[int] = picache.token_ids.tolist()
    return ids
