"""Conversations of any of the three ways to write one, as the messages that vLLM's server hands to a chat template.

Those with tools or reasoning go through vLLM's own conversions, so that what it would have rendered is what stands
around the documents. Documents that messages name go through them as random words, which nothing else in a body can be.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, get_args

from comb.documents.document import PromptBuilder
from comb.documents.rendering import TEMPLATE_RESERVED, makes_tokens
from comb_serving.api.conversation import FIELD, parts_of, turns
from comb_serving.api.request_error import RequestError
from comb_serving.api.routes import CHAT, RESPONSES

_FUNCTIONS = ("function", "custom", "namespace")  # the client runs these


def converted(
    path: str, body: Mapping[str, Any], builder: PromptBuilder
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Chat messages as `PromptBuilder` takes them, and the arguments of the template, tools among them.

    Raises:
        RequestError: 400 for what vLLM's request of this kind doesn't allow, and for tools that the server would run:
            it asks again behind those, without the documents.
    """
    references: list[dict[str, Any]] = []
    mark = f"comb{secrets.token_hex(16)}n"
    marked = {**body, FIELD[path]: _marked(turns(path, body), path, references, mark)}
    for tool in body.get("tools") or () if path == RESPONSES else ():
        if isinstance(tool, dict) and tool.get("type") not in _FUNCTIONS:
            kind = str(tool.get("type"))[:40]
            raise RequestError(
                400, f"tools of type {kind} can't be combined with documents in the prompt", param="tools"
            )
    try:
        found, tools, arguments = _by_vllm(path, marked, builder)
        messages = [_restored(_with_calls(each), references, mark) for each in found]
    except Exception as error:  # errors of vLLM's own, and it looks into some fields before their types
        raise RequestError(400, f"{type(error).__name__}: {error}"[:2000], param=FIELD[path]) from error
    if arguments.get("continue_final_message"):
        raise RequestError(400, "an unfinished last message can't be combined with documents", param=FIELD[path])
    kept = {name: value for name, value in arguments.items() if value is not None and name not in TEMPLATE_RESERVED}
    return messages, {**kept, **({"tools": tools} if tools else {})}


def as_rendered(messages: Sequence[Mapping[str, Any]], builder: PromptBuilder) -> list[dict[str, Any]]:
    """Messages as vLLM's renderer hands them to the chat template.

    Raises:
        RequestError: 400 for what documents can't stand beside.
    """
    template = _template(builder)
    found = [_known_fields(each) for each in messages]
    if any(each["role"] == "developer" for each in found) and not re.search("""["']developer["']""", template):
        found = _system_first([{**each, "role": "system"} if each["role"] == "developer" else each for each in found])
    return [{**each, "content": _in_form(each, parts=_takes_parts(template))} for each in found]


def renders_alike(config: Any, tokenizer: Any) -> bool:
    """Whether vLLM makes chats of messages as the library does with this tokenizer: by its template, or mistral_common.

    Args:
        config: vLLM's ModelConfig.
    """
    from vllm.tokenizers.registry import tokenizer_args_from_config

    mode = "mistral" if makes_tokens(tokenizer) else "hf"
    return bool(config.hf_config.model_type != "gpt_oss" and tokenizer_args_from_config(config)[0] == mode)


def _in_form(message: dict[str, Any], *, parts: bool) -> Any:
    """A message's content, as a list or as a text; those of tools are texts, and documents stand in lists."""
    content = message["content"]
    if message["role"] == "tool":
        parts = False
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if parts else content
    if parts or not isinstance(content, list) or any(part["type"] == "document" for part in content):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def _template(builder: PromptBuilder) -> str:
    try:
        return str(builder.tokenizer.get_chat_template(tools=builder.chat_template_kwargs.get("tools")))
    except (AttributeError, NotImplementedError, ValueError):  # there is none, as the builder will say
        return ""


def _takes_parts(template: str) -> bool:
    """Whether vLLM gives every content to this template as a list."""
    try:
        from vllm.renderers.hf import _detect_content_format
    except ImportError:  # the middleware is tried without vLLM
        return False
    return bool(_detect_content_format(template, default="string") == "openai")


def _known_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message.get("role"), message.get("content")
    content = "" if content is None else parts_of(content)
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "document"):  # vLLM would render such messages itself
            reason = f"parts of type {str(kind)[:40]} can't be combined with documents"
            raise RequestError(400, reason, param="messages")
    if role == "system":
        content = _without_billing(content)
    made = {"role": role, "content": content}
    if role == "assistant" and message.get("tool_calls"):
        made["tool_calls"] = message["tool_calls"]
    if role == "assistant" and (thought := message.get("reasoning")) is not None:
        made |= {"reasoning": thought, "reasoning_content": thought}  # its name in most templates
    if role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made | {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}


