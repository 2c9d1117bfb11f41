"""From a request's body to what vLLM gets: documents are taken out, the prompt is built, a capability goes in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoTokenizer

from comb.backbones.loading import resolve_name
from comb.backbones.tokenizer import load_tokenizer
from comb.cache.picache import content_key
from comb.cache.store import PICacheStore
from comb.documents.catalog import DocumentCatalog, KeyedSegment, UnknownDocumentError
from comb.documents.document import Document, Prompt, PromptBuilder, behind_first
from comb.documents.messages import References
from comb.model.config import CombConfig
from comb_serving.api.choice import INLINED, MethodChoice
from comb_serving.api.conversation import FIELD, messages_of, turns, without_references
from comb_serving.api.conversion import as_rendered, converted
from comb_serving.api.errors import RequestError
from comb_serving.api.fields import (
    check_combinations,
    check_reserved,
    document_of,
    prompts_of,
    references_of,
    template_arguments,
)
from comb_serving.api.routes import COMPLETIONS, DOCUMENTS, RESPONSES
from comb_serving.config.options import ServeOptions
from comb_serving.config.tenants import prefix_salt
from comb_serving.encoding.protocol import EncoderError
from comb_serving.linking.methods import LinkMethod
from comb_serving.linking.plan import Range
from comb_serving.manager.counters import Counters
from comb_serving.manager.leases import (
    DocumentsTooLargeError,
    Lease,
    PoolFullError,
    PoolPinnedError,
    TenantQuotaError,
    WantedDocument,
)
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import KEY, MARK, Capability, digest
from comb_serving.pool.handles import pack

PROMPT_IDS = "prompt_token_ids"  # in kv_transfer_params: vLLM takes these ids and renders no template

# why documents can't be linked; those that stand in the prompt anyway are computed with it then
NO_PLACE = (DocumentsTooLargeError, EncoderError, PoolFullError, PoolPinnedError, TenantQuotaError)


@dataclass(frozen=True)
class Placing:
    """Of an adapter whose documents have places in the prompt (`joint_attention`).

    Args:
        positions: that the backbone has.
        primer: whether documents know themselves behind one.
    """

    positions: int
    primer: bool

    def behind(self, prompt: Prompt) -> tuple[int, ...]:
        """How many of the prompt's own tokens stand in front of each document. Raises RequestError: too long."""
        if len(prompt.flat) >= self.positions:
            raise RequestError(
                400, f"prompt and documents have {len(prompt.flat)} tokens, and the model {self.positions} positions"
            )
        behind = prompt.placed_behind
        return behind_first(behind, len(prompt.query)) if self.primer else behind


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
        behind: of an adapter whose documents have places, how many tokens of each prompt stand in front of each.
        front: the salt of what stands in front of all of them.
    """

    body: dict[str, Any]
    method: LinkMethod
    about: dict[str, Any]
    segments: tuple[KeyedSegment, ...] = ()
    prompts: tuple[list[int], ...] = ()
    spans: tuple[tuple[Range, ...], ...] = ()
    behind: tuple[tuple[int, ...], ...] = ()
    front: str = ""

    @property
    def linked(self) -> bool:
        """Whether its documents come from the pool."""
        return bool(self.segments) and not self.method.full

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
        places = () if lease is None else tuple(pack(lease.handles))
        digests = tuple(map(digest, self.prompts))
        method = self.method.name if self.spans else ""
        stated = Capability(request_id, self.salt, places, digests, method, self.spans, self.behind, self.front)
        return stated.sign(secret)


@dataclass
class Preprocessor:
    """Documents and prompts of all tenants.

    Args:
        manager: of the pool; None where nothing is ever linked.
        choice: of methods.
        max_documents: that one tenant may register.
        placing: where an adapter's documents have places in the prompt, what is known of these.
        chats: whether vLLM renders chats as `builder` does.
    """

    builder: PromptBuilder
    manager: PICManager | None
    choice: MethodChoice
    max_documents: int = 10_000
    placing: Placing | None = None
    chats: bool = True
    catalogs: dict[str, DocumentCatalog] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        if self.manager is not None:
            self.counters = self.manager.counters

    @property
    def linking(self) -> bool:
        """Whether documents are linked now; otherwise all are a part of the prompt like any other."""
        return not self.choice.current.full

    def catalog(self, tenant: str, *, keep: bool = False) -> DocumentCatalog:
        """The documents that a tenant has registered; kept only where there are some, or will be."""
        # where nothing is compiled, a store that stays empty
        catalog = self.catalogs.get(tenant) or DocumentCatalog(self.manager or PICacheStore())
        if keep:
            self.catalogs[tenant] = catalog
        return catalog

    async def preprocess(self, path: str, body: dict[str, Any], tenant: str) -> PreprocessedRequest:
        """Takes documents out of a body and builds the prompt; nothing is encoded yet.

        Raises:
            RequestError: 400 or 404.
            EncoderError: if no encoder is there.
        """
        body = dict(body)
        given, method = body.pop("documents", None), self.choice.of_request(body.pop("comb", None))
        linked, about = not method.full, self.choice.about(method)
        named = References() if path == COMPLETIONS else references_of(turns(path, body))
        if not given and named == References():
            return PreprocessedRequest(salted(body, tenant), method, about)
        check_combinations(body)
        listed = await self.tokenize(given or [], tenant, linked)
        catalog = self.catalog(tenant)
        inside = {name: _registered(catalog, name) for name in (*named.before, *named.after)}
        before, after = ([inside[name] for name in names] for names in (named.before, named.after))
        segments = (*before, *listed, *after)
        front = ""
        if self.choice.plain:
            body = salted(body, tenant)
        else:
            front = salted(body, tenant).get("cache_salt") or ""
            body = salted(body, tenant, [segment.key for segment in segments] if linked else (), MARK)
        request = PreprocessedRequest(body, method, about, segments, front=front)
        if path == COMPLETIONS:
            request = await asyncio.to_thread(self._completion, request)
        else:
            request = await asyncio.to_thread(self._chat, path, request, listed, named, inside)
        return request if linked else self.inlined(request)

    def inlined(self, request: PreprocessedRequest) -> PreprocessedRequest:
        """The request, whose documents stand in its prompt, with none of them linked."""
        for segment in request.segments:
            self.counters.count("inlined", len(segment.token_ids))
        return replace(request, method=INLINED, about=self.choice.about(INLINED), spans=())

    async def tokenize(self, given: Any, tenant: str, linked: bool) -> list[KeyedSegment]:
        """The documents of a list as it stands in a body: texts, objects, or ids of registered ones."""
        if not isinstance(given, list):
            raise RequestError(400, f"documents is a list, not {type(given).__name__}", param="documents")
        catalog = self.catalog(tenant)
        segments: list[KeyedSegment | None] = []
        fresh: list[Document] = []
        for place, item in enumerate(given):
            if isinstance(item, Mapping) and set(item) == {"id"}:
                segments.append(_registered(catalog, item["id"]))
                continue
            segments.append(None)
            fresh.append(document_of(item, place))
        try:
            ids = await asyncio.to_thread(lambda: [self.builder.segment(document) for document in fresh])
        except ValueError as error:
            raise RequestError(400, str(error), param="documents") from error
        keys = await self.keys(ids, tenant, linked)  # a registered document has one
        made = iter(
            KeyedSegment(document.name(key), tokens, key)
            for document, tokens, key in zip(fresh, ids, keys, strict=True)
        )
        return [next(made) if segment is None else segment for segment in segments]

    async def keys(self, segments: Sequence[tuple[int, ...]], tenant: str, linked: bool) -> list[str]:
        """Content keys, all lengths and ids checked if they are to be linked. Raises RequestError."""
        if self.manager is None or not linked:
            return [content_key(ids, fingerprint="", method="inlined", dtype="", salt=tenant) for ids in segments]
        try:
            return await self.manager.keys(segments, tenant)
        except ValueError as error:
            raise RequestError(400, str(error), param="documents") from error

    async def acquire(self, segments: Sequence[KeyedSegment], tenant: str, *, pin: bool = False) -> Lease:
        """A lease of documents, which are to be pinned if `pin`. Raises what `PICManager.acquire` raises."""
        assert self.manager is not None
        wanted = [WantedDocument(segment.key, segment.token_ids, tenant) for segment in segments]
        for document in wanted if pin else ():
            self.manager.check_pin(document)
        return await self.manager.acquire(wanted)

    def quota(self, tenant: str) -> dict[str, Any]:
        """What a tenant has, and may have."""
        found = {"documents": {"used": len(self.catalog(tenant).ids()), "limit": self.max_documents}}
        if self.manager is not None:
            layout, shares = self.manager.layout, (self.manager.held_share, self.manager.pinned_share)
            block = layout.block_size * layout.bytes_per_token
            for name, used, share in zip(
                ("bytes", "pinned_bytes"), self.manager.blocks_of(tenant), shares, strict=True
            ):
                found[name] = {"used": used * block, "limit": int(share * layout.num_blocks) * block}
        return found

    def builder_for(self, body: dict[str, Any]) -> PromptBuilder:
        """The builder with what a chat's body sets of its template. Raises RequestError."""
        return replace(self.builder, chat_template_kwargs=template_arguments(body))

    def _chat(
        self,
        path: str,
        request: PreprocessedRequest,
        listed: list[KeyedSegment],
        named: References,
        inside: dict[str, KeyedSegment],
    ) -> PreprocessedRequest:
        if not self.chats:
            reason = (
                "vLLM renders this model's chats in a way of its own: documents go with raw prompts, to /v1/completions"
            )
            raise RequestError(400, reason, param="documents")
        messages, builder = messages_of(path, request.body), self.builder_for(request.body)
        if messages is None:
            if not inside and not self._in_prompt(request) and self.placing is None:
                return request  # vLLM renders it
            messages, arguments = converted(path, request.body, builder)
            builder = replace(builder, chat_template_kwargs=arguments)
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

    def _completion(self, request: PreprocessedRequest) -> PreprocessedRequest:
        documents = [segment.token_ids for segment in request.segments]
        special = request.body.get("add_special_tokens", True)
        if not isinstance(special, bool):
            raise RequestError(400, "add_special_tokens is true or false", param="add_special_tokens")
        built = [self._complete(prompt, documents, special) for prompt in prompts_of(request.body.get("prompt"))]
        request = self._with_prompts(request, built)
        return replace(request, body={**request.body, "prompt": list(request.prompts)})

    def _complete(self, prompt: str | list[int], documents: Sequence[tuple[int, ...]], special: bool) -> Prompt:
        if isinstance(prompt, str):
            try:
                return self.builder.complete(prompt, documents, add_special_tokens=special)
            except ValueError as error:
                raise RequestError(400, str(error), param="prompt") from error
        starts = int(prompt[0] == self.builder.tokenizer.bos_token_id)
        return Prompt(tuple(prompt[:starts]), tuple(documents), tuple(prompt[starts:]))

    def _in_prompt(self, request: PreprocessedRequest) -> bool:
        return self.choice.plain or request.method.full

    def _with_prompts(self, request: PreprocessedRequest, built: Sequence[Prompt]) -> PreprocessedRequest:
        if not self._in_prompt(request):
            request = replace(request, prompts=tuple(list(prompt.query) for prompt in built))
            if self.placing is not None:
                request = replace(request, behind=tuple(map(self.placing.behind, built)))
            return request
        return replace(
            request,
            prompts=tuple(list(prompt.flat) for prompt in built),
            spans=tuple(prompt.spans for prompt in built),
        )


