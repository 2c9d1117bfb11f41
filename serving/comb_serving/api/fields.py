"""What stands in a request's body for documents and prompts: read and checked, field by field.

Every function raises RequestError (400) that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from comb.documents.document import Document
from comb.documents.messages import References, referenced_documents
from comb.documents.rendering import TEMPLATE_RESERVED
from comb_serving.api.request_error import RequestError
from comb_serving.pool.capability import KEY

# a document's text has other names elsewhere: Hugging Face's templates, Cohere's API
TEXTS = ("text", "contents", "snippet")
FIELDS = {"id", "title", "token_ids", "data", *TEXTS}
TTLS = {"5m": 300.0, "1h": 3600.0}  # of the Messages API's cache_control
# beams forget documents inside vLLM; answers in the background outlive their documents' places
_NOT_WITH_DOCUMENTS = [
    "echo", "prompt_embeds", "continue_final_message", "chat_template", "use_beam_search", "truncate_prompt_tokens",
    "truncation", "background", "previous_response_id", "previous_input_messages",
]  # fmt: skip
# places of documents, and of caches of other engines
_RESERVED_FOR_US = (KEY, "kv_transfer_params", "ec_transfer_params")

_OURS = ("documents", "comb")
_MEANT = {"doc": "documents", "docs": "documents"}


def check_names(body: Mapping[str, Any]) -> None:
    """Refuses what is probably meant for one of the server's own fields: vLLM would answer as if it weren't there."""
    for name in body:
        if len(name) > 2 * len("documents"):  # near nothing, and comparing is slow over a name of megabytes
            continue
        near = get_close_matches(name.lower(), _OURS, 1, 0.8) or [_MEANT.get(name.lower(), name)]
        if name not in _OURS and near[0] in _OURS:
            raise RequestError(400, f"unknown field {name!r}: the name is {near[0]!r}", param=name)
    if "extra_body" in body:
        advice = "an argument of client libraries, which send what is in it as fields of the body: put them there"
        raise RequestError(400, f"extra_body is {advice}", param="extra_body")
    for holder in ("vllm_xargs", "chat_template_kwargs"):
        inner = body.get(holder)
        for name in _OURS:
            if isinstance(inner, dict) and name in inner:
                raise RequestError(400, f"{name} is a field of the body itself, and not of {holder}", param=holder)


def check_reserved(body: dict[str, Any]) -> None:
    """Refuses what is the server's own to say, where vLLM would read it: what it reads is checked in the engine too."""
    sampling = body.get("sampling_params")
    inner = sampling.get("extra_args") if isinstance(sampling, dict) else None
    holders: list[Any] = [body, body.get("vllm_xargs"), sampling, inner]
    for holder in holders:
        for name in _RESERVED_FOR_US if isinstance(holder, dict) else ():
            if holder.get(name):
                raise RequestError(400, f"{name} is not a field of requests", param=name)


def references_of(messages: Sequence[dict[str, Any]]) -> References:
    """The documents that messages name. Raises RequestError for a malformed one."""

    def documents(content: Any) -> list[Any]:
        parts = content if isinstance(content, list) else []
        return [part for part in parts if isinstance(part, dict) and part.get("type") == "document"]

    try:
        return referenced_documents([{**message, "content": documents(message.get("content"))} for message in messages])
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error


def check_combinations(body: dict[str, Any]) -> None:
    """Refuses what can't be combined with documents, as it would go around the prompt that is built over them."""
    for name in _NOT_WITH_DOCUMENTS:
        if body.get(name) and body[name] != "disabled":
            raise RequestError(400, f"{name} can't be combined with documents", param=name)
    if body.get("add_generation_prompt", True) is not True:
        raise RequestError(400, "add_generation_prompt can't be false with documents", param="add_generation_prompt")
    if body.get("add_special_tokens", False) and "prompt" not in body:
        raise RequestError(400, "add_special_tokens can't be combined with documents", param="add_special_tokens")
    if body.get("vllm_xargs") is not None and not isinstance(body["vllm_xargs"], dict):
        raise RequestError(400, "vllm_xargs is an object", param="vllm_xargs")


