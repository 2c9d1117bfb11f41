"""From a request's body to what vLLM gets: documents are taken out, the prompt is built, a capability goes in."""

from __future__ import annotations

import asyncio
import copy
import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from comb.backbones.loading import load_config, resolve_name
from comb.backbones.tokenizer import load_tokenizer, tokenizer_fingerprint
from comb.cache.picache import content_key
from comb.cache.store import PICacheStore
from comb.documents.catalog import KeyedSegment
from comb.documents.document import Document, Prompt, PromptBuilder
from comb.documents.messages import References
from comb.model.config import CombConfig
from comb_serving.api.body import MAX_VALUES
from comb_serving.api.choice import INLINED, MethodChoice
from comb_serving.api.conversation import FIELD, messages_of, turns, with_names, without_references, written_out
from comb_serving.api.conversion import as_rendered, converted
from comb_serving.api.fields import (
    check_combinations,
    check_names,
    check_reserved,
    document_of,
    document_part,
    prompts_of,
    references_of,
    template_arguments,
)
from comb_serving.api.limits import LONG, check_characters, check_counts, check_length, check_tokens, texts_of
from comb_serving.api.registered import RegisteredDocuments
from comb_serving.api.request_error import RequestError
from comb_serving.api.routes import COMPLETIONS, RESPONSES
from comb_serving.config.serve_options import ServeOptions
from comb_serving.config.tenants import prefix_salt
from comb_serving.encoding.compiler import Loras, key_computed
from comb_serving.linking.methods import LinkMethod
from comb_serving.linking.plan import Range
from comb_serving.manager.counters import Counters
from comb_serving.manager.leases import Lease, TenantQuotaError, WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.manager.sightings import Sightings
from comb_serving.pool.capability import KEY, MARK, Capability, digest, pack

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Gone = Callable[[], bool]  # whether nobody waits for a result any more

LEAST_HEAD = 64  # tokens in front of documents that are worth being kept
PROMPT_IDS = "prompt_token_ids"  # in kv_transfer_params: vLLM takes these ids and renders no template


@dataclass(frozen=True)
class PreprocessedRequest:
    """A request on its way to vLLM.

    Args:
        body: what vLLM gets.
        method: that its documents are linked with; those that aren't stand in the prompt.
        about: the method as answers say it.
        segments: its documents, in order; a lease holds them if they are linked.
        prompts: token ids of the prompts, each with all documents; empty where vLLM renders the messages.
        spans: where documents are linked in the prompts, their places in each of them.
        unlinked: of a request without documents, whose segments were found: the body for where none is linked.
        kept: seconds that the client asks some of its documents to be kept, by their ids.
        lora: name of the LoRA that it is computed with. compiled_with: and its documents.
        head: of a hybrid, the beginning of its prompt that is worth being kept.
    """

    body: dict[str, Any]
    method: LinkMethod
    about: dict[str, Any]
    segments: tuple[KeyedSegment, ...] = ()
    prompts: tuple[list[int], ...] = ()
    spans: tuple[tuple[Range, ...], ...] = ()
    unlinked: dict[str, Any] | None = None
    kept: Mapping[str, float] = field(default_factory=dict)
    lora: str = ""
    compiled_with: str = ""
    head: WantedDocument | None = None

    @property
    def linked(self) -> bool:
        """Whether its documents come from the pool."""
        return bool(self.segments) and not self.method.full

    @property
    def plain(self) -> PreprocessedRequest:
        """Of a request whose segments were found, with none of them linked: as it came."""
        assert self.unlinked is not None
        return PreprocessedRequest(self.unlinked, self.method, self.about, lora=self.lora)

    @property
    def needs_capability(self) -> bool:
        """Whether it goes with a capability; without, vLLM computes what stands in the prompt."""
        return bool(self.spans) or self.salt.startswith(MARK)

    @property
    def salt(self) -> str:
        """Of the prefix cache; empty for none."""
        return self.body.get("cache_salt") or ""

    def signed(self, lease: Lease | None, request_id: str, secret: bytes) -> str:
        """The capability of this request; `lease` where its documents are linked."""
        head = None if lease is None else lease.head
        places = () if lease is None else tuple(pack([*([] if head is None else [head]), *lease.handles]))
        digests = tuple(map(digest, self.prompts))
        method = self.method.name if self.spans else ""
        found = self.unlinked is not None
        tokens = 0 if head is None else head.tokens
        stated = Capability(request_id, self.salt, places, digests, method, self.spans, found, self.lora, tokens)
        return stated.sign(secret)


