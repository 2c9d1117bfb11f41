"""What requests of the engine want linked, and what the scheduler tells the workers of that in each step.

A `RequestLink` is read from a request's `Capability` once and kept beside it. Commands go through vLLM as the
connector's metadata; their `blocks` are a request's in vLLM's cache, from its first token on, for each of the model's
cache groups.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from comb_serving.linking.layout import LinkingLayout, LinkPlan, LoadedRange, interior
from comb_serving.linking.methods import LinkMethod, Range
from comb_serving.pool.capability import COMPILE, Capability, PoolHandle, name_of, unpack
from comb_serving.vllm.decoder_pool import token_of

Blocks = tuple[list[int], ...]


@dataclass
class RequestLink:
    """The documents of one request."""

    name: str  # of the request in the engine
    report: str  # name of its report to the front
    method: LinkMethod | None  # None for a request that compiles the one document that its prompt is
    spans: tuple[tuple[int, int], ...]  # where its documents are in the prompt, (start, tokens)
    handles: list[PoolHandle]  # where they are in the pool
    length: int  # of the prompt
    layout: LinkingLayout  # of the pool
    key: str = ""  # of the document of a request that compiles it, which is its salt in the prefix cache
    interior: Range | None = None  # of that document in its prompt, if its states are to be captured
    exact: int = 0  # tokens of its prompt that the prefix cache had when it came
    chosen: list[int] | None = None  # document tokens to be computed again, once the question's look has said
    snapshot: int = 0  # tokens of its prompt's exact beginning, which the first of `handles` is of

    def go_behind(self, exact: int) -> None:
        """Leaves the first tokens, which the prefix cache has as plain prompts left them, to it.

        A document that begins in there isn't linked: the few tokens of it behind the last whole block are computed.
        """
        kept = [(span, handle) for span, handle in zip(self.spans, self.handles, strict=True) if span[0] >= exact]
        self.spans, self.handles = tuple(span for span, _ in kept), [handle for _, handle in kept]
        self.__dict__.pop("plan", None)  # of all of the prompt still: what the cache has may be gone before it begins

    def choose(self, chosen: list[int]) -> None:
        """The question has looked."""
        self.chosen = chosen
        self.__dict__.pop("plan", None)

    @property
    def looks(self) -> bool:
        """Whether the question has still to look at the documents before anybody knows what is computed again."""
        if self.chosen is not None or self.method is None or not self.method.rule.by_query:
            return False
        return self.method.recomputed(self.spans) is None

    @cached_property
    def plan(self) -> LinkPlan:
        """Of the whole prompt; while it `looks`, nothing is chosen."""
        if self.method is None:  # what it is compiled behind is computed with it, unless it is given
            front = len(self.layout.front) if self.layout.given and not self.snapshot else 0
            return LinkPlan((LoadedRange(0, front, 0, 0),) if front else (), (), front)
        return self.layout.plan(self.method, self.length, self.spans, self.chosen or (), exact_first=self.snapshot > 0)

    def hash_extra(self, start: int, end: int) -> tuple[Any, ...]:
        """What belongs to the hash of tokens [start, end): which of them are loaded; nothing where none is.

        Which documents these are, their tokens say, which are in the hash anyway; it is chained, so that all behind
        something loaded is apart from what plain prompts have. What is computed in front of it is a plain prompt's.
        """
        if self.method is None:
            return ()
        if self.method.rule.by_query:  # what is computed again depends on the question behind: nobody else's
            return ("comb", self.name) if self.spans and end > self.spans[0][0] else ()
        behind = self.plan.loads[bisect_right(self.plan.loads, start, key=lambda load: load.end) :]
        touched = [
            (max(load.start, start) - start, min(load.end, end) - start, load.offset + max(0, start - load.start))
            for load in takewhile(lambda load: load.start < end, behind)
        ]
        return ("comb", self.method.compiled, *touched) if touched else ()


def link_of(request: Any, capability: Capability, layout: LinkingLayout, started: LinkMethod) -> RequestLink:
    """Of a request with this capability, which `check_request` has let pass, in an engine `started` with a method.

    Raises ValueError if its documents don't fit its prompt, its method or the pool.
    """
    prompt = request.prompt_token_ids
    if capability.lora != (lora := "" if request.lora_request is None else request.lora_request.lora_name):
        raise ValueError(f"its documents are for LoRA {capability.lora!r}, and it is computed with {lora!r}")
    if request.skip_reading_prefix_cache:  # for log-probabilities of the prompt: vLLM would compute what is linked
        raise ValueError("it has documents linked and all of its prompt computed")
    spans = capability.spans_in(prompt)
    handles = unpack(capability.documents, layout)
    if capability.snapshot and not started.states:
        raise ValueError(f"{started.name} finds what is in front of documents in vLLM's prefix cache")
    if capability.snapshot and capability.method != COMPILE:
        spans = ((0, capability.snapshot), *spans)
    if [handle.tokens for handle in handles] != [tokens for _, tokens in spans]:
        raise ValueError(f"{len(handles)} documents of {sum(h.tokens for h in handles)} tokens don't fit {spans}")
    method = None if capability.method == COMPILE else LinkMethod.parse(capability.method)
    if method is not None and method.rule.by_query and not started.rule.by_query:
        raise ValueError(f"{method.name} has to see what questions look at, which {started.name} doesn't")
    if method is not None and method.compiled != started.compiled:
        raise ValueError(f"documents here are compiled for {started.name}, and not for {method.name}")
    link = RequestLink(
        request.request_id, name_of(token_of(request)), method, spans, handles, len(prompt), layout, capability.salt,
        snapshot=capability.snapshot,
    )  # fmt: skip
    if method is None:
        if len(spans) != 1 or sum(spans[0]) != link.length:
            raise ValueError("a document is compiled at the end of its own prompt")
        if started.states and not link.snapshot:
            front, tokens = link.spans[0]
            kept = interior(tokens, layout.seams(started))
            link.interior = kept and (front + kept[0], front + kept[1])
    _ = link.plan  # spans that don't fit are found here
    return link


@dataclass(frozen=True)
class LoadCommand:
    """Before the step: tokens [start, end) of a request are those from `offset` on of a document."""

    handle: PoolHandle
    offset: int
    start: int
    end: int
    blocks: Blocks
    compiled: int  # the position of the document's first token when it was compiled


@dataclass(frozen=True)
class ComposeCommand:
    """Before the step: the states of a request's linear layers go from in front of an interior to behind it."""

    handle: PoolHandle
    tokens: int  # of the interior
    blocks: Blocks
    fresh: bool = False  # whether it is the prompt's beginning: there is no state in front of it


