"""Conversations with tools or reasoning, of any of the three ways to write one, as messages that a chat template takes.

By vLLM's own conversions, so that what its server would have rendered is what stands around the documents. Documents
that messages name go through them as random words, which nothing else in a body can be.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping
from typing import Any

from comb_serving.api.conversation import FIELD, parts_of, turns
from comb_serving.api.errors import RequestError
from comb_serving.api.fields import TEMPLATE_RESERVED
from comb_serving.api.routes import CHAT, RESPONSES

_MARK = re.compile("(comb[0-9a-f]{32})")
_FUNCTIONS = ("function", "custom", "namespace")  # the client runs these


def converted(path: str, body: Mapping[str, Any]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Chat messages as `PromptBuilder` takes them, and the arguments of the template, tools among them.

    Raises:
        RequestError: 400 for what vLLM's request of this kind doesn't allow, and for tools that the server would run:
            it asks again behind those, without the documents.
    """
    references: dict[str, dict[str, Any]] = {}
    marked = {**body, FIELD[path]: _marked(turns(path, body), path, references)}
    for tool in body.get("tools") or () if path == RESPONSES else ():
        if isinstance(tool, dict) and tool.get("type") not in _FUNCTIONS:
            kind = str(tool.get("type"))[:40]
            raise RequestError(
                400, f"tools of type {kind} can't be combined with documents in the prompt", param="tools"
            )
    try:
        found, tools, arguments = _by_vllm(path, marked)
        messages = [_for_template(each, references) for each in found]
    except (ValueError, TypeError, AttributeError, KeyError) as error:  # vLLM looks into some fields before their types
        raise RequestError(400, f"{type(error).__name__}: {error}"[:2000], param=FIELD[path]) from error
    if arguments.get("continue_final_message"):
        raise RequestError(400, "an unfinished last message can't be combined with documents", param=FIELD[path])
    kept = {name: value for name, value in arguments.items() if value is not None and name not in TEMPLATE_RESERVED}
    return messages, {**kept, **({"tools": tools} if tools else {})}


def _by_vllm(path: str, body: dict[str, Any]) -> tuple[list[Any], list[dict[str, Any]] | None, dict[str, Any]]:
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
    from vllm.entrypoints.openai.responses.utils import construct_input_messages, construct_tool_dicts

    request: Any
    if path == RESPONSES:
        request = ResponsesRequest.model_validate(body)
        tools = construct_tool_dicts(request.tools, request.tool_choice)
        messages = construct_input_messages(request_instructions=request.instructions, request_input=request.input)
    else:
        if path == CHAT:
            request = ChatCompletionRequest.model_validate(body)
        else:
            given = AnthropicMessagesRequest.model_validate(body)
            request = AnthropicServingMessages.to_chat_completion_request(given)
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        # validation leaves iterators that can be read once in what came as lists
        messages = body["messages"] if path == CHAT else request.messages
    return list(messages), tools, request.build_chat_params(None, "auto").chat_template_kwargs


def _marked(found: list[dict[str, Any]], path: str, references: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
    """The turns with texts in place of documents; `references` gets which text stands for which."""

    def text(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "document":
            return part
        references[marker := f"comb{secrets.token_hex(16)}"] = part
        return {"type": "input_text" if path == RESPONSES else "text", "text": marker}

    return [
        {**turn, "content": [text(part) for part in turn["content"]]} if isinstance(turn.get("content"), list) else turn
        for turn in found
    ]


def _for_template(message: Mapping[str, Any], references: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    made = {name: value for name, value in message.items() if value is not None}
    content = parts_of(made.get("content", ""))
    if isinstance(content, list) and made.get("role") == "tool":  # templates want a text there
        content = "\n".join(str(part.get("text", "")) for part in content)
    made["content"] = _restored(content, references)
    if calls := made.pop("tool_calls", None):
        made["tool_calls"] = [_call(call) for call in calls]
    if (thought := made.get("reasoning")) is not None:
        made["reasoning_content"] = thought  # its name in most templates
    return made


def _restored(content: Any, references: Mapping[str, dict[str, Any]]) -> Any:
    """Content with its documents back in place."""
    if references.keys().isdisjoint(_MARK.findall(str(content)) if references else ()):
        return content
    parts = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        for piece in _MARK.split(part["text"]):
            parts += [references.get(piece, {"type": "text", "text": piece})] if piece else []
    return parts


def _call(call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, as templates want them; none where they aren't one, as vLLM has it."""
    function = dict(call["function"])
    try:
        given = function.get("arguments") or {}
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = {}
    return {**call, "function": {**function, "arguments": found if isinstance(found, dict) else {}}}
