"""From a request's body to what vLLM gets: documents are taken out, the prompt is built, a capability goes in."""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import logging
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

from comb.backbones.loading import load_config, resolve_name
from comb.backbones.tokenizer import load_tokenizer, tokenizer_fingerprint
from comb.cache.picache import compiled_key, content_key
from comb.cache.store import PICacheStore
from comb.documents.catalog import KeyedSegment
from comb.documents.document import Prompt, PromptBuilder
from comb.documents.messages import References
from comb.model.config import CombConfig
from comb_serving.api import conversation, fields
from comb_serving.api.choice import INLINED, MethodChoice
from comb_serving.api.http import MAX_VALUES, RequestError
from comb_serving.api.registered import RegisteredDocuments
from comb_serving.api.routes import COMPLETIONS, MESSAGES
from comb_serving.config.serve_options import ServeOptions
from comb_serving.encoding.compiler import Loras
from comb_serving.linking.methods import LinkMethod, Range
from comb_serving.manager.counters import Counters
from comb_serving.manager.leases import Lease, TenantQuotaError, WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.manager.sightings import Sightings
from comb_serving.pool.capability import MARK, Capability, digest, pack

logger = logging.getLogger(__name__)

Result = TypeVar("Result")
Gone = Callable[[], bool]  # whether nobody waits for a result any more

LEAST_PREFIX = 64  # tokens in front of documents that are worth being kept
PROMPT_IDS = "prompt_token_ids"  # in kv_transfer_params: vLLM takes these ids and renders no template


@dataclass(frozen=True)
class PreprocessedRequest:
    """A request on its way to vLLM."""

    body: dict[str, Any]  # what vLLM gets
    method: LinkMethod  # that its documents are linked with; those that aren't stand in the prompt
    about: dict[str, Any]  # the method as answers say it
    segments: tuple[KeyedSegment, ...] = ()  # its documents, in order; a lease holds them if they are linked
    prompts: tuple[list[int], ...] = ()  # token ids, each with all documents; empty where vLLM renders the messages
    spans: tuple[tuple[Range, ...], ...] = ()  # where documents are linked in the prompts: their places in each
    prefixes: tuple[int, ...] = ()  # with `exact_prefix`, how many of each prompt's first tokens read no documents
    prefix_salt: str = ""  # of the prefix cache for these tokens, which are the same whatever the documents
    unlinked: dict[str, Any] | None = None  # the body without any, of a request whose segments were found
    kept: Mapping[str, float] = field(default_factory=dict)  # seconds to keep documents that the client asks for, by id
    lora: str = ""  # name of the LoRA that it is computed with
    compiled_with: str = ""  # and its documents
    snapshot: WantedDocument | None = None  # of a hybrid, the beginning of its prompt that is worth being kept

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
    def salt(self) -> str:
        """Of the prefix cache; empty for none."""
        return self.body.get("cache_salt") or ""

    def signed(self, lease: Lease | None, request_id: str, secret: bytes) -> str:
        """The capability of this request; `lease` where its documents are linked."""
        snapshot, handles = (None, []) if lease is None else (lease.snapshot, lease.handles)
        stated = Capability(
            request_id,
            self.salt,
            tuple(pack([*([] if snapshot is None else [snapshot]), *handles])),
            tuple(map(digest, self.prompts)),
            self.method.name if self.spans else "",
            self.spans,
            self.unlinked is not None,
            self.lora,
            0 if snapshot is None else snapshot.tokens,
            self.prefixes,
            self.prefix_salt,
            secrets.token_hex(8),
        )
        return stated.sign(secret)


