"""Conversations, in whichever way clients write them, as the messages that vLLM's server hands to a chat template.

Those with tools or reasoning go through vLLM's own conversions, so that what it would have rendered is what stands
around the documents. Documents that messages name go through them as random words, which nothing else in a body can be.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from comb.documents.document import PromptBuilder
from comb.documents.rendering import TEMPLATE_RESERVED, makes_tokens
from comb_serving.api.http import RequestError
from comb_serving.api.routes import CHAT, MESSAGES, RESPONSES

FIELD = {CHAT: "messages", RESPONSES: "input", MESSAGES: "messages"}  # where each has its turns
# the kinds of parts that are texts to vLLM, and the field of each that has it
_TEXTS = {**dict.fromkeys(("text", "input_text", "output_text"), "text"), "refusal": "refusal", "thinking": "thinking"}
_CHAT_TEXTS = ("text", "refusal", "thinking")  # those of chats
_PART_FIELDS = {"type", *_TEXTS.values(), "annotations", "logprobs"}
_BILLING = "x-anthropic-billing-header"  # begins a line of one client's that changes with every request
_FUNCTIONS = ("function", "custom", "namespace")  # tools that the client runs
# what vLLM has rules for: it renders such bodies itself, or converts them for prompts with documents (`converted`)
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


def parts_of(content: Any) -> Any:
    """A message's content as it stands, its parts as those of chat messages. Raises RequestError."""
    if not isinstance(content, list):
        return content
    parts = []
    for part in content:
        if isinstance(part, str):
            part = {"type": "text", "text": part}
        elif name := _TEXTS.get(_kind(part)):
            if not isinstance(part.get(name), str):
                raise RequestError(400, f"a part of type {part['type']} has its text as {name}", param="messages")
            part = {"type": "text", "text": part[name]}
        parts.append(part)
    return parts