@dataclass(frozen=True)
class CaptureCommand:
    """After the step: of a document that is compiled, its interior begins here, or a part of it was computed."""

    handle: PoolHandle
    blocks: Blocks
    begins: bool  # what was computed ended where the interior begins
    ends: bool  # what was computed ended where the interior ends
    whole: bool = False  # it is a prompt's beginning, of which the state is kept as it is


@dataclass(frozen=True, eq=False)
class LookCommand:
    """In the step: tokens [start, end) of a request are its question's, and what they look at is added up."""

    name: str  # of the request
    start: int
    end: int
    blocks: Blocks
    length: int  # of its prompt
    spans: tuple[Range, ...]  # of its documents in there
    method: str  # that chooses by it


@dataclass(frozen=True)
class SaveCommand:
    """After the step: a request's tokens from `start` on are the document of this key."""

    key: str
    handle: PoolHandle
    start: int
    blocks: Blocks
    stateless: bool = False  # nothing was captured of it, as its seams cover it


@dataclass
class LinkingMetadata(KVConnectorMetadata):
    """A step's commands, in order."""

    loads: list[LoadCommand] = field(default_factory=list)
    composes: list[ComposeCommand] = field(default_factory=list)
    captures: list[CaptureCommand] = field(default_factory=list)
    saves: list[SaveCommand] = field(default_factory=list)
    looks: list[LookCommand] = field(default_factory=list)
    looking: tuple[str, ...] = ()  # requests whose questions are looking, in this step or not

    @property
    def before_step(self) -> bool:
        """Whether the worker has to have them before it computes: what it captures, it listens for."""
        return bool(self.loads or self.composes or self.captures or self.looks)


@dataclass
class ChosenTokens(KVConnectorWorkerMetadata):
    """What the workers answer to looks: by request, which of its document tokens are computed again."""

    positions: dict[str, list[int]]

    def aggregate(self, other: KVConnectorWorkerMetadata) -> KVConnectorWorkerMetadata:
        """All ranks have added up what all of them saw, and say the same."""
        return self