def document_of(item: Any, place: int) -> Document:
    """A text, or an object with the fields of a document; what Cohere's API has in ``data`` is taken from there."""

    def refuse(reason: str) -> RequestError:
        return RequestError(400, f"documents[{place}]{reason}", param="documents")

    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, Mapping):
        raise refuse(f" is a text or an object, not {str(item)[:40]}")
    data = item.get("data", {})
    if not isinstance(data, str | Mapping):
        raise refuse(".data is a text or an object")
    found = {"data": None, **item, **({"text": data} if isinstance(data, str) else data)}
    unknown = sorted(set(found) - FIELDS)
    if unknown:
        raise refuse(f" has the unknown field {unknown[0]!r}; there are {sorted(FIELDS)}")
    for name in ("id", "title", *TEXTS):
        if found.get(name) is not None and not isinstance(found[name], str):
            raise refuse(f".{name} is a text")
    texts = [found[name] for name in TEXTS if found.get(name) is not None]
    if len(texts) > 1:
        raise refuse(f" has several texts: give one of {', '.join(TEXTS)}")
    ids = found.get("token_ids")
    if ids is not None and not _is_ids(ids):
        raise refuse(".token_ids is a list of integers")
    try:
        return Document(texts[0] if texts else None, ids, found.get("id"), found.get("title"))
    except ValueError as error:
        raise refuse(f": {error}") from error


def document_part(part: Mapping[str, Any], param: str) -> tuple[dict[str, Any], float | None]:
    """A document as the Messages API writes it, in the form of `document_of`, and the seconds that it is to be kept."""

    def refuse(reason: str) -> RequestError:
        return RequestError(400, f"a part of type document {reason}", param=param)

    unknown = sorted(part.keys() - {"type", "source", "title", "context", "citations", "cache_control"})
    if unknown:
        raise refuse(f"has no field {unknown[0]!r}")
    source = part["source"]
    text = None
    if isinstance(source, Mapping) and source.get("type") == "text":
        text = source.get("data")
    elif isinstance(source, Mapping) and source.get("type") == "content":
        content = source.get("content")
        text = content if isinstance(content, str) else _joined(content)
    if not isinstance(text, str) or not text:
        raise refuse(
            'has a source {"type": "text", "media_type": "text/plain", "data": ...} or {"type": "content", "content": '
            "...} of texts: files, PDF and addresses aren't read, send their text"
        )
    for name in ("title", "context"):
        if not isinstance(part.get(name) or "", str):
            raise refuse(f"has a {name} that is no text")
    if (citations := part.get("citations")) and (not isinstance(citations, Mapping) or citations.get("enabled")):
        raise refuse("can't have citations: no model here marks its sources. Leave them out, and ask it to quote")
    kept = None
    if (control := part.get("cache_control")) is not None:
        ttl = control.get("ttl", "5m") if isinstance(control, Mapping) else None
        if ttl not in TTLS or control.get("type") != "ephemeral":
            raise refuse(f'has a cache_control {{"type": "ephemeral", "ttl": ...}}, ttl one of {", ".join(TTLS)}')
        kept = TTLS[ttl]
    whole = "\n\n".join(filter(None, (part.get("context"), text)))
    return {"text": whole, "title": part.get("title")}, kept


def _joined(content: Any) -> str | None:
    """The text of a list of text parts; None for any other."""
    texts = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None
        for part in (content if isinstance(content, list) else [None])
    ]
    return "\n\n".join(map(str, texts)) if all(isinstance(text, str) for text in texts) else None


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request, each a text or token ids."""
    rows = prompt if isinstance(prompt, list) and prompt and not _is_ids(prompt) else [prompt]
    if not all(isinstance(row, str) or (row and _is_ids(row)) for row in rows):
        raise RequestError(400, "prompt is a text, a list of token ids, or a list of either", param="prompt")
    return list(rows)


def template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """What a body sets of its chat template by name."""
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise RequestError(400, "chat_template_kwargs is an object", param="chat_template_kwargs")
    reserved = sorted(TEMPLATE_RESERVED & set(arguments))
    if reserved:
        raise RequestError(400, f"chat_template_kwargs can't set {reserved[0]!r}", param="chat_template_kwargs")
    return arguments
