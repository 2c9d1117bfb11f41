"""Methods that link decoder keys and values: documents compiled behind a front, some of their tokens computed again.

Compile: the backbone's keys and values of a document alone, or behind its front. Link: these at their places, with keys
turned there, and one pass over everything else and the document tokens that the method's rule chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from comb.backbones.attention_calls import watched
from comb.backbones.forward import StageTimes, counted_passes
from comb.backbones.identity import exclusive
from comb.backbones.rotary import compile_limit, why_length_dependent
from comb.cache.picache import DecoderPICache, PICache
from comb.linking.cache import ScatterCache, Span, assemble
from comb.linking.compile import compile_tokens
from comb.linking.masks import masked_attention
from comb.linking.passes import recompute, recompute_in_order
from comb.linking.positions import UnmovableError
from comb.linking.query_attention import QueryAttention
from comb.linking.support import LinkSupport, find_support
from comb.methods.base import DecodeState, LinkRequest, Method
from comb.methods.continuation import continue_tokens
from comb.methods.fronts import FrontChoice, TakesFront
from comb.methods.past_state import PastState
from comb.methods.prefixes import behind_prefix
from comb.methods.registry import register
from comb.methods.selection import QueryLook, Rule

P = TypeVar("P", bound=PICache)
Function = TypeVar("Function", bound=Callable[..., list[int]])


@dataclass
class PromptLayout:
    """One prompt on its way from PICaches to a cache that generation continues.

    Args:
        token_ids: [N], the whole prompt; document tokens among them.
        spans: of the documents, in order.
        fresh: sorted positions of everything that isn't a document: what is in front, between and behind them.
        end: tokens that the cache is to hold; N, or N - 1 when the last one is left for `generate`.
        backbone: the model. support: how it is linked. times: of what is done with it.
        behind_front: whether documents know themselves behind something.
        chosen: sorted positions of the document tokens to be computed again; None where a look has to say.
        past: what a cache covers already, of the prefix or of an earlier turn; None when there is none.
        cache: keys and values of the first `end` tokens; zeros where they are still to be computed.
    """

    token_ids: Tensor
    spans: list[Span]
    fresh: list[int]
    end: int
    backbone: Any
    support: LinkSupport
    times: StageTimes
    behind_front: bool = False
    chosen: list[int] | None = None
    past: PastState | None = None
    cache: ScatterCache = field(init=False)

    @property
    def start(self) -> int:
        """Tokens that `past` covers."""
        return 0 if self.past is None else len(self.past.token_ids)

    @property
    def fresh_rows(self) -> list[int]:
        """Fresh positions that the cache is to hold."""
        return [position for position in self.fresh if position < self.end]

    def run(self, rows: Sequence[int]) -> Tensor | None:
        """One pass over the tokens at `rows` into `cache`, at once where the model takes that, else run by run."""
        positions, masks = torch.tensor(list(rows)), self.support.masks
        if masks is None:
            return recompute_in_order(self.backbone, self.cache, self.token_ids, positions)
        with masked_attention(self.backbone):
            with_last = self.support.positions.limit is not None
            return recompute(self.backbone, self.cache, self.token_ids, positions, masks, with_last=with_last)

    def query_look(self) -> QueryLook:
        """One pass of the query, and of the fresh tokens in front of it, over what is linked."""
        last = len(self.token_ids) - 1
        scores = QueryAttention(self.cache.rows, start=min(self.spans[-1].end, last))
        with watched(self.backbone, scores):
            self.run(sorted({*self.fresh_rows, last}))  # a prompt may end with a document
        return QueryLook(scores.paid, self.spans, self.behind_front)


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
        with usable_with_model(self):
            _ = self.support

    @property
    def support(self) -> LinkSupport:
        """How this model is linked; asked anew when its weights, dtype or attention have changed."""
        return find_support(self.backbone)

    @property
    def max_segment_tokens(self) -> int | None:
        limit = compile_limit(self.backbone)
        return None if limit is None else limit - 1 - len(self.front.token_ids)

    def compile(self, segments: Sequence[Sequence[int]]) -> list[PICache]:
        """One DecoderPICache per segment, each from a forward pass of its own.

        Raises:
            ValueError: for an empty or over-long segment, or when the backbone computes NaN or infinity.
        """
        self.check_segments(segments)
        fingerprint = self.fingerprint
        with exclusive(self.backbone):
            front = self.front.compiled(self.backbone)
            return [compile_tokens(self.backbone, fingerprint, segment, front) for segment in segments]

    def why_not_continue(self) -> str:
        return why_length_dependent(self.backbone)

    def link_row(self, row: LinkRequest, past: PastState | None = None) -> DecodeState:
        """One pass over gaps, query and the chosen document tokens, into the cached prefix and the re-rotated rest.

        The prompt's last token is left for ``generate``, whose first step gives its logits. When nothing but the query
        has to be computed (nothing is chosen), ``generate`` does all of it and there is no pass here.
        """
        fingerprint = self.fingerprint
        picaches = [
            own_picache(
                self, picache, DecoderPICache, fingerprint,
                links="the decoder's keys and values", other="another model, dtype or method",
            )
            for picache in row.picaches
        ]  # fmt: skip
        self.check_row(row, past)
        with exclusive(self.backbone), counted_passes() as passed:
            past, head_tokens, row = behind_prefix(self, row, past)
            if past is not None and not picaches:
                state = continue_tokens(self, past, row.fresh[-1])
            else:
                state = self._linked(self._lay_out(row, picaches, past), picaches)
            state.passed, state.head_tokens = state.passed + passed.tokens, head_tokens
            return state

    def _linked(self, prompt: PromptLayout, picaches: Sequence[DecoderPICache]) -> DecodeState:
        input_ids, attention_mask = self.tensors([prompt.token_ids.tolist()])
        state = DecodeState(self.backbone, input_ids, attention_mask, seconds=prompt.times)
        if not picaches:
            return state
        with prompt.times.timed("assemble"):
            prompt.cache = assemble(
                prompt.support.positions, picaches, prompt.spans, end=prompt.end, length=len(prompt.token_ids),
                compiled_from=len(self.front.token_ids), rotate=self.rotate, device=input_ids.device,
                before=None if prompt.past is None else prompt.past.cache, start=prompt.start,
            )  # fmt: skip
        if prompt.chosen is None:
            with prompt.times.timed("select"):
                seen = prompt.query_look() if self.rule.by_query else prompt
                prompt.chosen = self.rule.select(seen, prompt.spans, prompt.behind_front, **self.parameters)
        chosen = [position for position in prompt.chosen if position < prompt.end]
        if rows := sorted({*chosen, *prompt.fresh_rows}):
            with prompt.times.timed("recompute"):
                prompt.run(rows)
        last = len(prompt.token_ids) - 1
        kept = min(prompt.end, last)
        state.past_key_values = prompt.cache.dynamic(self.backbone, kept) if kept else None
        # a prompt that ends with a document has its last token computed by `generate`
        state.recomputed = (len(chosen) + (prompt.spans[-1].end == last + 1 and last not in chosen),)
        return state

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
        support, behind_front = self.support, bool(self.front.token_ids)
        limit = support.positions.limit
        if behind_front or (limit is not None and len(tokens) > limit):
            # compiled behind something, or with the frequencies of short prompts, also the first one differs here
            spans = [replace(span, first=False) for span in spans]
        chosen = None
        if self.rule.from_places:
            chosen = self.rule.select(None, spans, behind_front, **self.parameters)
        elif all(span.first for span in spans):  # a document that begins the prompt was compiled in its place
            chosen = []
        times = StageTimes(self.backbone.get_input_embeddings().weight.device)
        prompt = PromptLayout(
            torch.tensor(tokens), spans, fresh, len(tokens) - 1, self.backbone, support, times, behind_front, chosen,
            past,
        )  # fmt: skip
        documents_end = spans[-1].end if spans else 0
        if limit is not None and len(tokens) > limit:
            prompt.end = len(tokens)  # such embeddings look at the last position of a pass
        elif chosen == [] and (not fresh or fresh[0] >= documents_end):
            prompt.end = min(prompt.end, documents_end)
        elif self.rule.by_query:  # what a prompt ends with asks as much as the rest
            prompt.end = len(tokens)
        return prompt


def selects(name: str, **traits: Any) -> Callable[[Function], Function]:
    """Decorator that makes a function the rule of a method called `name`; `traits` are `Rule`'s."""

    def add(function: Function) -> Function:
        rule = replace(Rule.of(function), **traits)
        made = {"rule": rule, "__doc__": function.__doc__, "__module__": function.__module__}
        register(name)(type(function.__name__, (Linked,), made))
        return function

    return add


