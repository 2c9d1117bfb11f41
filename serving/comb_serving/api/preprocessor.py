"""From a request's body to what vLLM gets: documents are taken out, the prompt is built, a capability goes in."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from comb.backbones.loading import resolve_name
from comb.backbones.tokenizer import load_tokenizer
from comb.cache.picache import content_key
from comb.documents.catalog import DocumentCatalog, KeyedSegment, UnknownDocumentError
from comb.documents.document import Document, PromptBuilder
from comb.documents.messages import References
from comb.model.config import CombConfig
from comb_serving.api.conversation import messages_of, turns, without_references
from comb_serving.api.errors import RequestError
from comb_serving.api.fields import (
    check_combinations,
    check_reserved,
    document_of,
    prompts_of,
    references_of,
    template_arguments,
    wants_encoder,
)
from comb_serving.api.routes import COMPLETIONS, DOCUMENTS, RESPONSES
from comb_serving.config.options import ServeOptions
from comb_serving.config.tenants import prefix_salt
from comb_serving.manager.counters import Counters
from comb_serving.manager.leases import Lease, WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.pool.capability import KEY, MARK, Capability, digest
from comb_serving.pool.handles import pack

PROMPT_IDS = "prompt_token_ids"  # in kv_transfer_params: vLLM takes these ids and renders no template


class NoStore:
    """The catalog's store where nothing is compiled."""

    def pin(self, key: str) -> bool:
        return False

    def unpin(self, key: str) -> bool:
        return False

    def set_expiry(self, key: str, ttl_s: float | None) -> bool:
        return False

    def remove(self, key: str) -> bool:
        return False


@dataclass(frozen=True)
class PreprocessedRequest:
    """A request on its way to vLLM.

    Args:
        body: what vLLM gets.
        segments: its documents, in order; a lease holds them if `encoder`.
        encoder: whether documents are linked; otherwise they stand in the prompt.
        prompts: token ids of the prompts, each with all documents; empty where vLLM renders the messages.
    """

    body: dict[str, Any]
    segments: tuple[KeyedSegment, ...] = ()
    encoder: bool = True
    prompts: tuple[list[int], ...] = ()

    def signed(self, lease: Lease | None, request_id: str, secret: bytes) -> str:
        """The capability of this request; `lease` where its documents are linked."""
        places = () if lease is None else tuple(pack(lease.handles))
        digests = tuple(map(digest, self.prompts))
        return Capability(request_id, self.body["cache_salt"], places, digests).sign(secret)


