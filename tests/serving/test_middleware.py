"""The middleware in front of a small server that says what vLLM would get."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from comb_serving.api.conversation import messages_of
from comb_serving.api.http import RequestError
from comb_serving.api.middleware import CombMiddleware
from comb_serving.api.response import ResponseWriter
from comb_serving.api.routes import CHAT, COMPLETIONS, COUNT, GENERATION, MESSAGES, PASSED, RESPONSES
from comb_serving.config.serve_options import key_hash
from comb_serving.pool.capability import KEY, Capability, digest
from tests.helpers.fakes import Client, until
from tests.helpers.middleware_server import (
    ASK,
    ASKED,
    BUILDER,
    DOCUMENTS,
    LAYOUT,
    SECRET,
    SEGMENTS,
    Server,
    chat,
    documents_of,
    ids_of,
)


async def test_documents_become_handles_and_the_prompt_is_the_builders(server: Server) -> None:
    cold = await server.chat()
    warm = await server.chat(documents=DOCUMENTS[::-1])
    first, second = server.echo.bodies
    assert "documents" not in first
    handles = documents_of(first)
    assert [handle.tokens for handle in handles] == list(map(len, SEGMENTS))
    assert documents_of(second) == handles[::-1]
    assert first["cache_salt"] != second["cache_salt"]
    assert first["kv_transfer_params"] == {"prompt_token_ids": list(BUILDER.build(ASKED).bare)}
    assert (cold.states, warm.states) == (["encoded"] * 2, ["hit"] * 2)
    documents = sum(handle.tokens for handle in handles)
    usage = warm.json["usage"]
    assert usage["prompt_tokens"] == documents + len(BUILDER.build(ASKED).bare)
    assert usage["prompt_tokens_details"]["cached_tokens"] == documents


async def test_usage_beside_a_piece_of_a_stream_is_of_its_prompt() -> None:
    writer = ResponseWriter(AsyncMock(), dict, 10, 7, prompts=2)
    usage = {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4}
    for choices, tokens, cached in (([{"index": 0, "text": "a"}], 13, 7), ([], 23, 14)):
        event = writer.event(b"data: " + json.dumps({"choices": choices, "usage": usage}).encode())
        found = json.loads(event.removeprefix(b"data: "))["usage"]
        assert (found["prompt_tokens"], found["prompt_tokens_details"]["cached_tokens"]) == (tokens, cached)


async def test_completions_take_texts_and_ids(server: Server) -> None:
    for prompt in ("Where?", ["Where?", [5, 6]], [5, 6, 7]):
        answer = await server.post(COMPLETIONS, {"prompt": prompt, "documents": DOCUMENTS[1:]})
        assert answer.status == 200, answer.body
    query = list(BUILDER.complete("Where?").bare)
    assert [body["prompt"] for body in server.echo.bodies] == [[query], [query, [5, 6]], [[5, 6, 7]]]
    answer = await server.post(COMPLETIONS, {"prompt": [[5], [6]], "documents": DOCUMENTS[1:]})
    assert answer.json["usage"]["prompt_tokens"] == 2 + 2 * len(SEGMENTS[1])


async def test_the_prefix_of_each_prompt_is_stated_with_its_documents_and_salted_for_the_tenant(server: Server) -> None:
    server.app.front().preprocessor.exact_prefix = True
    texts = [{"role": "user", "content": "Be brief."}, {"role": "assistant", "content": "I am."}]
    stated = []
    for key, text in (("alice", DOCUMENTS[1]), ("alice", "Cy sleeps."), ("bob", DOCUMENTS[1])):
        assert (await server.post("/v1/documents", {"text": text, "id": text[:2]}, key)).status == 200
        parts = [{"type": "document", "id": text[:2]}, {"type": "text", "text": " Where is Ada?"}]
        asked = [*texts, {"role": "user", "content": parts}]
        await server.post(CHAT, {"messages": asked}, key)
        stated.append(Capability.verify(server.echo.bodies[-1]["vllm_xargs"][KEY], SECRET))
    prompt = BUILDER.build(asked, (), {text[:2]: SEGMENTS[1:]})
    assert [found.prefixes for found in stated] == [(len(prompt.prefix),)] * 3
    assert stated[2].prefix_of(prompt.bare) == len(prompt.prefix) > len(BUILDER.build(ASKED, SEGMENTS).prefix)
    assert stated[0].prefix_salt == stated[1].prefix_salt != stated[2].prefix_salt
    # a prompt without documents begins alike
    await server.post(CHAT, {"messages": ASKED}, "alice")
    assert server.echo.bodies[-1]["cache_salt"] == stated[0].prefix_salt
    # where vLLM would render the messages, the prefix is known by rendering them here
    calls = {"input": [{"type": "message", "role": "user", "content": "Where?"}], "documents": DOCUMENTS}
    await server.post(RESPONSES, calls)
    assert "kv_transfer_params" in server.echo.bodies[-1]
    await server.post(COMPLETIONS, {"prompt": ["Where?", [5, 6], [7]], "documents": DOCUMENTS})
    found = Capability.verify(server.echo.bodies[-1]["vllm_xargs"][KEY], SECRET)
    assert found.prefixes == (len(BUILDER.complete("Where?", SEGMENTS).prefix), 0, 0)


async def test_without_documents_the_body_is_the_clients(server: Server) -> None:
    body = {"messages": ASKED, "temperature": 0, "cache_salt": "mine"}
    answer = await server.post(CHAT, body)
    salt = server.echo.bodies[0]["cache_salt"]
    assert server.echo.bodies == [{**body, "cache_salt": salt}]
    assert "comb" not in answer.json
    await server.post(CHAT, body, "key")
    assert server.echo.bodies[1]["cache_salt"] not in ("mine", "", salt)  # a body's salt narrows the tenant's
    await server.post("/tokenize", {"prompt": "x"})
    assert server.echo.bodies[2] == {"prompt": "x"}


FORGED = Capability("", "", (4, 1, 0), ()).sign(b"guessed")


@pytest.mark.parametrize("path", [*GENERATION, "/invocations", "/v1/chat/completions/batch"])
@pytest.mark.parametrize("name", [KEY, "kv_transfer_params", "ec_transfer_params"])
async def test_what_is_the_servers_to_say_is_refused_from_clients(path: str, name: str, server: Server) -> None:
    asked = {"messages": ASKED, "prompt": "x", "input": "x"}
    for holder in ({name: FORGED}, {"vllm_xargs": {name: FORGED}}, {"sampling_params": {"extra_args": {name: FORGED}}}):
        for kind in ("text/plain", "application/json", "multipart/form-data; boundary=x"):
            data = json.dumps({**asked, **holder}).replace("comb_docs", "\\u0063omb_docs").encode()
            answer = await server.post(path, data, kind=kind)
            assert (answer.status, answer.json["error"]["param"]) == (400, name)
    assert not server.echo.bodies


@pytest.mark.parametrize("path", sorted(PASSED))
async def test_a_route_without_documents_says_so_and_keeps_tenants_apart(path: str) -> None:
    server = Server(key_hashes=(key_hash("alice"), key_hash("bob")))
    asked = {"messages": ASKED, "prompt": "x", "cache_salt": "mine"}
    assert (await server.post(path, asked)).status == 401
    for name in ("documents", "comb"):
        answer = await server.post(path, {**asked, name: []}, "alice")
        assert (answer.status, answer.json["error"]["param"]) == (400, name)
    salts = []
    for key in ("alice", "bob", "alice"):
        assert (await server.post(path, asked, key)).status == 200
        salts.append(server.echo.bodies[-1]["cache_salt"])
    assert salts[0] == salts[2] != salts[1] != "mine"


async def test_routes_are_a_list_and_nobody_is_read_without_a_key() -> None:
    server = Server(key_hashes=(key_hash("alice"),))
    for method, path in (("POST", "/collective_rpc"), ("POST", "/v1/load_lora_adapter"), ("PUT", CHAT)):
        assert (await server.client("alice").send(method, path, chat())).status == 404
    for path in (*GENERATION, *PASSED, "/v1/documents"):
        for key in (None, "wrong"):
            assert (await server.post(path, b" " * 10**8, key)).status == 401, path
    assert (await server.client("wrong").send("GET", "/v1/documents")).status == 401
    for method, path in (("GET", "/v1/models"), ("GET", "/metrics"), ("OPTIONS", CHAT), ("POST", "/ping")):
        assert (await server.send(method, path, b'{"messages": []}')).status == 200
    assert server.echo.bodies == [{}] * 4  # without a body
    send = AsyncMock()
    await server.app({"type": "websocket", "path": "/v1/realtime", "headers": []}, AsyncMock(), send)
    send.assert_awaited_once_with({"type": "websocket.close", "code": 1008})


async def test_other_origins_are_answered_as_vllm_answers_them(server: Server) -> None:
    """What comes from here, too: a browser shows nothing else of an answer, nor of an error."""
    pytest.importorskip("starlette", reason="comes with vLLM")
    from starlette.applications import Starlette
    from starlette.middleware.cors import CORSMiddleware
    from starlette.routing import Mount

    app = Starlette(routes=[Mount("/", server.echo)])
    app.add_middleware(CORSMiddleware, allow_origins=["http://a.b"], allow_methods=["*"], allow_headers=["*"])
    app.add_middleware(CombMiddleware, front=server.app.front())
    for origin, allowed in ((b"http://a.b", "http://a.b"), (b"http://other", None)):
        own = [(b"origin", origin)]
        ahead = [*own, (b"access-control-request-method", b"POST"), (b"access-control-request-headers", b"x-mine")]
        answers = [await Client(app).send("OPTIONS", path, more=ahead) for path in (CHAT, "/v1/documents", "/v1/comb")]
        assert [answer.status for answer in answers] == [400 if allowed is None else 200] * 3
        for path, body, status in (
            (CHAT, ASK[CHAT], 200), (CHAT, chat(documents=[3]), 400), ("/v1/documents", {"text": "x"}, 200),
            ("/v1/nothing", {}, 404),
        ):  # fmt: skip
            answers.append(await Client(app).post(path, body, more=own))
            assert answers[-1].status == status
        for answer in answers:
            assert answer.headers.get("access-control-allow-origin") == allowed
            assert answer.headers["vary"].split(", ").count("Origin") == 1


@pytest.mark.parametrize("depth", [5_000, 100_000])
@pytest.mark.parametrize("path", [*GENERATION, "/invocations", "/v1/documents"])
async def test_a_body_that_is_nested_too_deeply_is_refused(path: str, depth: int, server: Server) -> None:
    answer = await server.post(path, f'{{"prompt": "x", "text": {"[" * depth + "]" * depth}}}'.encode())
    assert answer.status == 400, answer.body[:200]
    assert not server.echo.bodies


async def test_no_depth_of_a_body_makes_a_500(server: Server) -> None:
    """What json still reads it may not write any more, from deeper in the stack."""
    for depth in range(800, 1000, 2):
        nested = json.dumps(chat())[:-1] + f', "user": {"[" * depth + "]" * depth}}}'
        assert (await server.post(CHAT, nested.encode())).status in (200, 400), depth


WAYS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "Where?"}]},
    COMPLETIONS: {"prompt": "Where?"},
    RESPONSES: {"input": [{"role": "user", "content": [{"type": "input_text", "text": "Where?"}]}]},
    MESSAGES: {"messages": [{"role": "user", "content": "Where?"}], "max_tokens": 1},
}


@pytest.mark.parametrize("path", WAYS)
@pytest.mark.parametrize(("encoder", "comb"), [(True, {}), (False, {}), (True, {"encoder": False})])
async def test_each_way_to_ask_has_the_builders_prompt(path: str, encoder: bool, comb: dict[str, bool]) -> None:
    """With the encoder off, documents stand in it as method ``full`` has them."""
    server = Server(encoder=encoder)
    answer = await server.post(path, {**WAYS[path], "documents": DOCUMENTS, "comb": comb})
    assert answer.status == 200, answer.body
    (got,), encoder = server.echo.bodies, encoder and not comb
    built = (BUILDER.complete if path == COMPLETIONS else BUILDER.build)("Where?", SEGMENTS)
    ids = list(built.bare if encoder else built.flat)
    assert [ids] == (got["prompt"] if path == COMPLETIONS else [got["kv_transfer_params"]["prompt_token_ids"]])
    assert len(documents_of(got)) == len(server.encoders.asked) == (2 if encoder else 0)
    assert answer.json["comb"]["encoder"] is encoder
    found = Capability.verify(got["vllm_xargs"][KEY], SECRET)
    assert found.prompts == (digest(ids),)
    assert found.request_id
    if path == RESPONSES:  # whose name the engine takes from the body
        assert got["request_id"] == f"resp_{found.request_id}"
    assert answer.states == ["encoded" if encoder else "inlined"] * 2
    if server.manager is not None:
        server.check_idle()


def test_system_texts_stand_where_each_way_has_them() -> None:
    for path, name, system in (
        (RESPONSES, "instructions", "Be brief."),
        (MESSAGES, "system", [{"type": "text", "text": "Be brief."}]),
        (MESSAGES, "system", "Be brief."),
    ):
        first, second = messages_of(path, {**WAYS[path], name: system}) or ()
        assert (first, second["role"]) == ({"role": "system", "content": "Be brief."}, "user")
    with pytest.raises(RequestError, match="system text"):
        messages_of(MESSAGES, {**WAYS[MESSAGES], "system": [{"type": "image"}]})


async def test_a_responses_text_is_a_users_message_and_tools_are_rendered_by_vllm(server: Server) -> None:
    assert (await server.post(RESPONSES, {"input": "Where?", "documents": DOCUMENTS})).status == 200
    ids = list(BUILDER.build("Where?").bare)
    assert server.echo.bodies[0]["kv_transfer_params"] == {"prompt_token_ids": ids}
    calls = [
        (RESPONSES, {"input": [{"type": "function_call_output", "call_id": "a", "output": "x"}]}),
        (MESSAGES, {"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "a"}]}]}),
        (MESSAGES, {**WAYS[MESSAGES], "thinking": {"type": "adaptive"}}),
        (CHAT, {"messages": [*ASKED, {"role": "assistant", "tool_calls": [{"id": "a"}]}]}),
    ]
    for path, asked in calls:
        assert (await server.post(path, {**asked, "documents": DOCUMENTS})).status == 200
        got = server.echo.bodies[-1]
        assert "kv_transfer_params" not in got
        assert len(documents_of(got)) == 2


async def test_two_tenants_share_no_hit(server: Server) -> None:
    states = [(await server.chat(key)).states for key in ("alice", "bob", "alice", None)]
    assert states == [["encoded"] * 2, ["encoded"] * 2, ["hit"] * 2, ["encoded"] * 2]
    salts = [body["cache_salt"] for body in server.echo.bodies]
    assert salts[0] == salts[2]
    assert len(set(salts)) == 3
    blocks = [documents_of(body) for body in server.echo.bodies]
    assert blocks[0] == blocks[2] != blocks[1]
    assert (await server.post("/v1/documents", {"text": "secret", "id": "s"}, "alice")).status == 200
    for key, status in (("bob", 404), (None, 404), ("alice", 200)):
        assert (await server.client(key).send("GET", "/v1/documents/s")).status == status
        assert (await server.chat(key, documents=[{"id": "s"}])).status == status
        assert (await server.client(key).send("DELETE", "/v1/documents/s")).status == status


async def test_a_salt_in_a_body_narrows_what_is_found(server: Server) -> None:
    salts = (None, "one", "one", "two", None)
    found = [(await server.chat("alice", **({"cache_salt": salt} if salt else {}))).states for salt in salts]
    assert found == [["encoded"] * 2, ["encoded"] * 2, ["hit"] * 2, ["encoded"] * 2, ["hit"] * 2]
    assert (await server.chat("bob", cache_salt="one")).states == ["encoded"] * 2
    # a registered document is the key's, whoever names it
    assert (await server.post("/v1/documents", {"text": "secret", "id": "s"}, "alice")).status == 200
    assert (await server.chat("alice", documents=[{"id": "s"}], cache_salt="one")).states == ["hit"]


async def test_registered_documents(server: Server) -> None:
    client = server.client()
    made = (await client.post("/v1/documents", {"text": "Ada is here.", "title": "T", "pin": True})).json
    assert (made["state"], made["tokens"]) == ("encoded", len(ids_of("Ada is here.", "T")))
    assert (await client.post("/v1/documents", {"text": "Ada is here.", "title": "T"})).json["state"] == "hit"
    listed = (await client.send("GET", "/v1/documents")).json["data"]
    assert [item["id"] for item in listed] == [made["id"]]
    part = {"type": "document", "id": made["id"]}
    asked = chat(messages=[{"role": "user", "content": [part, {"type": "text", "text": "Where?"}]}])
    answer = await client.post(CHAT, asked)
    assert [document["id"] for document in answer.json["comb"]["documents"]][-1] == made["id"]
    assert len(answer.json["comb"]["documents"]) == 3
    assert server.echo.bodies[-1]["messages"] == [{"role": "user", "content": [{"type": "text", "text": "Where?"}]}]
    for index in range(2):
        assert (await client.post("/v1/documents", {"text": f"more {index}", "id": f"d{index}"})).status == 200
    assert (await client.post("/v1/documents", {"text": "too many"})).status == 429
    assert (await client.post("/v1/documents", {"text": "other", "id": "d0"})).status == 400
    assert (await client.send("DELETE", f"/v1/documents/{made['id']}")).json["deleted"] is True
    assert (await client.send("DELETE", f"/v1/documents/{made['id']}")).status == 404
    gone = await client.post(CHAT, asked)
    assert (gone.status, gone.json["error"]["code"]) == (404, 404)


@pytest.mark.parametrize(
    "document",
    ["Ada is here.", {"text": "Ada is here."}, {"contents": "Ada is here."}, {"snippet": "Ada is here.", "id": "a"},
     {"id": "a", "data": {"text": "Ada is here."}}, {"id": "a", "data": {"snippet": "Ada is here."}},
     {"data": "Ada is here."}, {"text": "Ada is here.", "title": None}],
)  # fmt: skip
async def test_documents_are_taken_as_clients_send_them_elsewhere(document: Any, server: Server) -> None:
    answer = await server.chat(documents=[document])
    assert answer.status == 200, answer.body
    (found,) = answer.json["comb"]["documents"]
    assert found["tokens"] == len(ids_of("Ada is here."))
    assert found["id"] == "a" or not isinstance(document, dict) or "id" not in document
    titled = await server.chat(documents=[{"title": "T", "contents": "Ada is here."}])
    assert titled.json["comb"]["documents"][0]["tokens"] == len(ids_of("Ada is here.", "T"))
    if isinstance(document, dict):
        made = await server.post("/v1/documents", document)
        assert (made.status, made.json["state"]) == (200, "hit")


async def test_quotas_of_a_tenant(server: Server) -> None:
    server.manager.held_share = server.manager.pinned_share = 0.5  # four of eight blocks
    alice, bob = server.client("alice"), server.client("bob")
    assert (await alice.post("/v1/documents", {"token_ids": [5] * 48, "id": "a", "pin": True})).status == 200
    assert (await alice.post("/v1/documents", {"token_ids": [5] * 48, "id": "a", "pin": True})).status == 200
    more = await alice.post("/v1/documents", {"token_ids": [6] * 32, "id": "b", "pin": True})
    assert (more.status, more.headers["retry-after"]) == (429, "2")
    assert "would pin 5 of 8 blocks, its share is 4" in more.json["error"]["message"]
    over = await alice.post(CHAT, chat(documents=[{"token_ids": [7] * 32}]))
    assert "would hold 5 of 8 blocks" in over.json["error"]["message"]
    assert (await alice.post(CHAT, chat(documents=[{"id": "a"}, {"token_ids": [7] * 16}]))).status == 200
    assert (await bob.post(CHAT, chat(documents=[{"token_ids": [7] * 64}]))).status == 200
    assert (await bob.post(CHAT, chat(documents=[{"token_ids": [7] * 64}, {"token_ids": [8] * 16}]))).status == 429
    assert server.manager.counters.refused == 3
    found = {key: (await client.send("GET", "/v1/comb")).json["quota"] for key, client in (("a", alice), ("b", bob))}
    block = LAYOUT.block_size * LAYOUT.bytes_per_token
    assert found["a"]["pinned_bytes"] == found["a"]["bytes"] == {"used": 3 * block, "limit": 4 * block}
    assert found["b"]["pinned_bytes"]["used"] == 0
    assert found["a"]["documents"] == {"used": 1, "limit": 3}
    assert (await alice.send("DELETE", "/v1/documents/a")).status == 200
    assert (await alice.post("/v1/documents", {"token_ids": [6] * 32, "id": "b", "pin": True})).status == 200
    server.check_idle()
    assert set(server.manager.owners) == set(server.manager.pool.entries)


async def test_a_stream_carries_the_report_in_its_first_chunk_and_usage_where_vllm_puts_it(server: Server) -> None:
    events = (await server.post(CHAT, chat(stream=True))).events
    assert events[-1] == "[DONE]"
    assert [("comb" in event) for event in events[:-1]] == [True, False, False]
    assert events[0]["choices"][0]["delta"]["content"] == "a"
    assert events[-2]["usage"]["prompt_tokens"] > len(BUILDER.build(ASKED).bare)
    assert [("usage" in event) for event in events[:-1]] == [False, False, True]
    plain = (await server.post(CHAT, {"messages": ASKED, "stream": True})).events
    assert "comb" not in json.dumps(plain)


async def test_what_an_answer_says_is_not_taken_for_the_streams_own_lines(server: Server) -> None:
    server.echo.says = 'data: {"usage": 1}\n\ndata: [DONE]'
    events = (await server.post(CHAT, chat(stream=True))).events
    assert events[0]["choices"][0]["delta"]["content"] == server.echo.says
    assert [("comb" in event) for event in events[:-1]] == [True, False, False]


async def test_an_aborted_request_keeps_its_blocks_until_the_engine_knows(server: Server) -> None:
    known = asyncio.Event()
    application = SimpleNamespace(state=SimpleNamespace(engine_client=SimpleNamespace(is_sleeping=known.wait)))

    async def with_engine(scope: Any, receive: Any, send: Any) -> None:
        await server.app({**scope, "app": application}, receive, send)

    await Client(with_engine).post(CHAT, chat())
    assert server.manager.references == 0  # an answer that is whole has left the engine
    server.echo.gate, leave = asyncio.Event(), asyncio.Event()
    streaming = asyncio.create_task(Client(with_engine).post(CHAT, chat(stream=True), leave=leave))
    await until(lambda: len(server.echo.bodies) >= 2)
    leave.set()
    await streaming
    assert server.manager.references == 2
    known.set()
    await asyncio.gather(*server.app._ending)
    known.clear()  # what ends at a text ends here, while the engine goes on
    server.echo.gate = None
    for path, name in ((CHAT, "stop"), (MESSAGES, "stop_sequences")):
        assert (await Client(with_engine).post(path, {**ASK[path], "documents": DOCUMENTS, name: ["x"]})).status == 200
        assert server.manager.references == 2
        known.set()
        await asyncio.gather(*server.app._ending)
        known.clear()


async def test_trouble_is_an_error_object_and_holds_nothing(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    client = server.client()
    server.encoders.at_once = False
    failing = asyncio.create_task(client.post(CHAT, chat(documents=["one"])))
    await until(lambda: server.encoders.open)
    server.encoders.answer(error="out of memory")
    answer = await failing
    assert (answer.status, answer.json["error"]["type"]) == (503, "InternalServerError")
    said = caplog.records[-1]
    assert ("could not be encoded: out of memory" in said.message, said.exc_info) == (True, None)  # it was foreseen
    server.encoders.at_once = True
    server.echo.fails = True
    assert (await client.post(CHAT, chat())).status == 500
    server.echo.fails = False
    server.check_idle()
    for index in range(4):
        made = await client.post("/v1/documents", {"token_ids": [index] * 32, "pin": True, "id": f"p{index}"})
    assert made.status == 429
    full = await client.post(CHAT, chat(documents=[{"token_ids": [9] * 60}]))
    assert full.status == 429
    assert int(full.headers["retry-after"]) > 0
    assert (await client.post(CHAT, chat(documents=[{"token_ids": [9] * 65}]))).status == 400
    larger = chat(documents=[{"token_ids": [number] * 64} for number in range(3)])  # than the whole pool
    assert (await client.post(CHAT, larger)).status == 400


async def test_anthropics_clients_get_errors_of_their_own_kind() -> None:
    server = Server(key_hashes=(key_hash("alice"),))
    for path in (MESSAGES, COUNT):
        for key, kind in ((None, "authentication_error"), ("alice", "invalid_request_error")):
            answer = await server.post(path, {"messages": ASKED, "max_tokens": 1, "documents": 3}, key)
            assert (answer.json["type"], answer.json["error"]["type"]) == ("error", kind)
            assert answer.json["error"]["message"]
    assert "type" not in (await server.post(CHAT, chat())).json  # others' are OpenAI's


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (chat(documents=[1]), "documents"),
        (chat(documents=[{"text": ""}]), "documents"),
        (chat(documents=[{"text": "a", "token_ids": [1]}]), "documents"),
        (chat(documents=[{"text": "a", "colour": "red"}]), "documents"),
        (chat(documents=[{"text": "a", "data": {"text": "b"}}]), "documents"),
        (chat(documents=[{"data": {"text": "a", "data": "b"}}]), "documents"),
        (chat(documents=[{"token_ids": [10**9]}]), "documents"),
        (chat(documents=[{"id": 3}]), "documents"),
        (chat(comb={"encoder": 1}), "comb"),
        (chat(comb={"other": 1}), "comb"),
        (chat(cache_salt=3), "cache_salt"),
        (chat(messages=[]), "messages"),
        (chat(messages=[{"role": "user", "content": [{"type": "image_url"}]}]), "messages"),
        (chat(messages=[{"role": "user", "content": [{"type": "text", "content": "Where?"}]}]), "messages"),
        (chat(vllm_xargs=[1]), "vllm_xargs"),
        (chat(add_generation_prompt=False), "add_generation_prompt"),
        (chat(chat_template_kwargs={"tokenize": True}), "chat_template_kwargs"),
        (chat(kv_transfer_params={"prompt_token_ids": [1]}), "kv_transfer_params"),
    ],
)
async def test_bad_requests_name_the_field(body: dict[str, Any], param: str, server: Server) -> None:
    answer = await server.post(CHAT, body)
    assert answer.status == 400, answer.body
    assert (answer.json["error"]["param"], answer.json["error"]["type"]) == (param, "BadRequestError")


@pytest.mark.parametrize("path", GENERATION)
@pytest.mark.parametrize("more", [{}, {"stream": True}, {"comb": {"encoder": False}}], ids=["whole", "stream", "off"])
async def test_what_goes_around_the_prompt_is_refused(path: str, more: dict[str, Any], server: Server) -> None:
    for name, value in {
        "echo": True, "use_beam_search": True, "truncate_prompt_tokens": 4, "truncation": "auto", "background": True,
        "previous_response_id": "x", "prompt_embeds": "x", "chat_template": "x", "continue_final_message": True,
    }.items():  # fmt: skip
        answer = await server.post(path, {**ASK[path], "documents": DOCUMENTS, name: value, **more})
        assert (answer.status, answer.json["error"]["param"]) == (400, name)
    assert not server.echo.bodies


async def test_a_body_that_is_too_large_is_refused() -> None:
    assert (await Server(max_body_bytes=300_000).post(CHAT, b" " * 300_001)).status == 413


NAMES = ["id", "text", "title", "token_ids", "role", "content", "type", "documents", "pin", "ttl_s", "encoder", KEY]
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=8,
)
FIELDS = ["prompt", "comb", "cache_salt", "vllm_xargs", "kv_transfer_params", "chat_template_kwargs", "tools", "stop"]
DOCUMENT_LISTS = VALUES | st.just(DOCUMENTS) | st.lists(VALUES, max_size=2)
OPTIONAL: Any = {"messages": VALUES | st.just(ASKED), "documents": DOCUMENT_LISTS}
BODIES = st.fixed_dictionaries({}, optional=dict.fromkeys([*FIELDS, "text", "id"], VALUES) | OPTIONAL)
ODD = [b"", b"null", b"[]", b'""', b"\xff\xfe{}", b'{"documents": ["\\udc00"]}', "\ufeff{}".encode()]
NUMBERS = st.sampled_from(["9" * 5000, "1e999", "-1e999", "NaN", "0." + "1" * 5000])
HUGE = st.builds(lambda name, number: f'{{"text": "x", "{name}": {number}}}'.encode(), st.sampled_from(NAMES), NUMBERS)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from([CHAT, COMPLETIONS, "/v1/documents", "/v1/documents/x"]),
    BODIES | st.binary(max_size=40) | st.sampled_from(ODD) | HUGE,
)
async def test_no_body_makes_a_500(path: str, body: Any) -> None:
    server = Server()
    answer = await server.post(path, body)
    assert (answer.status or 500) < 500, answer.body
    assert answer.status == 200 or answer.json["error"]["message"]
    server.check_idle()


@pytest.mark.parametrize("encoder", [True, False])
async def test_health_covers_the_encoder_where_it_is_needed(encoder: bool) -> None:
    faults: list[str | None] = ["it is broken", None]
    server = Server(encoder=encoder, processes=SimpleNamespace(fault=lambda: faults.pop(0)))
    broken = await server.send("GET", "/health")
    assert (broken.status, "it is broken" in str(broken.body)) == (503 if encoder else 200, encoder)
    assert not encoder or broken.json["error"]["code"] == 503
    assert (await server.send("GET", "/health")).status == 200