def segment_ids(picache: DecoderPICache) -> list[int]:
    """The segment's token ids. Raises ValueError for a PICache made without them."""
    if picache.token_ids is None:
        raise ValueError(
            "this PICache holds no token ids, so its tokens can't be recomputed: compile the document again"
        )
    ids: list[int] = picache.token_ids.tolist()
    return ids


@contextmanager
def usable_with_model(method: Method) -> Iterator[None]:
    """Raises ValueError with a way out where the code inside finds that the model can't be linked."""
    try:
        yield
    except UnmovableError as reason:
        raise ValueError(
            f"method {method.name!r} can't be used with this model: {reason}; use method='full', or 'comb' with a "
            "trained encoder"
        ) from reason


def own_picache(method: Method, picache: PICache, kind: type[P], fingerprint: str, *, links: str, other: str) -> P:
    """`picache`, if it is the method's, whose `fingerprint` is given: to ask for it is a walk over the weights.

    Args:
        links: what a PICache of this `kind` holds, for the message.
        other: what may have compiled one with another fingerprint, for the message.

    Raises:
        ValueError: for a PICache of another method, model or dtype.
    """
    if not isinstance(picache, kind):
        raise ValueError(
            f"method {method.name!r} links {links}, got a {type(picache).__name__}: PICaches can't be linked by "
            "another method than the one that compiled them"
        )
    if picache.fingerprint != fingerprint:
        raise ValueError(
            f"this PICache was compiled by {other} (fingerprint {picache.fingerprint}, method {method.name!r} on this "
            f"model has {fingerprint}): compile the document again"
        )
    return picache