@dataclass
class Preprocessor:
    """Documents and prompts of all tenants.

    Args:
        manager: of the pool; None where nothing is ever linked.
        choice: of methods.
        max_documents: that one tenant may register.
        chats: whether vLLM renders chats as `builder` does.
        max_tokens: of a prompt; None while the engine isn't known.
        sightings: of segments in prompts without documents; None where none are looked for.
        disk_path: where what is registered is kept beyond restarts; None where it isn't.
        share_loras: whether documents are compiled without a LoRA, once for all of them.

    Attributes:
        loras: vLLM's LoRAs, which a request chooses from by its `model`.

    Raises:
        ValueError: for a folder that can't be used.
    """

    builder: PromptBuilder
    manager: PICManager | None
    choice: MethodChoice
    max_documents: int = 10_000
    chats: bool = True
    max_tokens: int | None = None
    sightings: Sightings | None = None
    disk_path: str | None = None
    share_loras: bool = False
    loras: Loras = field(default_factory=Loras)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        if self.manager is not None:
            self.counters = self.manager.counters
        tokenizer = "" if self.disk_path is None else tokenizer_fingerprint(self.builder.tokenizer)
        # where nothing is compiled, a store that stays empty
        self.registered = RegisteredDocuments(self.manager or PICacheStore(), self.disk_path, tokenizer)
        self._longest = max(map(len, self.builder.tokenizer.get_vocab()))
        self._long_texts = ThreadPoolExecutor(1, "comb-long-texts")

    @cached_property
    def _long_builder(self) -> PromptBuilder:
        """With a tokenizer of its own, for the one thread that reads long texts."""
        return replace(self.builder, tokenizer=copy.deepcopy(self.builder.tokenizer))

    @property
    def linking(self) -> bool:
        """Whether documents are linked now; otherwise all are a part of the prompt like any other."""
        return not self.choice.current.full

    async def preprocess(self, path: str, body: dict[str, Any], tenant: str) -> PreprocessedRequest:
        """Takes documents out of a body and builds the prompt; nothing is encoded yet.

        Raises:
            RequestError: 400 or 404.
            EncoderError: if no encoder is there.
        """
        self.check(body)
        body = dict(body)
        given, asked = body.pop("documents", None), body.pop("comb", None)
        finds, method = self.choice.segments_of(asked := copy.copy(asked)), self.choice.of_request(asked)
        if self.choice.plain and body.get("prompt_logprobs") is not None:
            method = INLINED  # of every token: vLLM computes the prompt whole, with what stands in it
        linked, about = not method.full, self.choice.about(method)
        lora = self.loras.name_of(body) if self.choice.plain else ""  # an encoder's documents are the same for all
        compiled_with = "" if self.share_loras or not linked else lora
        if lora != compiled_with and linked:
            about["lora"] = "shared"
        body, written, kept = await self._written(path, body, tenant, linked)
        named = References() if path == COMPLETIONS else references_of(turns(path, body))
        if given in (None, []) and named == References():
            plain = PreprocessedRequest(salted(body, tenant), method, about, lora=lora, compiled_with=compiled_with)
            return await self._with_found(path, plain, tenant) if finds and linked else plain
        check_combinations(body)
        listed = await self.tokenize([] if given is None else given, tenant, linked)
        names = [name for name in (*named.before, *named.after) if name not in written]
        inside = written | dict(zip(names, self.registered.find(tenant, names), strict=True))
        before, after = ([inside[name] for name in names] for names in (named.before, named.after))
        segments = await self.loras.compiled_with(compiled_with, (*before, *listed, *after))
        if self.choice.plain:
            body = salted(body, tenant)
        else:
            body = salted(body, tenant, [segment.key for segment in segments] if linked else (), MARK)
        request = PreprocessedRequest(body, method, about, segments, kept=kept, lora=lora, compiled_with=compiled_with)
        build = partial(self._built, path, request, listed, named, inside)
        prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        room = None if self.max_tokens is None else self.max_tokens * prompts
        request = await self._aside(list(texts_of(body)), room, build)
        return await self._with_head(request, tenant) if linked else self.inlined(request)

    async def _with_head(self, request: PreprocessedRequest, tenant: str) -> PreprocessedRequest:
        """With the beginning of a hybrid's prompt, which no prefix cache keeps beside documents, where that is long."""
        start = request.spans[0][0][0] if len(request.spans) == 1 and request.spans[0] else 0
        if self.sightings is None or not request.method.states or start < LEAST_HEAD:
            return request
        ids = tuple(request.prompts[0][:start])
        try:
            (key,) = await self.keys([ids], tenant, True)
        except RequestError:  # longer than a document may be
            return request
        return replace(request, head=WantedDocument(key_computed(key, "exact"), ids, tenant, exact=True))

    def take_head(self, request: PreprocessedRequest, lease: Lease) -> None:
        """Adds the beginning of its prompt to a request's lease, if it is in the pool; notes it if it isn't."""
        if request.head is None:
            return
        assert self.manager is not None
        assert self.sightings is not None
        lease.take_head(self.manager.hold([request.head]))
        if lease.head is None:
            self.sightings.note(request.head)

    async def _written(
        self, path: str, body: dict[str, Any], tenant: str, linked: bool
    ) -> tuple[dict[str, Any], dict[str, KeyedSegment], dict[str, float]]:
        """Documents whose text stands in messages: the body with ids there, they by these, and which to keep."""
        parts = [] if path == COMPLETIONS else written_out(path, body)
        if not parts:
            return body, {}, {}
        read = [document_part(part, FIELD[path]) for part in parts]
        found = await self.tokenize([document for document, _ in read], tenant, linked)
        kept = {segment.id: ttl for segment, (_, ttl) in zip(found, read, strict=True) if ttl is not None}
        body = with_names(path, body, [segment.id for segment in found])
        return body, {segment.id: segment for segment in found}, kept

    def keep(self, request: PreprocessedRequest, tenant: str) -> None:
        """Registers and pins what a client has asked to be kept, whose lease it has; what has no room there isn't."""
        for segment in {segment.key: segment for segment in request.segments if segment.id in request.kept}.values():
            named = replace(segment, id=f"{segment.id}-{request.compiled_with}") if request.compiled_with else segment
            try:
                self.registered.keep(tenant, named, request.kept[segment.id], partial(self._check_kept, tenant))
            except TenantQuotaError as error:
                logger.info("a document is not kept: %s", error)

    def _check_kept(self, tenant: str, segment: KeyedSegment) -> None:
        assert self.manager is not None
        if len({*self.registered.of(tenant).ids(), segment.id}) > self.max_documents:
            raise TenantQuotaError(f"{self.max_documents} documents are registered")
        self.manager.check_pin(wanted(segment, tenant))

    async def _with_found(self, path: str, plain: PreprocessedRequest, tenant: str) -> PreprocessedRequest:
        """A request without documents, with the segments of its prompt; as it came where it has none.

        Whatever documents can't be combined with goes as it came, too, and what is wrong with it vLLM says.
        """
        assert self.sightings is not None
        finder = self.sightings.finder
        assert finder is not None

        def cut(builder: PromptBuilder, gone: Gone) -> tuple[PreprocessedRequest, list[Range]]:
            built = self._built(path, plain, [], References(), {}, builder, gone)
            return built, finder.find(built.prompts[0], tenant) if len(built.prompts) == 1 else []

        room = self.max_tokens
        try:
            check_combinations(plain.body)
            built, spans = await self._aside(list(texts_of(plain.body)), room, cut)
            segments = [tuple(built.prompts[0][start : start + tokens]) for start, tokens in spans]
            keys = await self.keys(segments, tenant, True)
            names = [f"segment-{key[:12]}" for key in keys]
            found = [KeyedSegment(*each) for each in zip(names, segments, keys, strict=True)]
            keyed = await self.loras.compiled_with(plain.compiled_with, found)
        except (RequestError, ValueError):
            return plain
        if not spans or (room is not None and len(built.prompts[0]) > room):
            return plain
        return replace(built, segments=keyed, spans=(tuple(spans),), unlinked=plain.body)

    def answering(self) -> AbstractContextManager[None]:
        """While a request is open, few segments are compiled that were found."""
        return nullcontext() if self.sightings is None else self.sightings.answering()

    def hold(self, request: PreprocessedRequest, tenant: str) -> tuple[PreprocessedRequest, Lease | None]:
        """What of a request's found segments is in the pool, leased; the others are noted. Nobody waits here."""
        assert self.manager is not None
        assert self.sightings is not None
        documents = [wanted(segment, tenant, request.compiled_with) for segment in request.segments]
        lease = self.manager.hold(documents)
        there = {document.key for document in lease.documents}
        for document in documents:
            self.counters.count_found(len(document.token_ids), linked=document.key in there)
            if document.key not in there:
                self.sightings.note(document)
        if not there:  # vLLM needn't render again what is the same
            return PreprocessedRequest(request.body, request.method, request.about, lora=request.lora), None
        kept = [place for place, segment in enumerate(request.segments) if segment.key in there]
        (spans,) = request.spans
        return replace(
            request,
            segments=tuple(request.segments[place] for place in kept),
            spans=(tuple(spans[place] for place in kept),),
        ), lease

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuses a body for its names and sizes alone, whatever it asks for. Raises RequestError (400)."""
        check_counts(body)
        check_names(body)
        if self.max_tokens is not None:
            check_characters(body, self.max_tokens, self._longest)

    async def _aside(
        self, texts: Sequence[str], tokens: int | None, work: Callable[[PromptBuilder, Gone], Result]
    ) -> Result:
        """What `work` makes of texts, in a thread; that ends soon when nobody waits for it any more.

        Long ones have a thread and a tokenizer of their own, so that nobody waits for them.

        Args:
            tokens: that there is room for.
        """
        left = threading.Event()
        long = sum(map(len, texts)) > LONG

        def run() -> Result:
            builder = self._long_builder if long else self.builder
            if long and tokens is not None:
                check_tokens(builder.tokenizer, texts, tokens, left.is_set)
            return work(builder, left.is_set)

        try:
            return await asyncio.get_running_loop().run_in_executor(self._long_texts if long else None, run)
        finally:
            left.set()

    def inlined(self, request: PreprocessedRequest) -> PreprocessedRequest:
        """The request, whose documents stand in its prompt, with none of them linked."""
        for segment in request.segments:
            self.counters.count("inlined", len(segment.token_ids))
        return replace(request, method=INLINED, about=self.choice.about(INLINED), spans=())

    async def tokenize(self, given: Any, tenant: str, linked: bool) -> list[KeyedSegment]:
        """The documents of a list as it stands in a body: texts, objects, or ids of registered ones."""
        if not isinstance(given, list):
            raise RequestError(400, f"documents is a list, not {type(given).__name__}", param="documents")
        named = [isinstance(item, Mapping) and set(item) == {"id"} for item in given]
        known = iter(
            self.registered.find(tenant, [item["id"] for item, by_id in zip(given, named, strict=True) if by_id])
        )
        fresh = [
            document_of(item, place) for place, (item, by_id) in enumerate(zip(given, named, strict=True)) if not by_id
        ]
        room = await self._room(fresh, linked)

        def segments(builder: PromptBuilder, gone: Gone) -> list[tuple[int, ...]]:
            return [builder.segment(document) for document in fresh if not gone()]

        texts = [document.text for document in fresh if document.text is not None]
        try:
            ids = await self._aside(texts, room, segments)
        except ValueError as error:
            raise RequestError(400, str(error), param="documents") from error
        if (self.choice.plain or not linked) and room is not None and (tokens := sum(map(len, ids))) > room:
            reason = f"the documents have {tokens} tokens, the model's context length is {room}"
            raise RequestError(400, reason, param="documents")
        keys = await self.keys(ids, tenant, linked)  # a registered document has one
        made = iter(
            KeyedSegment(document.name(key), tokens, key)
            for document, tokens, key in zip(fresh, ids, keys, strict=True)
        )
        return [next(known) if by_id else next(made) for by_id in named]

    async def _room(self, documents: Sequence[Document], linked: bool) -> int | None:
        """Tokens that documents may have together; None if nobody knows. Raises RequestError for longer texts."""
        one = room = self.max_tokens
        if self.manager is not None and linked:
            one = (await self.manager.encoders.identity()).max_document_tokens
            if not self.choice.plain:  # beside the prompt
                room = self.manager.layout.num_blocks * self.manager.layout.block_size
        sizes = [len(document.text or "") + len(document.title or "") for document in documents]
        if one is not None:
            check_length("a document", max(sizes, default=0), one, self._longest, "documents")
        if room is not None:
            check_length("the documents", sum(sizes), room, self._longest, "documents")
        return room

    async def keys(self, segments: Sequence[tuple[int, ...]], tenant: str, linked: bool) -> list[str]:
        """Content keys, all lengths and ids checked if they are to be linked. Raises RequestError."""
        if self.manager is None or not linked:
            return [content_key(ids, fingerprint="", method="inlined", dtype="", salt=tenant) for ids in segments]
        try:
            return await self.manager.keys(segments, tenant)
        except ValueError as error:
            raise RequestError(400, str(error), param="documents") from error

    async def acquire(self, segments: Sequence[KeyedSegment], tenant: str, lora: str = "") -> Lease:
        """A lease of documents that are compiled with a LoRA, or none. Raises what `PICManager.acquire` raises."""
        assert self.manager is not None
        check_pin = self.manager.check_pin
        lease = await self.manager.acquire([wanted(segment, tenant, lora) for segment in segments])
        self.registered.pin(tenant, segments, lambda segment: check_pin(wanted(segment, tenant)))
        return lease

    def quota(self, tenant: str) -> dict[str, Any]:
        """What a tenant has, and may have."""
        found = {"documents": {"used": len(self.registered.of(tenant).ids()), "limit": self.max_documents}}
        if self.manager is not None:
            layout, shares = self.manager.layout, (self.manager.held_share, self.manager.pinned_share)
            block = layout.block_size * layout.bytes_per_token
            for name, used, share in zip(
                ("bytes", "pinned_bytes"), self.manager.blocks_of(tenant), shares, strict=True
            ):
                found[name] = {"used": used * block, "limit": int(share * layout.num_blocks) * block}
        return found

    def builder_for(self, body: dict[str, Any], builder: PromptBuilder | None = None) -> PromptBuilder:
        """The builder with what a chat's body sets of its template. Raises RequestError."""
        return self.with_arguments(builder or self.builder, template_arguments(body))

    def with_arguments(self, builder: PromptBuilder, arguments: Mapping[str, Any]) -> PromptBuilder:
        """The builder with a request's arguments before the server's own, put together as vLLM does."""
        if usual := self.builder.chat_template_kwargs:
            arguments = {**usual, **{k: v for k, v in arguments.items() if v is not None and v != "auto"}}
        return replace(builder, chat_template_kwargs=arguments)

    def _built(
        self,
        path: str,
        request: PreprocessedRequest,
        listed: list[KeyedSegment],
        named: References,
        inside: dict[str, KeyedSegment],
        builder: PromptBuilder,
        gone: Gone,
    ) -> PreprocessedRequest:
        """The request with its prompts, in a body that vLLM takes."""
        if path == COMPLETIONS:
            return self._completion(request, builder, gone)
        if not self.chats:
            reason = "vLLM renders this model's chats in a way of its own: documents go with raw prompts"
            raise RequestError(400, reason, param="documents")
        messages, builder = messages_of(path, request.body), self.builder_for(request.body, builder)
        if messages is None:
            if not inside and not self._in_prompt(request):
                return request  # vLLM renders it
            messages, arguments = converted(path, request.body, builder)
            builder = self.with_arguments(builder, arguments)
        messages = as_rendered(messages, builder)
        if references_of(messages) != named:
            reason = "these messages don't keep their documents in place: put them into those of the user"
            raise RequestError(400, reason, param=FIELD[path])
        referenced = {name: [segment.token_ids] for name, segment in inside.items()}
        try:
            prompt = builder.build(messages, [segment.token_ids for segment in listed], referenced)
        except Exception as error:  # whatever a template raises over a user's messages is the messages' fault
            raise RequestError(400, f"the messages can't be rendered: {error}", param="messages") from error
        request = self._with_prompts(request, [prompt])
        (ids,) = request.prompts
        return replace(
            request, body={**without_references(path, request.body), "kv_transfer_params": {PROMPT_IDS: ids}}
        )

    def _completion(self, request: PreprocessedRequest, builder: PromptBuilder, gone: Gone) -> PreprocessedRequest:
        documents, prompts = [segment.token_ids for segment in request.segments], prompts_of(request.body.get("prompt"))
        special = request.body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise RequestError(400, "add_special_tokens is true or false", param="add_special_tokens")
        if (tokens := (len(prompts) - 1) * sum(map(len, documents))) > MAX_VALUES:
            reason = f"the documents of {len(prompts)} prompts have more than {tokens} tokens: ask in several requests"
            raise RequestError(400, reason, param="prompt")
        built = [self._complete(prompt, documents, builder, special) for prompt in prompts if not gone()]
        request = self._with_prompts(request, built)
        return replace(request, body={**request.body, "prompt": list(request.prompts)})

    def _complete(
        self, prompt: str | list[int], documents: Sequence[tuple[int, ...]], builder: PromptBuilder, special: bool
    ) -> Prompt:
        if isinstance(prompt, str):
            try:
                return builder.complete(prompt, documents, add_special_tokens=special)
            except ValueError as error:
                raise RequestError(400, str(error), param="prompt") from error
        starts = int(prompt[0] == self.builder.tokenizer.bos_token_id)
        return Prompt(tuple(prompt[:starts]), tuple(documents), tuple(prompt[starts:]))

    def _in_prompt(self, request: PreprocessedRequest) -> bool:
        return self.choice.plain or request.method.full

    def _with_prompts(self, request: PreprocessedRequest, built: Sequence[Prompt]) -> PreprocessedRequest:
        if not self._in_prompt(request):
            return replace(request, prompts=tuple(list(prompt.query) for prompt in built))
        return replace(
            request,
            prompts=tuple(list(prompt.flat) for prompt in built),
            spans=tuple(prompt.spans for prompt in built),
        )