@dataclass
class Preprocessor:
    """Documents and prompts of all tenants. Raises ValueError for a folder that can't be used."""

    builder: PromptBuilder
    manager: PICManager | None  # of the pool; None where nothing is ever linked
    choice: MethodChoice
    max_documents: int = 10_000  # that one tenant may register
    chats: bool = True  # whether vLLM renders chats as `builder` does
    no_thinking: str = "none"  # the effort that disabled thinking is to vLLM's Messages API
    max_tokens: int | None = None  # of a prompt; None while the engine isn't known
    sightings: Sightings | None = None  # of segments in prompts without documents, if any are looked for
    disk_path: str | None = None  # where what is registered is kept beyond restarts, if it is
    share_loras: bool = False  # whether documents are compiled without a LoRA, once for all of them
    exact_prefix: bool = False  # whether what stands in front of an adapter's documents reads none (`CombConfig`)
    loras: Loras = field(default_factory=Loras)  # which a request chooses from by its `model`
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        if self.manager is not None:
            self.counters = self.manager.counters
        tokenizer = "" if self.disk_path is None else tokenizer_fingerprint(self.builder.tokenizer)
        # where nothing is compiled, a store that stays empty
        self.registered = RegisteredDocuments(self.manager or PICacheStore(), self.disk_path, tokenizer)
        self._longest = max(map(len, self.builder.tokenizer.get_vocab()))
        self._long_texts = ThreadPoolExecutor(1, "comb-long-texts")
        self._long_builder: PromptBuilder | None = None  # made at first use: a tokenizer's copy takes a while

    @property
    def linking(self) -> bool:
        """Whether documents are linked now; otherwise all are a part of the prompt like any other."""
        return not self.choice.current.full

    async def preprocess(self, path: str, body: dict[str, Any], tenant: str) -> PreprocessedRequest:
        """Takes documents out of a body and builds the prompt; encodes nothing. Raises RequestError, EncoderError."""
        self.check(body)
        body = dict(body)
        # whose keys and values are found: a salt from the client narrows that, as it narrows the prefix cache
        whose = salted(body, tenant)["cache_salt"] if body.get("cache_salt") else tenant
        given, (method, finds) = body.pop("documents", None), self.choice.of_request(body.pop("comb", None))
        if self.choice.plain and body.get("prompt_logprobs") is not None:
            method = INLINED  # of every token: vLLM computes the prompt whole, with what stands in it
        linked, about = not method.full, self.choice.about(method)
        lora = self.loras.name_of(body) if self.choice.plain else ""  # an encoder's documents are the same for all
        compiled_with = "" if self.share_loras or not linked else lora
        if lora != compiled_with and linked:
            about["lora"] = "shared"

        # documents whose text stands in messages get names there, as if they were registered
        inside, kept, named = dict[str, KeyedSegment](), dict[str, float](), References()
        if path != COMPLETIONS:
            if parts := conversation.written_out(path, body):
                read = [fields.document_part(part, conversation.FIELD[path]) for part in parts]
                written = await self.tokenize([document for document, _ in read], tenant, linked, whose)
                kept = {segment.id: ttl for segment, (_, ttl) in zip(written, read, strict=True) if ttl is not None}
                inside = {segment.id: segment for segment in written}
                left = iter([segment.id for segment in written])

                def name(part: dict[str, Any]) -> dict[str, Any]:
                    return {"type": "document", "id": next(left)} if "source" in part else part

                body = conversation.with_documents(path, body, name)
            named = fields.references_of(conversation.turns(path, body))
        if given in (None, []) and named == References():
            plain = PreprocessedRequest(salted(body, tenant), method, about, lora=lora, compiled_with=compiled_with)
            return await self._with_found(path, plain, whose) if finds and linked else plain

        fields.check_combinations(body)
        listed = await self.tokenize([] if given is None else given, tenant, linked, whose)
        names = [name for name in (*named.before, *named.after) if name not in inside]
        inside |= zip(names, self.registered.find(tenant, names), strict=True)
        before, after = ([inside[name] for name in names] for names in (named.before, named.after))
        segments = await self.loras.compiled_with(compiled_with, (*before, *listed, *after))
        of_tenant = salted(body, tenant)
        if self.choice.plain:
            body = of_tenant
        else:
            body = salted(body, tenant, [segment.key for segment in segments] if linked else (), MARK)
        request = PreprocessedRequest(
            body, method, about, segments, prefix_salt=of_tenant.get("cache_salt") or "", kept=kept, lora=lora,
            compiled_with=compiled_with,
        )  # fmt: skip
        build = partial(self._built, path, request, listed, named, inside)
        prompts = len(body["prompt"]) if isinstance(body.get("prompt"), list) else 1
        room = None if self.max_tokens is None else self.max_tokens * prompts
        request = await self._aside(list(fields.texts_of(body)), room, build)
        if not linked:
            return self.inlined(request)

        # of a hybrid, no prefix cache keeps the beginning of a prompt beside documents
        start = request.spans[0][0][0] if len(request.spans) == 1 and request.spans[0] else 0
        if self.sightings is None or not method.states or start < LEAST_PREFIX:
            return request
        ids = tuple(request.prompts[0][:start])
        try:
            (key,) = await self.keys([ids], whose)
        except RequestError:  # longer than a document may be
            return request
        return replace(request, snapshot=WantedDocument(compiled_key(key, "exact"), ids, tenant, exact=True))

    async def count(self, body: dict[str, Any], tenant: str) -> int | None:
        """Tokens of a message's prompt, and of the documents in it; None where there are none, and vLLM counts."""
        asked = {"max_tokens": 1, **body, "comb": {"segments": "off"}}  # as of one that is answered
        one = await self.preprocess(MESSAGES, asked, tenant)
        if not one.segments:
            return None
        beside = () if self.choice.plain or one.method.full else one.segments
        return len(one.prompts[0]) + sum(len(segment.token_ids) for segment in beside)

    async def _with_found(self, path: str, plain: PreprocessedRequest, whose: str) -> PreprocessedRequest:
        """A request without documents, with the segments of its prompt, which are `whose`; as it came without any.

        Whatever documents can't be combined with goes as it came, too, and what is wrong with it vLLM says.
        """
        assert self.sightings is not None
        finder, room = self.sightings.finder, self.max_tokens
        assert finder is not None

        if conversation.has_other_parts(path, plain.body):
            return plain

        def cut(builder: PromptBuilder, gone: Gone) -> tuple[PreprocessedRequest, list[Range]]:
            built = self.rendered(path, plain, builder, gone)
            return built, finder.find(built.prompts[0], whose) if len(built.prompts) == 1 else []

        try:
            built, spans = await self._aside(list(fields.texts_of(plain.body)), room, cut)
            segments = [tuple(built.prompts[0][start : start + tokens]) for start, tokens in spans]
            keys = await self.keys(segments, whose)
            found = [KeyedSegment(f"segment-{key[:12]}", ids, key) for ids, key in zip(segments, keys, strict=True)]
            keyed = await self.loras.compiled_with(plain.compiled_with, found)
        except (RequestError, ValueError):
            return plain
        if not spans or (room is not None and len(built.prompts[0]) > room):
            return plain
        return replace(built, segments=keyed, spans=(tuple(spans),), unlinked=plain.body)

    def rendered(
        self, path: str, plain: PreprocessedRequest, builder: PromptBuilder | None = None, gone: Gone = lambda: False
    ) -> PreprocessedRequest:
        """A request without documents, with its prompts as vLLM would make them. Raises RequestError, ValueError."""
        fields.check_combinations(plain.body)
        return self._built(path, plain, [], References(), {}, builder or self.builder, gone)

    def hold(self, request: PreprocessedRequest, tenant: str) -> tuple[PreprocessedRequest, Lease | None]:
        """What of a request's found segments is in the pool, leased; the others are noted. Nobody waits here."""
        assert self.manager is not None
        assert self.sightings is not None
        documents = [wanted(segment, tenant, request.compiled_with) for segment in request.segments]
        lease = self.manager.hold(documents)
        there = {document.key for document in lease.documents}
        for document in documents:
            if document.key not in there:
                self.counters.count_new(len(document.token_ids))
                self.sightings.note(document)
        if not there:
            return request.plain, None
        placed = zip(request.segments, *request.spans, strict=True)
        segments, spans = zip(*((segment, span) for segment, span in placed if segment.key in there), strict=True)
        return replace(request, segments=segments, spans=(spans,)), lease

    def check(self, body: Mapping[str, Any]) -> None:
        """Refuses a body for its names and sizes alone, whatever it asks for. Raises RequestError (400)."""
        fields.check_counts(body)
        fields.check_names(body)
        if self.max_tokens is not None:
            fields.check_characters(body, self.max_tokens, self._longest)

    async def _aside(
        self, texts: Sequence[str], tokens: int | None, work: Callable[[PromptBuilder, Gone], Result]
    ) -> Result:
        """What `work` makes of texts that have room for `tokens`, in a thread; it ends soon when nobody waits any more.

        Long ones have a thread and a tokenizer of their own, so that nobody waits for them.
        """
        left = threading.Event()
        long = sum(map(len, texts)) > fields.LONG

        def run() -> Result:
            if not long:
                return work(self.builder, left.is_set)
            builder = self._long_builder or replace(self.builder, tokenizer=copy.deepcopy(self.builder.tokenizer))
            self._long_builder = builder
            if tokens is not None:
                fields.check_tokens(builder.tokenizer, texts, tokens, left.is_set)
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

    async def tokenize(self, given: Any, tenant: str, linked: bool, whose: str | None = None) -> list[KeyedSegment]:
        """The documents of a list as it stands in a body: texts, objects, or ids of registered ones, which are the
        tenant's. `whose`: the others are, if not the tenant's."""
        if not isinstance(given, list):
            raise RequestError(400, f"documents is a list, not {type(given).__name__}", param="documents")
        named = [isinstance(item, Mapping) and set(item) == {"id"} for item in given]
        by_id = [item["id"] for item, is_named in zip(given, named, strict=True) if is_named]
        known = iter(self.registered.find(tenant, by_id))
        fresh = [fields.document_of(item, place) for place, item in enumerate(given) if not named[place]]

        # how many tokens there may be in one of them, and in all together; None if nobody knows
        one = room = self.max_tokens
        if self.manager is not None and linked:
            one = (await self.manager.encoders.identity()).max_document_tokens
            if not self.choice.plain:  # beside the prompt
                room = self.manager.layout.num_blocks * self.manager.layout.block_size
        sizes = [len(document.text or "") + len(document.title or "") for document in fresh]
        if one is not None:
            fields.check_length("a document", max(sizes, default=0), one, self._longest, "documents")
        if room is not None:
            fields.check_length("the text of all documents", sum(sizes), room, self._longest, "documents")

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
        keys = await self.keys(ids, tenant if whose is None else whose, linked)  # a registered document has one
        made = iter([KeyedSegment(fresh[at].name(key), ids[at], key) for at, key in enumerate(keys)])
        return [next(known) if is_named else next(made) for is_named in named]

    async def keys(self, segments: Sequence[tuple[int, ...]], tenant: str, linked: bool = True) -> list[str]:
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

    def leased(self, request: PreprocessedRequest, tenant: str, lease: Lease) -> None:
        """Keeps what the client has asked to be kept, and takes or notes the beginning of the request's prompt."""

        def check(segment: KeyedSegment) -> None:
            assert self.manager is not None
            if len({*self.registered.of(tenant).ids(), segment.id}) > self.max_documents:
                raise TenantQuotaError(f"{self.max_documents} documents are registered")
            self.manager.check_pin(wanted(segment, tenant))

        for segment in {segment.key: segment for segment in request.segments if segment.id in request.kept}.values():
            named = replace(segment, id=f"{segment.id}-{request.compiled_with}") if request.compiled_with else segment
            try:
                self.registered.keep(tenant, named, request.kept[segment.id], check)
            except TenantQuotaError as error:
                logger.info("a document is not kept: %s", error)
        if request.snapshot is not None:
            assert self.manager is not None
            assert self.sightings is not None
            beginning = self.manager.hold([request.snapshot])
            lease.give_back.append(beginning.release)
            lease.snapshot = next(iter(beginning.handles), None)
            if lease.snapshot is None:
                self.sightings.note(request.snapshot)

    def _with_arguments(self, builder: PromptBuilder, arguments: Mapping[str, Any]) -> PromptBuilder:
        """The builder with a request's arguments before the server's own, put together as vLLM does."""
        said = {name: value for name, value in arguments.items() if value is not None and value != "auto"}
        return replace(builder, chat_template_kwargs={**self.builder.chat_template_kwargs, **said})

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
        in_prompt = self.choice.plain or request.method.full  # where documents stand
        if path == COMPLETIONS:
            built = self._completions(request, builder, gone)
        else:
            if not self.chats:
                reason = "vLLM renders this model's chats in a way of its own: documents go with raw prompts"
                raise RequestError(400, reason, param="documents")
            messages, arguments = conversation.messages_of(path, request.body), fields.template_arguments(request.body)
            builder = self._with_arguments(builder, arguments)
            if messages is None:
                if not inside and not in_prompt and not self.exact_prefix:
                    return request  # vLLM renders it
                messages, arguments = conversation.converted(path, request.body, builder, self.no_thinking)
                builder = self._with_arguments(builder, arguments)
            messages = conversation.as_rendered(messages, builder)
            if fields.references_of(messages) != named:
                reason = "these messages don't keep their documents in place: put them into those of the user"
                raise RequestError(400, reason, param=conversation.FIELD[path])
            referenced = {name: [segment.token_ids] for name, segment in inside.items()}
            try:
                built = [builder.build(messages, [segment.token_ids for segment in listed], referenced)]
            except Exception as error:  # whatever a template raises over a user's messages is the messages' fault
                raise RequestError(400, f"the messages can't be rendered: {error}", param="messages") from error
        prompts = tuple(list(prompt.flat if in_prompt else prompt.bare) for prompt in built)
        if path == COMPLETIONS:
            body = {**request.body, "prompt": list(prompts)}
        else:
            given = {PROMPT_IDS: prompts[0]}
            body = {**conversation.beside_prompt(path, request.body), "kv_transfer_params": given}
        if in_prompt:
            return replace(request, body=body, prompts=prompts, spans=tuple(prompt.spans for prompt in built))
        # the last token always reads: what is asked about documents stands behind them
        lengths = [min(len(prompt.prefix), len(prompt.bare) - 1) for prompt in built] if self.exact_prefix else ()
        return replace(request, body=body, prompts=prompts, prefixes=tuple(lengths))

    def _completions(self, request: PreprocessedRequest, builder: PromptBuilder, gone: Gone) -> list[Prompt]:
        documents, given = [segment.token_ids for segment in request.segments], request.body.get("prompt")
        prompts, special = fields.prompts_of(given), request.body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise RequestError(400, "add_special_tokens is true or false", param="add_special_tokens")
        if (tokens := (len(prompts) - 1) * sum(map(len, documents))) > MAX_VALUES:
            reason = f"the documents of {len(prompts)} prompts have more than {tokens} tokens: ask in several requests"
            raise RequestError(400, reason, param="prompt")
        built = []
        for prompt in prompts:
            if gone():
                break
            if isinstance(prompt, str):
                try:
                    built.append(builder.complete(prompt, documents, add_special_tokens=special))
                except ValueError as error:
                    raise RequestError(400, str(error), param="prompt") from error
            else:
                starts = int(prompt[0] == self.builder.tokenizer.bos_token_id)
                built.append(Prompt(tuple(prompt[:starts]), tuple(documents), tuple(prompt[starts:])))
        return built


