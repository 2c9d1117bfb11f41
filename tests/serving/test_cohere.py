"""Cohere's chat API: its bodies as chats, and chats as its answers."""

from __future__ import annotations

import json
from typing import Any

import pytest

from comb_serving.api.cohere import CohereWriter, answer, as_chat
from comb_serving.api.http import RequestError
from comb_serving.api.routes import CHAT, COHERE
from tests.helpers.middleware_server import Server, ids_of

ASKED: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "Where is Ada?"}]}
DOCUMENTS = [{"id": "one", "data": {"title": "A", "snippet": "Ada went to the garden."}}, "Bob is in the kitchen."]


async def test_documents_are_those_of_a_chat() -> None:
    server = Server()
    found = await server.client().post(COHERE, {**ASKED, "documents": DOCUMENTS})
    assert found.status == 200, found.body
    assert [each["state"] for each in found.json["comb"]["documents"]] == ["encoded"] * 2
    assert [each["tokens"] for each in found.json["comb"]["documents"]] == [
        len(ids_of("Ada went to the garden.", "A")), len(ids_of("Bob is in the kitchen.")),
    ]  # fmt: skip
    again = await server.client().post(CHAT, {**ASKED, "documents": DOCUMENTS})
    assert [each["state"] for each in again.json["comb"]["documents"]] == ["hit"] * 2
    assert server.echo.bodies[0]["kv_transfer_params"] == server.echo.bodies[1]["kv_transfer_params"]
    server.check_idle()


def test_every_field_is_said_in_a_chats_words() -> None:
    given = {
        **ASKED, "stream": True, "k": 3, "p": 0.5, "stop_sequences": ["x"], "tool_choice": "REQUIRED", "max_tokens": 4,
        "response_format": {"type": "json_object", "json_schema": {"type": "object"}}, "seed": 1,
        "citation_options": {"mode": "OFF"}, "safety_mode": "OFF", "strict_tools": False, "thinking": None,
    }  # fmt: skip
    chat = as_chat(given)
    assert chat == {
        **ASKED, "stream": True, "stream_options": {"include_usage": True}, "top_k": 3, "top_p": 0.5, "stop": ["x"],
        "tool_choice": "required", "max_tokens": 4, "seed": 1,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object"}}},
    }  # fmt: skip
    data = [{"type": "document", "document": {"data": {"a": 1}}}, {"type": "text", "text": "b"}]
    calls = [{"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    turns = [
        {"role": "assistant", "tool_calls": calls, "tool_plan": "I look."},
        {"role": "tool", "tool_call_id": "c", "content": data},
    ]
    assert as_chat({**ASKED, "messages": turns})["messages"] == [
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
        as_chat({**ASKED, **more})
    assert json.loads(found.value.body)["error"]["param"] == param


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


async def streamed(deltas: list[dict[str, Any]], pieces: int) -> list[dict[str, Any]]:
    """The events that a chat's chunks become, sent in pieces of so many bytes."""
    chunks: list[dict[str, Any]] = [
        {"id": "x", "choices": [{"delta": delta, "finish_reason": None}]} for delta in deltas
    ]
    chunks[0]["comb"] = {"documents": []}
    chunks.append({"id": "x", "choices": [{"delta": {}, "finish_reason": "stop"}]})
    chunks.append({"id": "x", "choices": [], "usage": {"prompt_tokens": 9, "completion_tokens": 2}})
    sent, out = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks).encode() + b"data: [DONE]\n\n", b""

    async def send(message: Any) -> None:
        nonlocal out
        out += message.get("body", b"")

    writer = CohereWriter(send)
    headers = [(b"content-type", b"text/event-stream; charset=utf-8")]
    await writer({"type": "http.response.start", "status": 200, "headers": headers})
    for at in range(0, len(sent), pieces):
        body = {"type": "http.response.body", "body": sent[at : at + pieces], "more_body": at + pieces < len(sent)}
        await writer(body)
    events = [event.split("\ndata: ") for event in out.decode().strip().split("\n\n")]
    found = [json.loads(data) for _, data in events]
    assert [name.removeprefix("event: ") for name, _ in events] == [each["type"] for each in found]
    return found


@pytest.mark.parametrize("pieces", [7, 100_000])
async def test_a_stream_opens_and_closes_every_part(pieces: int) -> None:
    calls = [
        {"index": 0, "id": "c", "function": {"name": "f", "arguments": ""}},
        {"index": 0, "function": {"arguments": "{}"}},
        {"index": 1, "id": "d", "function": {"name": "g", "arguments": "{}"}},
    ]
    deltas = [{"role": "assistant", "content": ""}, {"reasoning": "hm"}, {"content": "a"}, {"content": "é"}]
    found = await streamed([*deltas, *({"tool_calls": [call]} for call in calls)], pieces)
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


async def test_errors_go_as_they_are() -> None:
    server = Server()
    found = await server.client().post(COHERE, {**ASKED, "documents": [{"id": "unknown"}]})
    assert (found.status, found.json["error"]["param"]) == (404, "documents")
    server.echo.fails = True
    assert (await server.client().post(COHERE, {**ASKED, "documents": DOCUMENTS})).status >= 400
    server.check_idle()