@dataclass
class Preprocessor:
    """Documents and prompts of all tenants.

    Args:
        manager: of the pool; None where the encoder is off.
        max_documents: that one tenant may register.
        enabled: False puts all documents into the prompt from now on.
    """

    builder: PromptBuilder
    manager: PICManager | None
    max_documents: int = 10_000
    enabled: bool = True
    catalogs: dict[str, DocumentCatalog] = field(default_factory=dict)
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        if self.manager is not None:
            self.counters = self.manager.counters

    @property
    def linking(self) -> bool:
        """Whether documents are encoded and linked; otherwise all go into the prompt."""
        return self.manager is not None and self.enabled

    def catalog(self, tenant: str, *, keep: bool = False) -> DocumentCatalog:
        """The documents that a tenant has registered; kept only where there are some, or will be."""
        catalog = self.catalogs.get(tenant) or DocumentCatalog(self.manager or NoStore())
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
        given, switch = body.pop("documents", None), body.pop("comb", None)
        wanted = wants_encoder(switch)
        encoder = self.linking and wanted
        named = References() if path == COMPLETIONS else references_of(turns(path, body))
        if not given and named == References():
            return PreprocessedRequest(salted(body, tenant), encoder=encoder)
        check_combinations(body)
        listed = await self.tokenize(given or [], tenant, encoder)
        catalog = self.catalog(tenant)
        inside = {name: _registered(catalog, name) for name in (*named.before, *named.after)}
        before, after = ([inside[name] for name in names] for names in (named.before, named.after))
        segments = (*before, *listed, *after)
        body = salted(body, tenant, [segment.key for segment in segments] if encoder else (), MARK)
        if path == COMPLETIONS:
            prepared = await asyncio.to_thread(self._completion, body, segments, encoder)
        else:
            prepared = await asyncio.to_thread(self._chat, path, body, segments, listed, inside, encoder)
        if not encoder:
            for segment in segments:
                self.counters.count("inlined", len(segment.token_ids))
        return prepared

    async def tokenize(self, given: Any, tenant: str, encoder: bool) -> list[KeyedSegment]:
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
        keys = await self.keys(ids, tenant, encoder)  # a registered document has one
        made = iter(
            KeyedSegment(document.name(key), tokens, key)
            for document, tokens, key in zip(fresh, ids, keys, strict=True)
        )
        return [next(made) if segment is None else segment for segment in segments]

    async def keys(self, segments: Sequence[tuple[int, ...]], tenant: str, encoder: bool) -> list[str]:
        """Content keys, all lengths and ids checked if the encoder is to take them. Raises RequestError."""
        if self.manager is None or not encoder:
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
        body: dict[str, Any],
        segments: tuple[KeyedSegment, ...],
        listed: list[KeyedSegment],
        inside: dict[str, KeyedSegment],
        encoder: bool,
    ) -> PreprocessedRequest:
        messages = messages_of(path, body)
        if messages is None:
            if inside or not encoder:
                raise RequestError(400, "tools and reasoning can't be combined with documents in the prompt")
            return PreprocessedRequest(body, segments, encoder)
        builder = self.builder_for(body)
        referenced = {name: [segment.token_ids] for name, segment in inside.items()}
        try:
            prompt = builder.build(messages, [segment.token_ids for segment in listed], referenced)
        except Exception as error:  # whatever a template raises over a user's messages is the messages' fault
            raise RequestError(400, f"the messages can't be rendered: {error}", param="messages") from error
        ids = list(prompt.query if encoder else prompt.flat)
        body = {**without_references(path, body), "kv_transfer_params": {PROMPT_IDS: ids}}
        return PreprocessedRequest(body, segments, encoder, (ids,))

    def _completion(
        self, body: dict[str, Any], segments: tuple[KeyedSegment, ...], encoder: bool
    ) -> PreprocessedRequest:
        documents = [token for segment in segments for token in segment.token_ids]
        rows = [self._row(prompt, documents, encoder) for prompt in prompts_of(body.get("prompt"))]
        return PreprocessedRequest({**body, "prompt": rows}, segments, encoder, tuple(rows))

    def _row(self, prompt: str | list[int], documents: list[int], encoder: bool) -> list[int]:
        try:
            if isinstance(prompt, str):
                built = self.builder.complete(prompt, [documents])
                return list(built.query if encoder else built.flat)
        except ValueError as error:
            raise RequestError(400, str(error), param="prompt") from error
        starts = int(prompt[0] == self.builder.tokenizer.bos_token_id)
        return prompt if encoder else [*prompt[:starts], *documents, *prompt[starts:]]


def tokenizer_of(options: ServeOptions) -> Any:
    """The tokenizer that prompts and documents are made with: the checkpoint's."""
    checkpoint = resolve_name(options.checkpoint)
    config = CombConfig.from_pretrained(checkpoint)
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


def _registered(catalog: DocumentCatalog, name: Any) -> KeyedSegment:
    if not isinstance(name, str):
        raise RequestError(400, f"a document's id is a text, not {type(name).__name__}", param="documents")
    try:
        return catalog.find([name])[0]
    except UnknownDocumentError:
        raise RequestError(404, f"unknown document {name!r}: add it with POST {DOCUMENTS}", param="documents") from None