def tokenizer_of(options: ServeOptions) -> Any:
    """The tokenizer that prompts and documents are made with: the checkpoint's."""
    checkpoint = resolve_name(options.model)
    if options.method is not None:
        return load_tokenizer(checkpoint)
    config = load_config(checkpoint, CombConfig)
    if options.backbone is not None:
        config.backbone_name_or_path = str(Path(resolve_name(options.backbone)))
    return load_tokenizer(checkpoint, SimpleNamespace(config=config))


def salted(body: dict[str, Any], tenant: str, keys: Sequence[str] = (), mark: str = "") -> dict[str, Any]:
    """The body with the prefix cache's salt of its tenant and documents in place of the client's.

    The decoder's keys and values depend on the linked documents and their order, so these belong to it; a salt from the
    body can only narrow further, and is never passed on as it is. Raises RequestError.
    """
    fields.check_reserved(body)
    salt = body.get("cache_salt")
    if salt is not None and not isinstance(salt, str):
        raise RequestError(400, f"cache_salt is a text, not {type(salt).__name__}", param="cache_salt")
    made = ""
    if tenant or keys or salt:
        made = hashlib.sha256(json.dumps([tenant, list(keys), salt or None]).encode()).hexdigest()
    return {**body, "cache_salt": f"{mark}{made}"} if mark or made else body


def wanted(segment: KeyedSegment, tenant: str, lora: str = "") -> WantedDocument:
    return WantedDocument(segment.key, segment.token_ids, tenant, lora)