def _without_billing(content: Any) -> Any:
    """A system text without a line of one client's that changes with every request."""

    def rest(text: Any) -> Any:
        billed = isinstance(text, str) and text.startswith("x-anthropic-billing-header")
        return text.partition("\n")[2] if billed else text

    if not isinstance(content, list):
        return rest(content)
    left = [{**part, "text": rest(part["text"])} if "text" in part else part for part in content]
    return [new for old, new in zip(content, left, strict=True) if new == old or new["text"]]


def _system_first(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """All system texts as one in front, unless there is one only, and there."""
    system = [each for each in messages if each["role"] == "system"]
    if messages[0] in system and len(system) == 1:
        return messages
    texts = []
    for each in system:
        parts = each["content"] if isinstance(each["content"], list) else [{"type": "text", "text": each["content"]}]
        if any(part.get("type") == "document" for part in parts):
            reason = "the template has no such place for these messages' documents: name them in a user's"
            raise RequestError(400, reason, param="messages")
        texts.append("\n".join(str(part.get("text", "")) for part in parts))
    first = {"role": "system", "content": "\n\n".join(filter(None, texts))}
    return [first, *(each for each in messages if each["role"] != "system")]


def _by_vllm(
    path: str, body: dict[str, Any], builder: PromptBuilder
) -> tuple[list[Any], list[dict[str, Any]] | None, dict[str, Any]]:
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
            first = AnthropicServingMessages._detect_merge_inline_system(_template(builder))
            effort = _least_effort(builder) if given.thinking and given.thinking.type == "disabled" else "none"
            request = AnthropicServingMessages.to_chat_completion_request(
                given, merge_inline_system=first, disabled_thinking_effort=effort
            )
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        # validation leaves iterators that can be read once in what came as lists
        messages = body["messages"] if path == CHAT else request.messages
    return list(messages), tools, request.build_chat_params(None, "auto").chat_template_kwargs


def _least_effort(builder: PromptBuilder) -> Any:
    """What vLLM takes for no thinking: `low` where the template refuses `none`, or takes it for another effort."""
    from vllm.entrypoints.anthropic.protocol import AnthropicEffort

    def prompt(effort: str) -> tuple[int, ...]:
        wanted = {"reasoning_effort": effort, "enable_thinking": effort != "none"}
        return replace(builder, chat_template_kwargs=wanted).build("Hi").flat

    try:
        none = prompt("none")
    except ValueError:
        return "low"
    for effort in get_args(AnthropicEffort):
        with suppress(ValueError):
            if prompt(effort) == none:
                return "low"
    return "none"


def _marked(
    found: list[dict[str, Any]], path: str, references: list[dict[str, Any]], mark: str
) -> list[dict[str, Any]]:
    """The turns with `mark` and a number in place of documents, which `references` gets."""

    def text(part: Any) -> Any:
        if not isinstance(part, dict) or part.get("type") != "document":
            return part
        references.append(part)
        kind = "input_text" if path == RESPONSES else "text"
        return {"type": kind, "text": f"{mark}{len(references) - 1:07d}"}

    return [
        {**turn, "content": [text(part) for part in turn["content"]]} if isinstance(turn.get("content"), list) else turn
        for turn in found
    ]


def _restored(message: dict[str, Any], references: list[dict[str, Any]], mark: str) -> dict[str, Any]:
    """The message with its documents back in place."""
    content = parts_of(message.get("content"))
    if not references or mark not in str(content):
        return message
    parts: list[Any] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        words = re.split(rf"{mark}(\d{{7}})", part["text"])
        for place, word in enumerate(words):
            if place % 2:
                parts.append(references[int(word)])
            elif word:
                parts.append({"type": "text", "text": word})
    return {**message, "content": parts}


def _with_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    calls = message.get("tool_calls")
    return {**message, "tool_calls": [_call(call) for call in calls]} if calls else dict(message)


def _call(call: Any) -> dict[str, Any]:
    """A call with its arguments as an object, as templates want them; none where they aren't one, as vLLM has it."""
    function = dict(call["function"])
    try:
        given = function.get("arguments") or {}
        found = json.loads(given) if isinstance(given, str) else given
    except ValueError:
        found = {}
    return {**call, "function": {**function, "arguments": found if isinstance(found, dict) else {}}}
