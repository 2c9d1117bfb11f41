"""From a request's body to what vLLM gets: documents out of it, handles into it."""

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
from comb.documents.document import Document, PromptBuilder, References, referenced_documents
from comb.model.config import CombConfig
from comb_serving.api.errors import RequestError
from comb_serving.config.options import ServeOptions
from comb_serving.config.tenants import prefix_salt
from comb_serving.manager.counters import Counters
from comb_serving.manager.leases import Lease, WantedDocument
from comb_serving.manager.manager import PICManager
from comb_serving.pool.handles import KEY, pack

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
PROMPT_IDS = "prompt_token_ids"  # in kv_transfer_params: vLLM takes these ids and renders no template
_FIELDS = {"id", "title", "text", "token_ids"}
# of apply_chat_template itself: not for a request to set
_RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"}
_RESERVED |= {"max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"}
_RESERVED |= {"tokenizer_kwargs", "tools", "truncation"}


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
class Prepared:
    """A request on its way to vLLM.

    Args:
        body: what vLLM gets.
        segments: its documents, in order; a lease holds them if `encoder`.
        encoder: whether documents are linked; otherwise they stand in the prompt.
        prompts: how many prompts the body holds, each with all documents.
        prompt_tokens: of all of them, without linked documents; None where vLLM renders the messages.
    """

    body: dict[str, Any]
    segments: tuple[KeyedSegment, ...] = ()
    encoder: bool = True
    prompts: int = 1
    prompt_tokens: int | None = None


@dataclass
class Front:
    """Documents and prompts of all tenants.

    Args:
        manager: of the pool; None where the encoder is off.
        max_documents: that one tenant may register.
        enabled: False puts all documents into the prompt from now on.
    """

    builder: PromptBuilder
    manager: PICManager | None
    max_documents: int = 100_000
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

    async def prepare(self, path: str, body: dict[str, Any], tenant: str) -> Prepared:
        """Takes documents out of a body and builds the prompt; nothing is encoded yet.

        Raises:
            RequestError: 400 or 404.
            EncoderError: if no encoder is there.
        """
        body = without_handles(body)
        given, switch = body.pop("documents", None), body.pop("comb", None)
        wanted = _wants_encoder(switch)
        salt = body.get("cache_salt")
        if salt is not None and not isinstance(salt, str):
            raise RequestError(400, f"cache_salt is a text, not {type(salt).__name__}", param="cache_salt")
        encoder = self.linking and wanted
        named = _references(body) if path == CHAT else References()
        if not given and named == References():
            _set_salt(body, prefix_salt(tenant, (), salt))
            return Prepared(body, encoder=encoder)
        listed = await self.tokenize(given or [], tenant, encoder)
        catalog = self.catalog(tenant)
        inside = {name: _registered(catalog, name) for name in (*named.before, *named.after)}
        before, after = ([inside[name] for name in names] for names in (named.before, named.after))
        segments = (*before, *listed, *after)
        _set_salt(body, prefix_salt(tenant, [segment.key for segment in segments] if encoder else (), salt))
        _check_combinations(body)
        if path == CHAT:
            prepared = await asyncio.to_thread(self._chat, body, segments, listed, inside, encoder)
        else:
            prepared = await asyncio.to_thread(self._completion, body, segments, encoder)
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
            fresh.append(_document(item, place))
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

    async def acquire(self, segments: Sequence[KeyedSegment]) -> Lease:
        """A lease of documents. Raises what `PICManager.acquire` raises."""
        assert self.manager is not None
        return await self.manager.acquire([WantedDocument(segment.key, segment.token_ids) for segment in segments])

    def builder_for(self, body: dict[str, Any]) -> PromptBuilder:
        """The builder with what a chat's body sets of its template. Raises RequestError."""
        return replace(self.builder, chat_template_kwargs=_template_arguments(body))

    def _chat(
        self,
        body: dict[str, Any],
        segments: tuple[KeyedSegment, ...],
        listed: list[KeyedSegment],
        inside: dict[str, KeyedSegment],
        encoder: bool,
    ) -> Prepared:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise RequestError(400, "messages is a list of objects with role and content", param="messages")
        tools = any(message.get("tool_calls") or message.get("content") is None for message in messages)
        if tools and encoder and not inside:
            return Prepared(body, segments, encoder)  # the builder has no rule for them; vLLM renders them itself
        builder = self.builder_for(body)
        referenced = {name: [segment.token_ids] for name, segment in inside.items()}
        try:
            prompt = builder.build(messages, [segment.token_ids for segment in listed], referenced)
        except Exception as error:  # whatever a template raises over a user's messages is the messages' fault
            raise RequestError(400, f"the messages can't be rendered: {error}", param="messages") from error
        ids = list(prompt.query if encoder else prompt.flat)
        body["messages"] = [{**message, "content": _text(message["content"])} for message in messages]
        transfer = body.get("kv_transfer_params") or {}
        if not isinstance(transfer, dict) or PROMPT_IDS in transfer:
            raise RequestError(400, "kv_transfer_params can't replace the prompt of documents", param="documents")
        body["kv_transfer_params"] = {**transfer, PROMPT_IDS: ids}
        return Prepared(body, segments, encoder, prompt_tokens=len(ids))

    def _completion(self, body: dict[str, Any], segments: tuple[KeyedSegment, ...], encoder: bool) -> Prepared:
        documents = [token for segment in segments for token in segment.token_ids]
        rows = [self._row(prompt, documents, encoder) for prompt in _prompts(body.get("prompt"))]
        body["prompt"] = rows
        return Prepared(body, segments, encoder, len(rows), sum(map(len, rows)))

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


