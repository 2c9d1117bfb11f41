"""Methods that link decoder keys and values: documents compiled behind a front, some of their tokens computed again.

Compile: the backbone's keys and values of a document alone, or behind its front. Link: these at their places, with keys
turned there, and one pass over everything else and the document tokens that the method's rule chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from comb.backbones.attention_calls import watched
from comb.backbones.forward import StageTimes, counted_passes
from comb.backbones.identity import exclusive
from comb.backbones.rotary import settle
from comb.cache.picache import DecoderPICache, PICache
from comb.linking.cache import ScatterCache, Span, assemble, ordinary_cache
from comb.linking.masks import masked_attention
from comb.linking.passes import QueryAttention, compile_tokens, recompute, recompute_in_order
from comb.linking.support import LinkSupport, find_support
from comb.methods.base import LinkRequest
from comb.methods.decode_state import DecodeState, PastState
from comb.methods.fronts import FrontChoice, TakesFront
from comb.methods.prefix import behind_prefix
from comb.methods.registry import register
from comb.methods.selection import QueryLook, Rule

Function = TypeVar("Function", bound=Callable[..., list[int]])


@dataclass
class PromptLayout:
    """A prompt whose documents are linked, before anything of it is computed."""

    token_ids: Tensor  # [N], the whole prompt; document tokens among them
    spans: list[Span]  # of the documents, in order
    start: int  # tokens that the cache covered before, of the prefix or of an earlier turn
    end: int  # tokens that the cache is to hold; N, or less when the last ones are left for `generate`
    backbone: Any
    support: LinkSupport
    cache: ScatterCache  # keys and values of the first `end` tokens; zeros where they are still to be computed

    def run(self, rows: Sequence[int]) -> None:
        """One pass over the tokens at `rows` into `cache`, at once where the model takes that, else run by run."""
        positions, masks = torch.tensor(list(rows)), self.support.masks
        if masks is None:
            recompute_in_order(self.backbone, self.cache, self.token_ids, positions)
            return
        with masked_attention(self.backbone):
            with_last = self.support.positions.limit is not None
            recompute(self.backbone, self.cache, self.token_ids, positions, masks, with_last=with_last)


class Linked(TakesFront):
    """A front and a rule of selection (`comb.methods.selection`); what is registered has at least one of its own.

    Keys are rotated once, in float32, from where they were compiled to where they are linked.

    Args:
        front: what documents are compiled behind, a `comb.methods.fronts.FrontChoice`.
        rotate: False leaves keys at the positions of their own document.
        parameters: of the rule.

    Raises:
        ValueError: when the model's keys and values can't be moved; the message says why.
    """

    compile_name = "decoder"
    rule: ClassVar[Rule]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.positional = tuple(cls.rule.defaults)[:1]

    def __init__(self, model: Any, *, front: FrontChoice | None = None, rotate: bool = True, **parameters: Any) -> None:
        own = {name: parameters.pop(name) for name in self.rule.defaults if name in parameters}
        super().__init__(model, front=front, **parameters)
        if not isinstance(rotate, bool):
            raise ValueError(f"{self.name}:rotate is true or false, got {rotate!r}")
        self.rotate, self.parameters = rotate, self.rule.read(self.name, own)
        if self.rule.check is not None:
            self.rule.check(self)

    @classmethod
    def parameter_names(cls) -> list[str]:
        return [*cls.rule.defaults, "front", "rotate"]

    def check_model(self) -> None:
        _ = self.support

    @property
    def support(self) -> LinkSupport:
        """How this model is linked; asked anew when its weights, dtype or attention have changed."""
        return find_support(self.backbone)

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One DecoderPICache per segment, each from a forward pass of its own."""
        self.check_segments(segments)
        fingerprint = self.fingerprint
        with exclusive(self.backbone):
            front = self.front.compiled(self.backbone)
            return [compile_tokens(self.backbone, fingerprint, segment, front) for segment in segments]

    def link_row(self, row: LinkRequest, past: PastState | None = None) -> DecodeState:
        """One pass over gaps, query and the chosen document tokens, into the cached prefix and the re-rotated rest.

        The prompt's last token is left for ``generate``, whose first step gives its logits. When nothing but the query
        has to be computed (nothing is chosen), ``generate`` does all of it and there is no pass here.
        """
        picaches = self.owned(
            row, past, DecoderPICache,
            links="the decoder's keys and values", made_by="another model, dtype or method",
        )  # fmt: skip
        with exclusive(self.backbone), counted_passes() as passed:
            past, prefix_tokens, row = behind_prefix(self, row, past)
            if past is not None and not picaches:
                state = self.continue_tokens(past, row.fresh[-1])
            else:
                state = self._linked(row, picaches, past)
            state.passed, state.prefix_tokens = state.passed + passed.tokens, prefix_tokens
            return state

    def _linked(self, row: LinkRequest, picaches: Sequence[DecoderPICache], past: PastState | None) -> DecodeState:
        tokens: list[int] = [] if past is None else list(past.token_ids)
        start, spans, fresh = len(tokens), list[Span](), list[int]()
        for index, ids in enumerate(row.fresh):
            fresh += range(len(tokens), len(tokens) + len(ids))
            tokens += ids
            if index < len(picaches):
                spans.append(Span(len(tokens), picaches[index].num_tokens, first=not tokens))
                if (segment := picaches[index].token_ids) is None:
                    raise ValueError(
                        "this PICache holds no token ids, so its tokens can't be recomputed: compile the document again"
                    )
                tokens += segment.tolist()
        input_ids, attention_mask = self.tensors([tokens])
        times = StageTimes(input_ids.device)
        state = DecodeState(self.backbone, input_ids, attention_mask, seconds=times)
        if not picaches:
            return state

        support, behind_front = self.support, bool(self.front.token_ids)
        limit, last, documents_end = support.positions.limit, len(tokens) - 1, spans[-1].end
        if limit is not None:
            settle(self.backbone, len(tokens))
        beyond = limit is not None and len(tokens) > limit
        if behind_front or beyond:
            # compiled behind something, or with the frequencies of short prompts, also the first one differs here
            spans = [replace(span, first=False) for span in spans]
        chosen: list[int] | None = None
        if self.rule.from_places:
            chosen = self.rule.select(None, spans, behind_front, **self.parameters)
        elif all(span.first for span in spans):  # a document that begins the prompt was compiled in its place
            chosen = []
        # such embeddings look at the last position of a pass; and what a prompt ends with asks as much as the rest
        end = len(tokens) if beyond or self.rule.by_query else last
        if chosen == [] and not beyond and (not fresh or fresh[0] >= documents_end):  # only the query is computed
            end = min(last, documents_end)

        with times.timed("assemble"):
            cache = assemble(
                support.positions, picaches, spans, end=end, length=len(tokens),
                compiled_from=len(self.front.token_ids), rotate=self.rotate, device=input_ids.device,
                before=None if past is None else past.cache, start=start,
            )  # fmt: skip
        prompt = PromptLayout(torch.tensor(tokens), spans, start, end, self.backbone, support, cache)
        computed = [position for position in fresh if position < end]
        if chosen is None:
            with times.timed("select"):
                seen: QueryLook | PromptLayout = prompt
                if self.rule.by_query:  # one pass of the query, and of the fresh tokens in front of it
                    scores = QueryAttention(cache.rows, start=min(documents_end, last))
                    with watched(self.backbone, scores):
                        prompt.run(sorted({*computed, last}))  # a prompt may end with a document
                    seen = QueryLook(scores.paid, spans, behind_front)
                chosen = self.rule.select(seen, spans, behind_front, **self.parameters)
        chosen = [position for position in chosen if position < end]
        if rows := sorted({*chosen, *computed}):
            with times.timed("recompute"):
                prompt.run(rows)
        kept = min(end, last)
        if kept:
            layers = [(layer.keys, layer.values) for layer in cache.layers]
            state.past_key_values = ordinary_cache(self.backbone, layers, kept)
        # a prompt that ends with a document has its last token computed by `generate`
        state.recomputed = (len(chosen) + (documents_end == last + 1 and last not in chosen),)
        return state


def selects(name: str, **traits: Any) -> Callable[[Function], Function]:
    """Decorator that makes a function the rule of a method called `name`; `traits` are `Rule`'s."""

    def add(function: Function) -> Function:
        rule = replace(Rule.of(function), **traits)
        made = {"rule": rule, "__doc__": function.__doc__, "__module__": function.__module__}
        register(name)(type(function.__name__, (Linked,), made))
        return function

    return add