def has_other_parts(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a chat has parts that chats don't have: vLLM sees that where it renders it, and not beside token ids."""
    contents = [turn.get("content") for turn in turns(path, body)] if path == CHAT else []
    return any(_kind(part) not in _CHAT_TEXTS for parts in contents if isinstance(parts, list) for part in parts)


# ---- documents in messages ----


def written_out(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The parts of type document whose text stands in them, as the Messages API has it, in order. Raises RequestError.

    Those in answers of tools are refused: vLLM would leave them out.
    """
    found = []
    for turn in turns(path, body):
        for part in turn["content"] if isinstance(turn.get("content"), list) else ():
            answer = part.get("content") if _kind(part) == "tool_result" else None
            for inner in answer if isinstance(answer, list) else ():
                if _kind(inner) in ("document", "search_result"):
                    reason = "documents in a tool's answer aren't read: write their text, or put them beside it"
                    raise RequestError(400, reason, param=FIELD[path])
            if _is_document(part) and "source" in part:
                found.append(part)
    return found


def with_documents(
    path: str, body: Mapping[str, Any], change: Callable[[dict[str, Any]], dict[str, Any]]
) -> dict[str, Any]:
    """The body with another part in place of each document."""
    made = []
    for turn in turns(path, body):
        if isinstance(parts := turn.get("content"), list):
            turn = {**turn, "content": [change(part) if _is_document(part) else part for part in parts]}
        made.append(turn)
    return {**body, FIELD[path]: made}


def beside_prompt(path: str, body: Mapping[str, Any]) -> dict[str, Any]:
    """The body for vLLM beside the prompt's token ids: without documents, and of texts with the fields of texts alone.

    Where a part has a field that media have, even an empty one, vLLM forgets the ids and renders the messages itself.
    """
    made = []
    for turn in turns(path, body):
        for field in ("content", "output"):  # the latter of tools
            if isinstance(parts := turn.get(field), list):
                turn = {**turn, field: [_text_alone(part) for part in parts if not _is_document(part)] or ""}
        made.append(turn)
    return {**body, FIELD[path]: made}


def _text_alone(part: Any) -> Any:
    is_text = _kind(part) in _TEXTS
    return {name: value for name, value in part.items() if name in _PART_FIELDS} if is_text else part


def _kind(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    return kind if isinstance(kind, str) else ""


def _is_document(part: Any) -> bool:
    return _kind(part) == "document"


def _is_empty(part: Any) -> bool:
    return isinstance(part, dict) and part.get("text") == ""


# ---- as chat messages ----


def messages_of(path: str, body: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """All messages, with system texts; None where vLLM has to convert them (tools, reasoning). Raises RequestError."""
    found, by_vllm = turns(path, body), any(body.get(name) for name in _VLLM_CONVERTS[path])
    for turn in found:
        content, role = turn.get("content"), turn.get("role")
        parts = content if isinstance(content, list) else []
        by_vllm |= bool(
            (content is None or role is None or turn.get("type", "message") != "message")
            or (turn.get("tool_calls") or turn.get("reasoning") or turn.get("reasoning_content") is not None)
            or any(_kind(part).startswith(("tool_", "thinking", "redacted_thinking")) for part in parts)
            # of these, vLLM keeps some
            or (path == MESSAGES and (role == "system" or content == [] or any(map(_is_empty, parts))))
            or (path == RESPONSES and role == "assistant" and isinstance(content, list))
        )
    if by_vllm:
        return None
    messages = [{**turn, "content": parts_of(turn["content"])} for turn in found]
    system = {RESPONSES: body.get("instructions"), MESSAGES: body.get("system")}.get(path)
    if not system:
        return messages
    if isinstance(system, list) and path == MESSAGES:
        texts = [part.get("text") if isinstance(part, dict) else None for part in system]
        if all(isinstance(text, str) for text in texts):
            system = "".join(str(text) for text in texts if not str(text).startswith(_BILLING))  # as vLLM
    if not isinstance(system, str):
        raise RequestError(400, "the system text is a text, or a list of parts of type text", param="system")
    return [{"role": "system", "content": system}, *messages]


def converted(
    path: str, body: Mapping[str, Any], builder: PromptBuilder, no_thinking: str
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Chat messages as `PromptBuilder` takes them, and the arguments of the template, tools among them.

    Args:
        no_thinking: the effort that the Messages API's disabled thinking is.

    Raises:
        RequestError: 400 for what vLLM's request of this kind doesn't allow.
    """
    from pydantic import ValidationError

    references: list[dict[str, Any]] = []
    mark = f"comb{secrets.token_hex(16)}n"

    def marked(document: dict[str, Any]) -> dict[str, Any]:
        references.append(document)
        return {"type": "input_text" if path == RESPONSES else "text", "text": f"{mark}{len(references) - 1:07d}"}

    given = with_documents(path, body, marked)
    if not isinstance(asked := body.get("tools") or [], list):
        raise RequestError(400, f"tools is a list, not {type(asked).__name__}", param="tools")
    # tools that the server would run: it asks again behind those, without the documents
    for tool in asked if path == RESPONSES else ():
        if isinstance(tool, dict) and tool.get("type") not in _FUNCTIONS:
            reason = f"tools of type {str(tool.get('type'))[:40]} can't be combined with documents in the prompt"
            raise RequestError(400, reason, param="tools")
    try:
        found, tools, arguments = _by_vllm(path, given, builder, no_thinking)
        messages = [_restored(each, references, mark) for each in found]
    except Exception as error:  # errors of vLLM's own, and it looks into some fields before their types
        said = _fault(error, given) if isinstance(error, ValidationError) else f"{type(error).__name__}: {error}"
        raise RequestError(400, said[:2000], param=FIELD[path]) from error
    if arguments.get("continue_final_message"):
        raise RequestError(400, "an unfinished last message can't be combined with documents", param=FIELD[path])
    kept = {name: value for name, value in arguments.items() if value is not None and name not in TEMPLATE_RESERVED}
    return messages, {**kept, **({"tools": tools} if tools else {})}


def _fault(error: Any, body: Any) -> str:
    """One line for what pydantic says of a body in hundreds: the innermost field that is wrong, and how."""
    faults = error.errors(include_url=False, include_context=False, include_input=False)
    # of each object it says what keeps it from being any of all kinds, and its own is one that its type or role allows
    others = {fault["loc"][:-1] for fault in faults if fault["type"] == "literal_error"}
    own = [fault for fault in faults if not any(fault["loc"][:end] in others for end in range(1, len(fault["loc"])))]

    def place(fault: dict[str, Any]) -> list[Any]:
        value, found = body, list[Any]()
        for part in fault["loc"]:  # names of kinds stand in between
            index = isinstance(value, list) and isinstance(part, int) and part < len(value)
            if index or (isinstance(value, dict) and part in value):
                value = value[part]
                found.append(part)
        return [*found, fault["loc"][-1]] if fault["type"] == "missing" else found

    fault = max(own or faults, key=lambda fault: len(place(fault)))
    name = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in place(fault))
    return f"{name.removeprefix('.')}: {fault['msg']}" if name else str(fault["msg"])


def _by_vllm(
    path: str, body: dict[str, Any], builder: PromptBuilder, no_thinking: Any
) -> tuple[list[Any], list[dict[str, Any]] | None, dict[str, Any]]:
    """Messages, tools and the template's arguments, as vLLM makes them of such a body."""
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
            request = AnthropicServingMessages.to_chat_completion_request(
                given, merge_inline_system=first, disabled_thinking_effort=no_thinking
            )
        tools = None if request.tools is None else [tool.model_dump() for tool in request.tools]
        # validation, by which known fields come first, leaves iterators that can be read once in what came as lists
        messages = [
            {name: list(value) if isinstance(value, Iterator) else value for name, value in message.items()}
            for message in request.messages
        ]
    return list(messages), tools, request.build_chat_params(None, "auto").chat_template_kwargs


async def effort_without_thinking(messages: Any) -> str:
    """The reasoning effort that disabled thinking is to vLLM's Messages API (`AnthropicServingMessages`)."""
    resolver = getattr(messages, "disabled_thinking_effort_resolver", None)
    if resolver is None:  # vLLM 0.32
        return str(await messages._get_disabled_thinking_effort())
    from vllm.entrypoints.anthropic.protocol import AnthropicCountTokensRequest

    asked = {"model": "any", "messages": [], "thinking": {"type": "disabled"}}
    return str(await resolver.resolve_for(AnthropicCountTokensRequest.model_validate(asked)))


def _restored(message: Mapping[str, Any], references: list[dict[str, Any]], mark: str) -> dict[str, Any]:
    """The message with its documents back in place, and arguments of calls as objects, as templates want them."""
    message = dict(message)
    if message.get("tool_calls"):
        calls = []
        for call in message["tool_calls"]:
            function = dict(call["function"])
            try:
                given = function.get("arguments") or {}
                found = json.loads(given) if isinstance(given, str) else given
            except ValueError:
                found = {}
            # none where they aren't one, as vLLM has it
            calls.append({**call, "function": {**function, "arguments": found if isinstance(found, dict) else {}}})
        message["tool_calls"] = calls
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


# ---- as rendered ----


def as_rendered(messages: Sequence[Mapping[str, Any]], builder: PromptBuilder) -> list[dict[str, Any]]:
    """Messages as vLLM's renderer hands them to the template. Raises RequestError: 400 for media."""
    template = _template(builder)
    try:
        from vllm.renderers.hf import _detect_content_format

        in_parts = _detect_content_format(template, default="string") == "openai"
    except ImportError:  # the middleware is tried without vLLM
        in_parts = False
    found = [_known_fields(each) for each in messages]
    for each in found:
        if isinstance(each["content"], list) and not in_parts:
            each["content"] = [part for part in each["content"] if not _is_empty(part)]
    if any(each["role"] == "developer" for each in found) and not re.search("""["']developer["']""", template):
        for each in found:
            if each["role"] == "developer":
                each["role"] = "system"
                del each["tools"]
        system = [each for each in found if each["role"] == "system"]
        if found[0] not in system or len(system) > 1:  # all of them as one in front
            if any(map(_has_documents, system)):
                reason = "the template has no such place for these messages' documents: name them in a user's"
                raise RequestError(400, reason, param="messages")
            first = {"role": "system", "content": "\n\n".join(filter(None, map(_text_of, system)))}
            found = [first, *(each for each in found if each["role"] != "system")]
    for each in found:
        as_parts, content = in_parts and each["role"] != "tool", each["content"]  # of tools, contents are texts
        if isinstance(content, str) and as_parts:
            each["content"] = [{"type": "text", "text": content}]
        elif isinstance(content, list) and not as_parts and not _has_documents(each):
            each["content"] = _text_of(each)
    return found


def _has_documents(message: Mapping[str, Any]) -> bool:
    content = message["content"]
    return isinstance(content, list) and any(map(_is_document, content))


def _text_of(message: Mapping[str, Any]) -> str:
    content = message["content"]
    return "\n".join(str(part.get("text", "")) for part in content) if isinstance(content, list) else str(content)


def renders_alike(config: Any, tokenizer: Any) -> bool:
    """Whether a vLLM of this ModelConfig makes chats as the library does: by the template, or mistral_common."""
    from vllm.tokenizers.registry import tokenizer_args_from_config

    mode = "mistral" if makes_tokens(tokenizer) else "hf"
    return bool(config.hf_config.model_type != "gpt_oss" and tokenizer_args_from_config(config)[0] == mode)


def _template(builder: PromptBuilder) -> str:
    try:
        return str(builder.tokenizer.get_chat_template(tools=builder.chat_template_kwargs.get("tools")))
    except (AttributeError, NotImplementedError, ValueError):  # there is none, as the builder will say
        return ""


def _known_fields(message: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that vLLM hands to templates. Raises RequestError for parts that it would render itself."""
    role, content = message.get("role"), message.get("content")
    content = "" if content is None else parts_of(content)
    for part in content if isinstance(content, list) else ():
        kind = part.get("type") if isinstance(part, dict) else type(part).__name__
        if kind not in ("text", "document"):
            reason = f"parts of type {str(kind)[:40]} can't be combined with documents"
            raise RequestError(400, reason, param="messages")
    if role == "system":
        content = _without_billing(content)
    made = {"role": role, "content": content}
    if role == "assistant" and message.get("tool_calls"):
        made["tool_calls"] = message["tool_calls"]
    thought = message.get("reasoning")
    if not isinstance(thought, str | None):  # embeddings: vLLM forgets the ids and renders the messages itself
        raise RequestError(400, "reasoning that is no text can't be combined with documents", param="messages")
    if role == "assistant" and thought is not None:
        made |= {"reasoning": thought, "reasoning_content": thought}  # its name in most templates
    if role == "tool" and "tool_call_id" in message:
        made["tool_call_id"] = message["tool_call_id"]
    if role == "developer":
        made["tools"] = message.get("tools")
    return made | {name: message[name] for name in ("name", "task") if isinstance(message.get(name), str)}


def _without_billing(content: Any) -> Any:
    """A system text without the line of `_BILLING`, and without parts that were nothing else."""
    if not isinstance(content, list):
        billed = isinstance(content, str) and content.startswith(_BILLING)
        return content.partition("\n")[2] if billed else content
    left = []
    for part in content:
        text = part.get("text")
        if isinstance(text, str) and text.startswith(_BILLING):
            part = {**part, "text": text.partition("\n")[2]}
        if part.get("text") != "" or text == "":
            left.append(part)
    return left