def tokenizer_of(options: ServeOptions) -> Any:
    """The tokenizer that prompts and documents are made with: the checkpoint's."""
    checkpoint = resolve_name(options.model)
    if options.method is not None:
        return AutoTokenizer.from_pretrained(checkpoint)
    config = CombConfig.from_pretrained(checkpoint)
    if options.backbone is not None:
        config.backbone_name_or_path = str(Path(resolve_name(options.backbone)))
    return load_tokenizer(checkpoint, SimpleNamespace(config=config))


def placing_of(options: ServeOptions) -> Placing | None:
    """What is known of the places of the adapter's documents; None where they have none."""
    if options.method is not None:
        return None
    config = CombConfig.from_pretrained(resolve_name(options.checkpoint))
    encoder: Any = config.encoder_config
    if not encoder.joint_attention:
        return None
    return Placing(int(config.get_text_config().max_position_embeddings), bool(encoder.primer))


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


def _registered(catalog: DocumentCatalog, name: Any) -> KeyedSegment:
    if not isinstance(name, str):
        raise RequestError(400, f"a document's id is a text, not {type(name).__name__}", param="documents")
    try:
        return catalog.find([name])[0]
    except UnknownDocumentError:
        raise RequestError(404, f"unknown document {name!r}: add it with POST {DOCUMENTS}", param="documents") from None