def tokenizer_of(options: ServeOptions) -> Any:
    """The tokenizer that prompts and documents are made with: the checkpoint's."""
    checkpoint = resolve_name(options.model)
    if options.method is not None:
        return load_tokenizer(checkpoint)
    config = load_config(checkpoint, CombConfig)
    if options.backbone is not None:
        config.backbone_name_or_path = str(Path(resolve_name(options.backbone)))
    return load_tokenizer(checkpoint, SimpleNamespace(config=config))


def with_capability(path: str, body: dict[str, Any], token: str, request_id: str) -> dict[str, Any]:
    """The body with its capability, and the name of the request where that doesn't come from the header."""
    name = {"request_id": f"resp_{request_id}"} if path == RESPONSES else {}
    return {**body, **name, "vllm_xargs": {**(body.get("vllm_xargs") or {}), KEY: token}}


def salted(body: dict[str, Any], tenant: str, keys: Sequence[str] = (), mark: str = "") -> dict[str, Any]:
    """The body with the salt of its tenant and documents in place of the client's. Raises RequestError."""
    check_reserved(body)
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(400, f"cache_salt is a text, not {type(salt).__name__}", param="cache_salt")
    made = prefix_salt(tenant, keys, salt or None)
    return {**body, "cache_salt": f"{mark}{made or ''}"} if mark or made else body


def wanted(segment: KeyedSegment, tenant: str, lora: str = "") -> WantedDocument:
    """A document as the manager is asked for it."""
    return WantedDocument(segment.key, segment.token_ids, tenant, lora)
