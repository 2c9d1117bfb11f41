"""Cohere's chat API (v2), whose clients have a field for documents: in as a chat, out as they expect it.

vLLM's own route of that name, for Cohere's models, isn't used: it has no place for what says which documents it has.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from comb_serving.api.http import AnswerRewriter, RequestError, Send

_SAME = {"model", "documents", "stream", "max_tokens", "temperature", "seed", "frequency_penalty", "presence_penalty",
         "tools", "priority", "chat_template_kwargs", "comb", "cache_salt"}  # fmt: skip
_NAMED = {"stop_sequences": "stop", "k": "top_k", "p": "top_p"}
_CONVERTED = ("messages", "tool_choice", "response_format")
_CHOICES = {"REQUIRED": "required", "NONE": "none"}
_ENDS = {"stop": "COMPLETE", "length": "MAX_TOKENS", "tool_calls": "TOOL_CALL"}


def as_chat(body: Mapping[str, Any]) -> dict[str, Any]:
    """The body of a chat completion that says the same. Raises RequestError (400) for what it can't say."""
    chat = {name: value for name, value in body.items() if name in _SAME and value is not None}
    for name, value in body.items():
        if name in _NAMED and value is not None:
            chat[_NAMED[name]] = value
        elif name == "citation_options":  # fields that say what is so anyway are taken
            mode = value.get("mode") if isinstance(value, Mapping) else value
            if mode not in (None, "OFF", "off"):
                reason = (
                    'citations aren\'t given, as no model here marks its sources: {"mode": "OFF"}, and ask it to quote'
                )
                raise RequestError(400, reason, param=name)
        elif name == "safety_mode":
            if value not in (None, "OFF", "NONE"):
                raise RequestError(400, "there is no safety_mode here: leave it out, or say OFF", param=name)
        elif name not in (*_SAME, *_NAMED, *_CONVERTED) and value is not None and value is not False:
            raise RequestError(400, f"{name} can't be given here: leave it out", param=name)
    if (choice := body.get("tool_choice")) is not None:
        if not isinstance(choice, str) or choice not in _CHOICES:
            raise RequestError(400, f"tool_choice is one of {', '.join(_CHOICES)}", param="tool_choice")
        chat["tool_choice"] = _CHOICES[choice]
    if (form := body.get("response_format")) is not None:
        kind = form.get("type") if isinstance(form, Mapping) else None
        if kind not in ("text", "json_object"):
            raise RequestError(400, "response_format is of type text or json_object", param="response_format")
        chat["response_format"] = {"type": kind}
        schema = form.get("json_schema") or form.get("schema")
        if kind == "json_object" and schema is not None:
            chat["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
    messages = body.get("messages")
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise RequestError(400, "messages is a list of objects with role and content", param="messages")
    chat["messages"] = [_message(message) for message in messages]
    if chat.get("stream"):
        chat["stream_options"] = {"include_usage": True}
    return chat


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as a chat has it: what a tool has answered with documents is its text."""
    known = {name: message[name] for name in ("role", "tool_calls", "tool_call_id") if message.get(name) is not None}
    content = message.get("content")
    if message.get("role") == "tool" and isinstance(content, list):
        texts = []
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "text" and isinstance(part.get("text"), str):
                texts.append(part["text"])
                continue
            document = part.get("document") if kind == "document" else None
            data = document.get("data") if isinstance(document, Mapping) else None
            if not isinstance(data, str | Mapping):
                raise RequestError(400, "a tool's content is texts, and documents with data", param="messages")
            texts.append(data if isinstance(data, str) else json.dumps(data, ensure_ascii=False))
        content = "\n".join(texts)
    return {**known, "content": message.get("tool_plan") if content is None else content}


def answer(chat: Mapping[str, Any]) -> dict[str, Any]:
    """A chat completion as an answer of Cohere's API."""
    choice = chat["choices"][0]
    said = choice["message"]
    content = [{"type": "text", "text": said["content"]}] if said.get("content") else []
    if said.get("reasoning"):
        content.insert(0, {"type": "thinking", "thinking": said["reasoning"]})
    message = {"role": "assistant", "content": content}
    if said.get("tool_calls"):
        message["tool_calls"] = said["tool_calls"]
    made = {"id": chat["id"], "finish_reason": _end(choice), "message": message, "usage": _usage(chat.get("usage"))}
    return made | ({"comb": chat["comb"]} if "comb" in chat else {})


def _end(choice: Mapping[str, Any]) -> str:
    stopped = choice.get("finish_reason") == "stop" and isinstance(choice.get("stop_reason"), str)
    return "STOP_SEQUENCE" if stopped else _ENDS.get(str(choice.get("finish_reason")), "ERROR")


def _usage(usage: Mapping[str, Any] | None) -> dict[str, Any]:
    usage = usage or {}
    tokens = {"input_tokens": usage.get("prompt_tokens", 0), "output_tokens": usage.get("completion_tokens", 0)}
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return {"billed_units": tokens, "tokens": tokens, "cached_tokens": cached}


class CohereWriter(AnswerRewriter):
    """A `send` for a chat completion that passes it on as Cohere's answer."""

    def __init__(self, send: Send) -> None:
        super().__init__(send)
        self._name = ""
        self._end = "ERROR"
        self._open: tuple[str, int] | None = None  # thinking, text or tool-call, and its number
        self._parts = 0

    def whole(self, body: bytes) -> bytes:
        payload = json.loads(body)
        if not isinstance(payload, dict) or "choices" not in payload:  # null, to a client that has left
            return body
        return json.dumps(answer(payload), ensure_ascii=False).encode()

    def event(self, event: bytes) -> bytes:
        data = event.partition(b"data: ")[2]
        made = self._events(json.loads(data)) if data and data != b"[DONE]" else ()
        texts = (f"event: {each['type']}\ndata: {json.dumps(each, ensure_ascii=False)}\n\n" for each in made)
        return "".join(texts).encode()

    def _events(self, chunk: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        """What one chunk of a chat's stream becomes."""
        if "error" in chunk:
            yield {"type": "error", **chunk}
            return
        if not self._name:
            self._name = chunk["id"]
            message = {"role": "assistant", "content": [], "tool_plan": "", "tool_calls": [], "citations": []}
            report = {"comb": chunk["comb"]} if "comb" in chunk else {}
            yield {"type": "message-start", "id": self._name, "delta": {"message": message}, **report}
        for choice in chunk["choices"]:
            delta = choice["delta"]
            for kind, name in (("thinking", "reasoning"), ("text", "content")):
                if delta.get(name):
                    yield from self._content(kind, delta[name])
            for call in delta.get("tool_calls") or ():
                yield from self._call(call)
            if choice.get("finish_reason") is not None:
                self._end = _end(choice)
        if chunk.get("usage") is not None and not chunk["choices"]:  # the last one
            yield from self._closed()
            delta = {"finish_reason": self._end, "usage": _usage(chunk["usage"])}
            yield {"type": "message-end", "id": self._name, "delta": delta}

    def _content(self, kind: str, text: str) -> Iterator[dict[str, Any]]:
        if self._open is None or self._open[0] != kind:
            yield from self._closed()
            self._open = (kind, self._parts)
            start = {"message": {"content": {"type": kind, kind: ""}}}
            yield {"type": "content-start", "index": self._parts, "delta": start}
        yield {"type": "content-delta", "index": self._open[1], "delta": {"message": {"content": {kind: text}}}}

    def _call(self, call: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        function = call.get("function") or {}
        if call.get("id") or self._open is None or self._open[0] != "tool-call":
            yield from self._closed()
            self._open = ("tool-call", int(call.get("index", 0)))
            named = {"name": function.get("name"), "arguments": ""}
            made = {"id": call.get("id"), "type": "function", "function": named}
            yield {"type": "tool-call-start", "index": self._open[1], "delta": {"message": {"tool_calls": made}}}
        if arguments := function.get("arguments"):
            delta = {"message": {"tool_calls": {"function": {"arguments": arguments}}}}
            yield {"type": "tool-call-delta", "index": self._open[1], "delta": delta}

    def _closed(self) -> Iterator[dict[str, Any]]:
        if self._open is not None:
            kind, index = self._open
            yield {"type": "tool-call-end" if kind == "tool-call" else "content-end", "index": index}
            self._parts += kind != "tool-call"
            self._open = None
