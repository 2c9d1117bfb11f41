"""What a client may send without taking anything from others: sizes, spellings, encodings, many at once."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from comb_serving.api.routes import CHAT, COMPLETIONS, GENERATION, MESSAGES, RESPONSES
from comb_serving.config.serve_options import key_hash
from tests.helpers.fakes import until
from tests.helpers.middleware_server import ASK, ASKED, DOCUMENTS, LAYOUT, Server, chat

REGISTER = "/v1/documents"


@asynccontextmanager
async def others_are_served(seconds: float = 1.0) -> AsyncIterator[None]:
    """While the block runs, the event loop computes no longer than that at a stretch, nor waits much longer."""
    longest = waited = 0.0

    async def tick() -> None:
        nonlocal longest, waited
        while True:
            start, busy = time.monotonic(), time.thread_time()
            await asyncio.sleep(0.01)
            longest, waited = max(longest, time.thread_time() - busy), max(waited, time.monotonic() - start)

    ticking = asyncio.create_task(tick())
    await asyncio.sleep(0.02)
    try:
        yield
        await asyncio.sleep(0.02)
    finally:
        ticking.cancel()
    assert longest < seconds
    assert waited < 5 * seconds  # for locks; on a busy machine for others, too


LONG = "Ada goes on and on. " * 200_000
SAID = [{"role": "user", "content": LONG}]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"messages": SAID}),
        (CHAT, {"messages": SAID, "documents": DOCUMENTS}),
        (CHAT, chat(documents=[LONG])),
        (CHAT, chat(documents=[{"title": LONG, "text": "x"}])),
        (CHAT, chat(documents=[{"data": {"snippet": LONG}}])),
        (CHAT, chat(documents=[LONG], comb={"encoder": False})),
        (CHAT, chat(documents=[LONG[i : i + 900] for i in range(0, 3_000_000, 900)], comb={"encoder": False})),
        (CHAT, chat(tools=[{"type": "function", "function": {"name": "f", "description": LONG}}])),
        (CHAT, chat(messages=[*ASKED, {"role": LONG, "content": "x"}])),
        (COMPLETIONS, {"prompt": LONG, "documents": DOCUMENTS}),
        (COMPLETIONS, {"prompt": ["short", LONG]}),
        (RESPONSES, {"input": LONG, "documents": DOCUMENTS}),
        (RESPONSES, {"input": "x", "instructions": LONG, "documents": DOCUMENTS}),
        (MESSAGES, {**ASK[MESSAGES], "system": [{"type": "text", "text": LONG}], "documents": DOCUMENTS}),
        (REGISTER, {"text": LONG}),
        (REGISTER, {"text": "x", "title": LONG}),
        ("/tokenize", {"prompt": LONG}),
        ("/v1/messages/count_tokens", {"messages": SAID}),
        ("/v1/chat/completions/batch", {"messages": [SAID]}),
    ],
    ids=range(19),
)
async def test_a_text_that_no_prompt_has_room_for_is_refused_unread(path: str, body: dict[str, Any]) -> None:
    server, data = Server(max_tokens=512), json.dumps(body).encode()
    start = time.process_time()
    async with others_are_served():
        answer = await server.post(path, data)
    assert (answer.status, "characters" in answer.json["error"]["message"]) == (400, True), answer.body[:300]
    assert time.process_time() - start < 2  # it takes seconds to tokenise
    assert not server.echo.bodies
    server.check_idle()


@pytest.mark.parametrize("where", ["body", "document", "comb", "message", "vllm_xargs", "document id"])
async def test_a_name_of_megabytes_takes_nobodys_time(where: str) -> None:
    name = "documents" * 1_600_000
    named: dict[str, dict[str, Any]] = {
        "body": {**chat(), name: 1},
        "document": chat(documents=[{"text": "x", name: 1}]),
        "document id": chat(documents=[{"text": "x", "id": name}]),
        "comb": chat(comb={name: 1}),
        "message": chat(messages=[{**ASKED[0], name: 1}]),
        "vllm_xargs": chat(vllm_xargs={name: 1}),
    }
    server, data = Server(max_tokens=10**6, encoder=False), json.dumps(named[where]).encode()
    async with others_are_served():
        assert (await server.post(CHAT, data)).status in (200, 400)


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, chat(documents=["x"] * 480_000), "documents"),
        (CHAT, chat(documents=[{"id": "x"}] * 240_000), "documents"),
        (CHAT, chat(messages=[{"role": "user", "content": "x"}] * 100_000), "messages"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}] * 100_000}, "messages"),
        (MESSAGES, chat(messages=[{"role": "user", "content": "x"}] * 100_000), "messages"),
        (RESPONSES, {"input": [{"role": "user", "content": "x"}] * 100_000, "documents": ["x"]}, "input"),
        (CHAT, chat(messages=[{"role": "user", "content": [{"type": "document", "id": "x"}] * 100_000}]), "messages"),
        (CHAT, chat(tools=[{"type": "function"}] * 100_000), "tools"),
        (COMPLETIONS, {"prompt": ["x"] * 100_000, "documents": ["x"]}, "prompt"),
        (COMPLETIONS, {"prompt": [[5]] * 100_000}, "prompt"),
        (COMPLETIONS, {"prompt": [[5]] * 1000, "documents": [{"token_ids": [5] * 2000}]}, "prompt"),
        (CHAT, {**dict.fromkeys(map(str, range(100_000)), 0), **chat()}, None),
    ],
    ids=range(12),
)
async def test_very_many_of_something_are_refused_at_once(path: str, body: dict[str, Any], param: str | None) -> None:
    server, data = Server(max_tokens=10**6, encoder=False), json.dumps(body).encode()
    async with others_are_served():
        answer = await server.post(path, data)
    assert (answer.status, answer.json["error"]["param"]) == (400, param), answer.body[:300]
    assert not server.echo.bodies


async def test_nobody_waits_for_a_long_text_and_it_ends_with_its_client() -> None:
    server, leave = Server(max_tokens=10**7, encoder=False), asyncio.Event()
    long = asyncio.create_task(server.post(CHAT, chat(documents=[LONG]), "a", leave=leave))
    await asyncio.sleep(0.1)
    for path, asked in ASK.items():
        assert (await server.post(path, {**asked, "documents": DOCUMENTS}, "b")).status == 200
    assert not long.done()
    leave.set()
    assert (await long).status is None
    start = time.monotonic()  # another long one finds the thread free
    assert (await server.chat("b", documents=["Ada. " * 21_000])).status == 200
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("limit", ["share", "number"])
async def test_many_registrations_at_once_get_no_more_than_one_by_one(limit: str) -> None:
    server = Server(layout=replace(LAYOUT, num_blocks=240), tenant_pinned_share=0.25)
    preprocessor = server.app.front().preprocessor
    preprocessor.max_documents = 1000 if limit == "share" else 7
    pins = [{"token_ids": [number + 1] * 16, "id": f"d{number}", "pin": limit == "share"} for number in range(120)]
    statuses = [each.status for each in await asyncio.gather(*(server.post(REGISTER, pin, "alice") for pin in pins))]
    assert (statuses.count(200), statuses.count(429)) == ((60, 60) if limit == "share" else (7, 113))
    quota = (await server.client("alice").send("GET", "/v1/comb")).json["quota"]
    assert quota["pinned_bytes"]["used"] <= quota["pinned_bytes"]["limit"]
    assert quota["documents"]["used"] == statuses.count(200)
    server.check_idle()


async def test_one_id_never_stands_for_two_texts_that_come_at_once(server: Server) -> None:
    server.encoders.at_once = False
    texts = ["Ada is here.", "Bob is there."]
    asked = [asyncio.create_task(server.post(REGISTER, {"id": "d", "text": text})) for text in texts]
    await until(lambda: len(server.encoders.open) == 2)
    for _ in texts:
        server.encoders.answer()
    assert sorted([(await one).status or 0 for one in asked]) == [200, 400]


@pytest.mark.parametrize("keys", [(), (key_hash("k"), key_hash("other"))])
async def test_a_key_is_one_tenant_however_its_header_is_written(keys: tuple[str, ...]) -> None:
    server = Server(key_hashes=keys)
    spellings = [b"Bearer k", b"bearer k", b"BEARER k", *([] if keys else [b"Bearer  k", b"Bearer k ", b" bearer  k"])]
    states, salts = [], set()
    for spelling in spellings:
        states += (await server.post(CHAT, chat(), more=[(b"authorization", spelling)])).states[:1]
        salts.add(server.echo.bodies[-1]["cache_salt"])
    assert states == ["encoded", *["hit"] * (len(spellings) - 1)]
    assert len(salts) == len(set(server.manager.owners.values())) == 1
    lower = [(b"authorization", b"bearer k")]
    assert (await server.post(REGISTER, {"text": "x", "id": "d"}, more=lower)).status == 200
    assert (await server.client("k").send("GET", f"{REGISTER}/d")).status == 200
    for other in (b"Bearer K", b"Basic k", b"k", b"Bearerk", b"Bearer\tk", b"Bearer", b""):
        answer = await server.client().send("GET", f"{REGISTER}/d", more=[(b"authorization", other)])
        assert answer.status == (401 if keys else 404), other


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("documents", value) for value in ({}, "", 0, False, True, "text", {"text": "x"})],
        *[("comb", value) for value in ([], "", 0, False)],
        *[(name, ["x"]) for name in ("Documents", "DOCUMENTS", "document", "docs", "documets", "documents ", "Comb")],
        ("extra_body", {"documents": ["x"]}),
        ("vllm_xargs", {"documents": ["x"]}),
        ("chat_template_kwargs", {"documents": ["x"]}),
    ],
)
async def test_what_is_meant_for_documents_is_never_ignored(path: str, name: str, value: Any, server: Server) -> None:
    answer = await server.post(path, {**ASK[path], name: value})
    assert (answer.status, answer.json["error"]["param"]) == (400, name), answer.body
    assert not server.echo.bodies
    for nothing in ([], None):
        assert (await server.post(path, {**ASK[path], "documents": nothing})).status == 200


def test_no_field_of_vllms_is_taken_for_one_of_ours() -> None:
    pytest.importorskip("vllm")
    from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
    from vllm.entrypoints.openai.completion.protocol import CompletionRequest
    from vllm.entrypoints.openai.responses.protocol import ResponsesRequest

    from comb_serving.api.fields import check_names

    for kind in (AnthropicMessagesRequest, ChatCompletionRequest, CompletionRequest, ResponsesRequest):
        check_names(dict.fromkeys(kind.model_fields))


@pytest.mark.parametrize("path", [*GENERATION, "/tokenize", REGISTER])
async def test_no_header_or_path_makes_a_500(path: str, server: Server) -> None:
    body = {"text": "x"} if path == REGISTER else ASK.get(path, {"prompt": "x"})
    for name in (b"x-request-id", b"X-Request-ID", b"authorization", b"content-type", b"content-length"):
        answer = await server.post(path, body, more=[(name.lower(), b"1"), (name, b"2")])
        assert (answer.status, "is given" in answer.json["error"]["message"]) == (400, True)
    assert not server.echo.bodies
    for value in (b"\xff\xfe", b"", b"x" * 100_000, b"\xf0\x9f\x98\x80", b"a\x00b", b"a b\tc"):
        assert (await server.post(path, body, more=[(b"x-request-id", value)])).status == 200
        assert (await server.post(path, body, more=[(b"authorization", value)])).status == 200
    for odd in ("\ufffd", "", " ", "..", "a/b", "\x00", "😀" * 5000):
        for method in ("GET", "DELETE"):
            assert (await server.send(method, f"{REGISTER}/{odd}")).status in (200, 404, 405)


HALVES = ["\ud800", "\udfff", "x\ud83dx", "\ude00\ud83d"]


@pytest.mark.parametrize("encoding", ["escapes", "utf-8", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le"])
@pytest.mark.parametrize("half", HALVES)
async def test_half_a_surrogate_pair_is_refused_in_every_encoding(encoding: str, half: str, server: Server) -> None:
    def encoded(body: Any) -> bytes:
        text = json.dumps(body, ensure_ascii=encoding == "escapes")
        return text.encode("utf-8" if encoding == "escapes" else encoding, "surrogatepass")

    for body in ({"text": "x", "id": half}, {"text": half}, {"text": "x", "title": half}, {"text": "x", half: 1}):
        assert (await server.post(REGISTER, encoded(body))).status == 400
    for path, asked in ASK.items():
        of_documents = {"documents": [half]}, {"documents": [{"id": half, "text": "x"}]}
        for more in ({"user": half}, {"user": [half]}, *of_documents):
            assert (await server.post(path, encoded({**asked, **more}))).status == 400
    assert (await server.post(REGISTER, encoded({"text": "😀", "id": "😀 \\ud800"}))).status == 200
    assert (await server.send("DELETE", f"{REGISTER}/😀 \\ud800")).status == 200


@pytest.mark.parametrize(
    "text", ["," * 600_000, "1,2\n" * 600_000, "[" * 600_000, '"' * 300_000 + "," * 600_000, '\\",' * 600_000,
             "\\" * 300_001 + "{" * 600_000], ids=range(6)
)  # fmt: skip
async def test_tables_and_code_are_texts_and_not_values(text: str) -> None:
    server = Server(encoder=False, max_tokens=None)
    start = time.monotonic()
    answer = await server.post(CHAT, {"messages": [{"role": "user", "content": text}]})
    assert answer.status == 200, answer.body[:300]
    assert server.echo.bodies[-1]["messages"][0]["content"] == text
    assert time.monotonic() - start < 5


@pytest.mark.parametrize(
    "values",
    [b"[]," * 600_000 + b"[]", b'"",' * 600_000 + b'"x"', b"1," * 600_000 + b"1", b'{"a":"\\\\"},' * 600_000 + b"1"],
)
async def test_very_many_values_are_refused_whatever_they_are(values: bytes, server: Server) -> None:
    async with others_are_served():
        answer = await server.post(CHAT, b'{"documents": [' + values + b"1]}")
    assert (answer.status, "more than 500000 values" in answer.json["error"]["message"]) == (413, True)


async def test_what_no_template_writes_out_takes_no_room() -> None:
    server = Server(max_tokens=64)
    sealed = [{"type": "thinking", "thinking": "x", "signature": "s" * 100_000}]
    turns = [
        {"role": "assistant", "content": sealed},
        {"role": "user", "content": [{"type": "image_url", "image_url": LONG}]},
    ]
    assert (await server.post(MESSAGES, {**ASK[MESSAGES], "messages": turns})).status == 200
