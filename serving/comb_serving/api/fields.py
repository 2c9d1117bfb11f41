"""What stands in a request's body for documents and prompts: read and checked, field by field.

Every function raises RequestError (400) that names the field.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from comb.documents.document import Document
from comb.documents.messages import References, referenced_documents
from comb_serving.api.errors import RequestError
from comb_serving.pool.handles import KEY

_FIELDS = {"id", "title", "text", "token_ids"}
# of apply_chat_template itself: not for a request to set
_RESERVED = {"add_generation_prompt", "chat_template", "continue_final_message", "conversation", "documents"}
_RESERVED |= {"max_length", "padding", "return_assistant_tokens_mask", "return_dict", "return_tensors", "tokenize"}
_RESERVED |= {"tokenizer_kwargs", "tools", "truncation"}


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


def wants_encoder(switch: Any) -> bool:
    """Whether the body's `comb` leaves the encoder on for this request."""
    if switch is None:
        return True
    if not isinstance(switch, dict) or set(switch) - {"encoder"} or not isinstance(switch.get("encoder", True), bool):
        raise RequestError(400, f'comb is an object like {{"encoder": true}}, not {str(switch)[:80]}', param="comb")
    return bool(switch.get("encoder", True))


def references_of(body: dict[str, Any]) -> References:
    """The documents that messages name."""
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


def check_combinations(body: dict[str, Any]) -> None:
    """Refuses what can't be combined with documents."""
    for name in ("echo", "prompt_embeds", "continue_final_message", "chat_template"):
        if body.get(name):
            raise RequestError(400, f"{name} can't be combined with documents", param=name)
    if body.get("add_generation_prompt", True) is not True:
        raise RequestError(400, "add_generation_prompt can't be false with documents", param="add_generation_prompt")


def document_of(item: Any, place: int) -> Document:
    """A text, or an object with the fields of a document."""
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


def prompts_of(prompt: Any) -> list[str | list[int]]:
    """The prompts of a completion request, each a text or token ids."""
    rows = prompt if isinstance(prompt, list) and prompt and not _is_ids(prompt) else [prompt]
    if not all(isinstance(row, str) or (row and _is_ids(row)) for row in rows):
        raise RequestError(400, "prompt is a text, a list of token ids, or a list of either", param="prompt")
    return list(rows)


def template_arguments(body: dict[str, Any]) -> dict[str, Any]:
    """What a body sets of its chat template, tools included."""
    arguments = body.get("chat_template_kwargs") or {}
    if not isinstance(arguments, dict):
        raise RequestError(400, "chat_template_kwargs is an object", param="chat_template_kwargs")
    reserved = sorted(_RESERVED & set(arguments))
    if reserved:
        raise RequestError(400, f"chat_template_kwargs can't set {reserved[0]!r}", param="chat_template_kwargs")
    return arguments if body.get("tools") is None else {**arguments, "tools": body["tools"]}


def text_of(content: Any) -> str:
    """A message's text, without what stands in it beside text."""
    return content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