def link(prepared: Prepared, lease: Lease) -> dict[str, Any]:
    """The body with the handles of its documents."""
    arguments = prepared.body.get("vllm_xargs") or {}
    if not isinstance(arguments, dict):
        raise RequestError(400, "vllm_xargs is an object", param="vllm_xargs")
    return {**prepared.body, "vllm_xargs": {**arguments, KEY: pack(lease.handles)}}


def without_handles(value: Any) -> Any:
    """`value` less every `KEY`, at any depth: a client that could send handles could read other tenants' documents.

    Raises:
        RequestError: 400 for what is nested too deeply to be looked through.
    """
    try:
        return _without_handles(value)
    except RecursionError:
        raise RequestError(400, "the body is nested too deeply") from None


def _without_handles(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_handles(item) for key, item in value.items() if key != KEY}
    return [_without_handles(item) for item in value] if isinstance(value, list) else value


def _wants_encoder(switch: Any) -> bool:
    if switch is None:
        return True
    if not isinstance(switch, dict) or set(switch) - {"encoder"} or not isinstance(switch.get("encoder", True), bool):
        raise RequestError(400, f'comb is an object like {{"encoder": true}}, not {str(switch)[:80]}', param="comb")
    return bool(switch.get("encoder", True))


def _set_salt(body: dict[str, Any], salt: str | None) -> None:
    if salt is not None:
        body["cache_salt"] = salt


def _references(body: dict[str, Any]) -> References:
    """The documents that messages name. Raises RequestError."""
    messages = body.get("messages")
    parts = [
        part
        for message in (messages if isinstance(messages, list) else ())
        if isinstance(message, dict) and isinstance(message.get("content"), list)
        for part in message["content"]
        if isinstance(part, dict) and part.get("type") == "document"
    ]
    if not parts:
        return References()
    if not all(isinstance(message, dict) for message in messages or ()):
        raise RequestError(400, "messages is a list of objects with role and content", param="messages")
    try:
        return referenced_documents(messages or ())
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error


def _check_combinations(body: dict[str, Any]) -> None:
    for name in ("echo", "prompt_embeds", "continue_final_message", "chat_template"):
        if body.get(name):
            raise RequestError(400, f"{name} can't be combined with documents", param=name)
    if body.get("add_generation_prompt", True) is not True:
        raise RequestError(400, "add_generation_prompt can't be false with documents", param="add_generation_prompt")


def _registered(catalog: DocumentCatalog, name: Any) -> KeyedSegment:
    if not isinstance(name, str):
        raise RequestError(400, f"a document's id is a text, not {type(name).__name__}", param="documents")
    try:
        return catalog.find([name])[0]
    except UnknownDocumentError:
        raise RequestError(
            404, f"unknown document {name!r}: add it with POST /v1/documents", param="documents"
        ) from None


def _document(item: Any, place: int) -> Document:
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, Mapping):
        raise RequestError(400, f"documents[{place}] is a text or an object, not {str(item)[:40]}", param="documents")
    unknown = sorted(set(item) - _FIELDS)
    if unknown:
        raise RequestError(
            400,
            f"documents[{place}] has the unknown field {unknown[0]!r}; there are {sorted(_FIELDS)}",
            param="documents",
        )
    for name in ("id", "title", "text"):
        if item.get(name) is not None and not isinstance(item[name], str):
            raise RequestError(400, f"documents[{place}].{name} is a text", param="documents")
    ids = item.get("token_ids")
    if ids is not None and not _is_ids(ids):
        raise RequestError(400, f"documents[{place}].token_ids is a list of integers", param="documents")
    try:
        return Document(item.get("text"), ids, item.get("id"), item.get("title"))
    except ValueError as error:
        raise RequestError(400, f"documents[{place}]: {error}", param="documents") from error


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def _prompts(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request, each a text or token ids."""
    rows = prompt if isinstance(prompt, list) and prompt and not _is_ids(prompt) else [prompt]
    if not all(isinstance(row, str) or (row and _is_ids(row)) for row in rows):
        raise RequestError(400, "prompt is a text, a list of token ids, or a list of either", param="prompt")
    return list(rows)


def _template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise RequestError(400, "chat_template_kwargs is an object", param="chat_template_kwargs")
    reserved = sorted(_RESERVED & set(arguments))
    if reserved:
        raise RequestError(400, f"chat_template_kwargs can't set {reserved[0]!r}", param="chat_template_kwargs")
    return arguments if body.get("tools") is None else {**arguments, "tools": body["tools"]}


def _text(content: Any) -> str:
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
