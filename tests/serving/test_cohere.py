"""Cohere's chat API: its bodies as chats, and chats as its answers."""

from __future__ import annotations

import json
from typing import Any
from unittest.mock import AsyncMock

import pytest

from comb_serving.api.cohere import CohereWriter, answer, as_chat
from comb_serving.api.http import RequestError
from comb_serving.api.routes import CHAT, COHERE
from tests.helpers.middleware_server import ASKED, SEGMENTS, Server

ASK: dict[str, Any] = {"model": "m", "messages": ASKED}
DOCUMENTS = [{"id": "one", "data": {"title": "A", "snippet": "Ada went to the garden."}}, "Bob is in the kitchen."]


async def test_documents_are_those_of_a_chat(server: Server) -> None:
    found = await server.post(COHERE, {**ASK, "documents": DOCUMENTS})
    assert found.status == 200, found.body
    assert found.states == ["encoded"] * 2
    assert [each["tokens"] for each in found.json["comb"]["documents"]] == list(map(len, SEGMENTS))
    again = await server.post(CHAT, {**ASK, "documents": DOCUMENTS})
    assert again.states == ["hit"] * 2
    assert server.echo.bodies[0]["kv_transfer_params"] == server.echo.bodies[1]["kv_transfer_params"]


def test_what_is_no_answer_passes() -> None:
    """vLLM's, to a client that has left, and errors."""
    for body in (b"null", b'{"error": {"message": "x"}}'):
        assert CohereWriter(AsyncMock()).whole(body) == body


def test_every_field_is_said_in_a_chats_words() -> None:
    given = {
        **ASK, "stream": True, "k": 3, "p": 0.5, "stop_sequences": ["x"], "tool_choice": "REQUIRED", "max_tokens": 4,
        "response_format": {"type": "json_object", "json_schema": {"type": "object"}}, "seed": 1,
        "citation_options": {"mode": "OFF"}, "safety_mode": "OFF", "strict_tools": False, "thinking": None,
    }  # fmt: skip
    chat = as_chat(given)
    assert chat == {
        **ASK, "stream": True, "stream_options": {"include_usage": True}, "top_k": 3, "top_p": 0.5, "stop": ["x"],
        "tool_choice": "required", "max_tokens": 4, "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
    }  # fmt: skip
    data = [{"type": "document", "document": {"data": {"a": 1}}}, {"type": "text", "text": "b"}]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [
        {"role": "assistant", "tool_calls": calls, "tool_plan": "I look."},
        {"role": "tool", "tool_call_id": "c", "content": data},
    ]
    assert as_chat({**ASK, "messages": turns})["messages"] == [
        {"role": "assistant", "tool_calls": calls, "content": "I look."},
        {"role": "tool", "tool_call_id": "c", "content": '{"a": 1}\nb'},
    ]


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"citation_options": {"mode": "ACCURATE"}}, "citation_options"),
        ({"safety_mode": "STRICT"}, "safety_mode"),
        ({"tool_choice": "auto"}, "tool_choice"),
        ({"tool_choice": {"type": "REQUIRED"}}, "tool_choice"),
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"thinking": {"type": "enabled"}}, "thinking"),
        ({"logprobs": True}, "logprobs"),
        ({"connectors": [{}]}, "connectors"),
        ({"messages": "hello"}, "messages"),
        ({"messages": [{"role": "tool", "content": [{"type": "image"}]}]}, "messages"),
    ],
)
def test_what_a_chat_cannot_say_is_refused(more: dict[str, Any], param: str) -> None:
    with pytest.raises(RequestError) as found:
        as_chat({**ASK, **more})
    assert found.value.error["param"] == param


def completion(finish: str, **message: Any) -> dict[str, Any]:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    return {"id": "x", "usage": usage, "choices": [{"finish_reason": finish, "message": message, "stop_reason": None}]}


def test_an_answer_has_its_parts_its_end_and_its_tokens() -> None:
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    made = answer(completion("tool_calls", content=None, tool_calls=calls))
    assert (made["finish_reason"], made["message"]) == (
        "TOOL_CALL", {"role": "assistant", "content": [], "tool_calls": calls},
    )  # fmt: skip
    made = answer(completion("length", content="a", reasoning="b"))
    assert made["finish_reason"] == "MAX_TOKENS"
    assert made["message"]["content"] == [{"type": "thinking", "thinking": "b"}, {"type": "text", "text": "a"}]
    assert made["usage"]["tokens"] == {"input_tokens": 9, "output_tokens": 2}
    assert made["usage"]["cached_tokens"] == 4
    stopped = completion("stop", content="a")
    assert answer(stopped)["finish_reason"] == "COMPLETE"
    stopped["choices"][0]["stop_reason"] = "x"
    assert answer(stopped)["finish_reason"] == "STOP_SEQUENCE"


@pytest.mark.parametrize("size", [7, 100_000])
async def test_a_stream_opens_and_closes_every_part(size: int) -> None:
    """Whatever the size of the pieces that a chat's chunks come in."""
    calls = [
        {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": "{}"}},
        {"index": 1, "id": "d", "function": {"name": "g", "arguments": "{}"}},
    ]
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "a"}, {"content": "é"}]
    choices = [{"delta": delta, "finish_reason": None} for delta in (*deltas, *({"tool_calls": [c]} for c in calls))]
    chunks: list[dict[str, Any]] = [{"id": "x", "choices": [choice]} for choice in choices]
    chunks[0]["comb"] = {"documents": []}
    chunks.append({"id": "x", "choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"id": "x", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    sent = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n"
    writer = CohereWriter(send := AsyncMock())
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await writer({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, len(sent), size):
        more = at + size < len(sent)
        await writer({"type": "http.response.body", "body": sent[at : at + size], "more_body": more})
    out = b"".join(call.args[0].get("body", b"") for call in send.await_args_list).decode()
    events = [event.split("\ndata: ") for event in out.strip().split("\n\n")]
    found = [json.loads(data) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [each["type"] for each in found]
    assert [each["type"] for each in found] == [
        "message-start", "content-start", "content-delta", "content-end", "content-start", "content-delta",
        "content-delta", "content-end", "tool-call-start", "tool-call-delta", "tool-call-end", "tool-call-start",
        "tool-call-delta", "tool-call-end", "message-end",
    ]  # fmt: skip
    assert [each["index"] for each in found if "index" in each] == [0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1, 1, 1]
    assert found[0]["comb"] == {"documents": []}
    assert found[6]["delta"] == {"message": {"content": {"text": "é"}}}
    assert found[-1]["delta"]["finish_reason"] == "COMPLETE"
    assert found[-1]["delta"]["usage"]["tokens"]["input_tokens"] == 9


async def test_errors_go_as_they_are(server: Server) -> None:
    found = await server.post(COHERE, {**ASK, "documents": [{"id": "unknown"}]})
    assert (found.status, found.json["error"]["param"]) == (404, "documents")
    server.echo.fails = True
    assert (await server.post(COHERE, {**ASK, "documents": DOCUMENTS})).status >= 400
