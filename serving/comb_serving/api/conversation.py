"""The ways in which clients write a conversation, as the chat messages that the prompt builder takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from comb_serving.api.request_error import RequestError
from comb_serving.api.routes import CHAT, MESSAGES, RESPONSES

FIELD = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages"}  # where each has its turns
_TEXTS = ("text", "input_text", "output_text")
# what vLLM has rules for: it renders such bodies itself, or converts them for prompts with documents (`conversion`)
_VLLM_CONVERTS = {
    CHAT: ("tools", "reasoning_effort"), RESPONSES: ("tools", "reasoning"),
    MESSAGES: ("tools", "thinking", "output_config"),
}  # fmt: skip


def turns(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The messages as the body has them, in a list of their own. Raises RequestError."""
    name = FIELD[path]
    found = body.get(name)
    if path == RESPONSES and isinstance(found, str):
        found = [{"role": "user", "content": found}]
    if not isinstance(found, list) or not all(isinstance(turn, dict) for turn in found):
        raise RequestError(400, f"{name} is a list of objects with role and content", param=name)
    return found


def messages_of(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """All messages, with system texts; None where vLLM has to convert them (tools, reasoning). Raises RequestError."""
    found = turns(path, body)
    # of Messages' system texts and Responses' answers in parts, vLLM keeps some
    chosen = any(
        turn.get("role") == {MESSAGES: "system", RESPONSES: "assistant"}.get(path)
        and (path == MESSAGES or isinstance(turn.get("content"), list))
        for turn in found
    )
    if chosen or any(body.get(name) for name in _VLLM_CONVERTS[path]) or not all(map(_is_plain, found)):
        return None
    system = _system(path, body)
    return [*system, *({**turn, "content": parts_of(turn["content"])} for turn in found)]


def written_out(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of type document whose text stands in them, as the Messages API has it, in order. Raises RequestError.

    Those in answers of tools are refused: vLLM would leave them out.
    """
    parts = [
        part
        for turn in turns(path, body)
        for part in (turn["content"] if isinstance(turn.get("content"), list) else ())
        if isinstance(part, dict)
    ]
    for part in parts:
        answer = part.get("content") if part.get("type") == "tool_result" else None
        for inner in answer if isinstance(answer, list) else ():
            if isinstance(inner, dict) and inner.get("type") in ("document", "search_result"):
                reason = "documents in a tool's answer aren't read: write their text, or put them beside it"
                raise RequestError(400, reason, param=FIELD[path])
    return [part for part in parts if _is_written_out(part)]


def with_names(path: str, body: dict[str, Any], names: Sequence[str]) -> dict[str, Any]:
    """The body with references by these names in place of the documents that `written_out` finds."""
    left = iter(names)

    made = [
        {
            **turn,
            "content": [
                {"type": "document", "id": next(left)} if _is_written_out(part) else part for part in turn["content"]
            ],
        }
        if isinstance(turn.get("content"), list)
        else turn
        for turn in turns(path, body)
    ]
    return {**body, FIELD[path]: made}


def _is_written_out(part: Any) -> bool:
    return isinstance(part, dict) and part.get("type") == "document" and "source" in part


def without_references(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The body for vLLM, which knows no parts of type document; it reads token ids instead of these messages."""
    return {**body, FIELD[path]: [_without_documents(turn) for turn in turns(path, body)]}


def _without_documents(turn: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(turn.get("content"), list):
        return turn
    left = [part for part in turn["content"] if not (isinstance(part, dict) and part.get("type") == "document")]
    return {**turn, "content": left or ""}


def _is_plain(turn: Mapping[str, Any]) -> bool:
    """Whether it is a message of text and documents, and no call of a tool or an answer of one."""
    content = turn.get("content")
    kinds = [part.get("type") for part in content if isinstance(part, dict)] if isinstance(content, list) else []
    called = turn.get("tool_calls") or turn.get("reasoning") or turn.get("type", "message") != "message"
    called = called or "role" not in turn
    return content is not None and not called and not any(str(kind).startswith(("tool_", "thinking")) for kind in kinds)


def parts_of(content: Any) -> Any:
    """A message's content as it stands, its parts as those of chat messages."""
    if not isinstance(content, list):
        return content
    return [
        {"type": "text", "text": part if isinstance(part, str) else part.get("text")}
        if isinstance(part, str) or (isinstance(part, dict) and part.get("type") in _TEXTS)
        else part
        for part in content
    ]


def _system(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    given = {RESPONSES: body.get("instructions"), MESSAGES: body.get("system")}.get(path)
    if not given:
        return []
    if isinstance(given, list) and path == MESSAGES:
        texts = [part.get("text") if isinstance(part, dict) else None for part in given]
        if all(isinstance(text, str) for text in texts):
            # as vLLM: a line of one client's that changes with every request
            given = "".join(str(text) for text in texts if not str(text).startswith("x-anthropic-billing-header"))
    if not isinstance(given, str):
        raise RequestError(400, "the system text is a text, or a list of parts of type text", param="system")
    return [{"role": "system", "content": given}]
