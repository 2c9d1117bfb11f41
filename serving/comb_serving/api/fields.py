"""What stands in a request's body for documents and prompts: how much of it there may be, and read field by field.

Sizes are looked at before anything is converted, rendered or tokenised; work is then linear in what the model could
read at all. Every function raises RequestError (400) that names the field.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from comb.documents.document import Document
from comb.documents.messages import References, referenced_documents
from comb.documents.rendering import TEMPLATE_RESERVED
from comb.locks import lock_of
from comb_serving.api.http import RequestError
from comb_serving.pool.capability import KEY

# ---- sizes ----

# of lists in a body; stop strings and bad words vLLM limits itself
MOST = {"documents": 4096, "messages": 10_000, "input": 10_000, "tools": 1024, "prompt": 1024, "items": 1024}
MOST_FIELDS = 1024
LONG = 100_000  # characters, which a tokenizer works on for a noticeable part of a second
_SLICE = 50_000

_PROMPTS = ("prompt", "items")  # each is a prompt or a list of prompts
_READ = ("messages", "input", "system", "instructions", "tools", "suffix", "query")
# of messages, what templates don't write out: media, seals, and short names
_UNREAD = {"image_url", "video_url", "audio_url", "input_audio", "image", "source", "signature", "encrypted_content"}
_SHORT, _SHORT_LENGTH = {"role", "type", "id", "call_id", "tool_call_id", "status"}, 64


def check_counts(body: Mapping[str, Any]) -> None:
    """Refuses more fields, items of lists or parts of messages than are served at once."""
    if len(body) > MOST_FIELDS:
        raise RequestError(400, f"the body has {len(body)} fields, at most {MOST_FIELDS} are taken")
    for name, most in MOST.items():
        found = body.get(name)
        if not isinstance(found, list) or (name in _PROMPTS and found and type(found[0]) is int):
            continue
        parts = [one["content"] for one in found if isinstance(one, dict) and isinstance(one.get("content"), list)]
        count = max(len(found), sum(map(len, parts)))
        if count > most:
            raise RequestError(400, f"{name} has {count} items, at most {most} are taken at once", param=name)


def check_characters(body: Mapping[str, Any], tokens: int, longest: int) -> None:
    """Refuses a text that has more characters than `tokens` tokens of `longest` characters."""
    for name in _READ:
        check_length(name, sum(map(len, texts_of(body.get(name)))), tokens, longest, name)
    for name in _PROMPTS:
        found = body.get(name)
        for text in found if isinstance(found, list) else [found]:
            check_length(name, len(text) if isinstance(text, str) else 0, tokens, longest, name)


def check_length(what: str, characters: int, tokens: int, longest: int, param: str) -> None:
    """Refuses more characters than so many tokens can have."""
    if characters > (most := tokens * longest):
        reason = f"{what} has {characters} characters, and {tokens} tokens, of which there is room for, at most {most}"
        raise RequestError(400, reason, param=param)


def check_tokens(tokenizer: Any, texts: Iterable[str], tokens: int, gone: Callable[[], bool]) -> None:
    """Counts tokens slice by slice, for who would otherwise tokenise a whole text that is far too long.

    Refused are twice as many as there is room for: a slice may have some more alone than in its place.
    """
    count = 0
    for text in texts:
        for start in range(0, len(text), _SLICE):
            if gone():
                return
            with lock_of(tokenizer):
                count += len(tokenizer.encode(text[start : start + _SLICE], add_special_tokens=False))
            if count > 2 * tokens:
                raise RequestError(400, f"the texts have more than {count} tokens, and there is room for {tokens}")


def texts_of(value: Any) -> Iterator[str]:
    """All texts inside of a JSON value that may become a part of a prompt."""
    left = [value]  # no recursion: a body may be nested as deep as it likes
    while left:
        found = left.pop()
        if isinstance(found, str):
            yield found
        elif isinstance(found, list):
            left += found
        elif isinstance(found, dict):
            for name, inner in found.items():
                short = name in _SHORT and isinstance(inner, str) and len(inner) <= _SHORT_LENGTH
                if name not in _UNREAD and not short:
                    left.append(inner)


# ---- fields ----

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
    for holder in (body, body.get("vllm_xargs"), sampling, inner):
        for name in _RESERVED_FOR_US:
            if isinstance(holder, dict) and holder.get(name) is not None:
                raise RequestError(400, f"{name} is not a field of requests", param=name)


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


def template_arguments(body: Mapping[str, Any]) -> dict[str, Any]:
    """What a chat's body sets of its template."""
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise RequestError(400, "chat_template_kwargs is an object", param="chat_template_kwargs")
    if reserved := sorted(TEMPLATE_RESERVED & set(arguments)):
        raise RequestError(400, f"chat_template_kwargs can't set {reserved[0]!r}", param="chat_template_kwargs")
    return arguments


def references_of(messages: Sequence[dict[str, Any]]) -> References:
    """The documents that messages name."""
    only = []
    for message in messages:
        parts = message["content"] if isinstance(message.get("content"), list) else []
        documents = [part for part in parts if isinstance(part, dict) and part.get("type") == "document"]
        only.append({**message, "content": documents})
    try:
        return referenced_documents(only)
    except ValueError as error:
        raise RequestError(400, str(error), param="messages") from error


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
    inner = {"text": data} if isinstance(data, str) else data
    if twice := sorted(name for name in inner if item.get(name) not in (None, inner[name])):
        raise refuse(f" has two of {twice[0]!r}, one in data and one beside it")
    found = {"data": None, **item, **inner}
    if unknown := sorted(set(found) - FIELDS):
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

    if unknown := sorted(part.keys() - {"type", "source", "title", "context", "citations", "cache_control"}):
        raise refuse(f"has no field {unknown[0]!r}")
    source, text = part["source"], None
    if isinstance(source, Mapping) and source.get("type") == "text":
        text = source.get("data")
    elif isinstance(source, Mapping) and source.get("type") == "content":
        text = source.get("content")
        if isinstance(text, list) and all(isinstance(each, Mapping) and each.get("type") == "text" for each in text):
            texts = [each.get("text") for each in text]
            text = "\n\n".join(map(str, texts)) if all(isinstance(each, str) for each in texts) else None
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
        if not isinstance(ttl, str) or ttl not in TTLS or control.get("type") != "ephemeral":
            raise refuse(f'has a cache_control {{"type": "ephemeral", "ttl": ...}}, ttl one of {", ".join(TTLS)}')
        kept = TTLS[ttl]
    whole = "\n\n".join(filter(None, (part.get("context"), text)))
    return {"text": whole, "title": part.get("title")}, kept


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request, each a text or token ids."""
    rows = prompt if isinstance(prompt, list) and prompt and not _is_ids(prompt) else [prompt]
    if not all(isinstance(row, str) or (row and _is_ids(row)) for row in rows):
        raise RequestError(400, "prompt is a text, a list of token ids, or a list of either", param="prompt")
    return list(rows)


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int and 0 <= token < 2**31 for token in value)
