"""Requests of a plain model: documents stand in the prompt, and vLLM is told where and how to link them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from comb.documents.found import SegmentFinder
from comb_serving.api.routes import CHAT, COMPLETIONS, SWITCH
from comb_serving.config.serve_options import key_hash
from comb_serving.manager.sightings import Sightings
from comb_serving.pool.capability import KEY, MARK, Capability, LinkReport, digest, name_of, unpack
from tests.helpers.fakes import until
from tests.helpers.middleware_server import ASKED, BUILDER, DOCUMENTS, LAYOUT, SECRET, SEGMENTS, Server, ids_of

METHOD = "legolink:4"


def plain(method: str = METHOD, **options: Any) -> Server:
    return Server(method=method, **options)


def capability_of(body: dict[str, Any]) -> Capability:
    found = Capability.verify(body["vllm_xargs"][KEY], SECRET)
    assert found.salt == body.get("cache_salt", "")
    assert not found.salt.startswith(MARK)
    return found


def documents_at(found: Capability, prompts: list[list[int]]) -> list[list[tuple[int, ...]]]:
    """What stands in each prompt where its documents are said to be."""
    assert list(found.prompts) == [digest(prompt) for prompt in prompts]
    return [[tuple(prompt[start : start + tokens]) for start, tokens in found.spans_in(prompt)] for prompt in prompts]


async def test_documents_stand_in_the_prompt_and_their_places_are_signed() -> None:
    server = plain()
    cold, warm = [await server.chat("key") for _ in range(2)]
    got, again = server.echo.bodies
    ids = list(BUILDER.build(ASKED, SEGMENTS).flat)
    assert got["kv_transfer_params"] == {"prompt_token_ids": ids}
    found = capability_of(got)
    assert found.method == METHOD
    assert documents_at(found, [ids]) == [SEGMENTS]
    handles = unpack(found.documents, LAYOUT)
    assert [handle.tokens for handle in handles] == [len(segment) for segment in SEGMENTS]
    assert capability_of(again).documents == found.documents
    assert (cold.states, warm.states) == (["compiled"] * 2, ["hit"] * 2)
    assert cold.json["comb"]["method"] == METHOD
    # vLLM counts what stands in its prompt
    assert cold.json["usage"] == warm.json["usage"] == {**warm.json["usage"], "prompt_tokens": len(ids)}
    server.check_idle()


async def test_a_prompt_without_documents_shares_the_salt_with_those_that_have_some() -> None:
    server = plain()
    for key in ("alice", "bob"):
        await server.chat(key)
        await server.post(CHAT, {"messages": ASKED}, key)
        await server.chat(key, comb={"method": "full"})
    salts = [body["cache_salt"] for body in server.echo.bodies]
    assert salts[0] == salts[1] == salts[2] != salts[3] == salts[4] == salts[5]


@pytest.mark.parametrize(
    ("method", "more"),
    [(METHOD, {"comb": {"method": "full"}}), ("full", {}), (METHOD, {"prompt_logprobs": 0})],  # of every token
)
async def test_full_is_plain_vllm(method: str, more: dict[str, Any]) -> None:
    server = plain(method)
    answer = await server.chat(**more)
    (got,) = server.echo.bodies
    ids = list(BUILDER.build(ASKED, SEGMENTS).flat)
    assert got["kv_transfer_params"]["prompt_token_ids"] == ids
    found = capability_of(got)  # for no other prompt
    assert (found.prompts, found.documents, found.spans) == ((digest(ids),), (), ())
    assert answer.json["comb"]["method"] == "full"
    assert answer.states == ["inlined", "inlined"]
    assert server.encoders.asked == []


async def test_documents_that_a_prompt_has_no_room_for_are_refused() -> None:
    refused = await plain(max_tokens=20).chat(documents=[{"token_ids": [7] * 12}] * 2)
    assert (refused.status, "the model's context length is 20" in refused.json["error"]["message"]) == (400, True)


async def test_where_no_segment_is_linked_vllm_gets_what_came() -> None:
    server = plain(segments="auto")
    finder = SegmentFinder(BUILDER.tokenizer, least=8)
    server.app.front().preprocessor.sightings = Sightings(server.manager, finder, lambda: True)
    passages = "\n\n".join(f"Passage {n}: {text * 3}" for n, text in enumerate(("Ada is here. ", "Bob is there. ")))
    asked = {"messages": [{"role": "user", "content": passages}]}
    for _ in range(2):
        assert "comb" not in (await server.post(CHAT, asked)).json
    await until(lambda: server.manager.counters.documents["compiled"])
    await server.post(CHAT, asked)
    assert server.echo.bodies[:2] == [asked] * 2
    assert capability_of(server.echo.bodies[2]).found


async def test_completions_have_places_for_each_prompt() -> None:
    server = plain()
    texts: list[Any] = ["Where is Ada?", [5, 6, 7]]
    assert (await server.post(COMPLETIONS, {"prompt": texts, "documents": DOCUMENTS})).status == 200
    (got,) = server.echo.bodies
    prompts = got["prompt"]
    assert documents_at(capability_of(got), prompts) == [SEGMENTS] * 2
    documents = [token for segment in SEGMENTS for token in segment]
    assert prompts[0] == list(BUILDER.complete(texts[0], SEGMENTS).flat)
    assert prompts[1] == [*documents, 5, 6, 7]


async def test_documents_inside_messages_are_found_where_they_stand() -> None:
    server = plain()
    await server.post("/v1/documents", {"text": "Cy sleeps.", "id": "cy"})
    parts = [{"type": "text", "text": "First: "}, {"type": "document", "id": "cy"}, {"type": "text", "text": " Who?"}]
    answer = await server.chat(messages=[{"role": "user", "content": parts}])
    (got,) = server.echo.bodies
    ids = got["kv_transfer_params"]["prompt_token_ids"]
    assert documents_at(capability_of(got), [ids]) == [[*SEGMENTS, ids_of("Cy sleeps.")]]
    assert answer.states == ["compiled", "compiled", "hit"]


async def test_a_request_chooses_among_methods_that_share_documents() -> None:
    server = plain()
    for name, meant in (("naive", "naive"), ("legolink", "legolink:16"), ("legolink:k=2", "legolink:2")):
        answer = await server.chat(comb={"method": name})
        assert capability_of(server.echo.bodies[-1]).method == answer.json["comb"]["method"] == meant
    assert len(server.encoders.asked) == 2
    behind = plain("legolink-0")
    assert (await behind.chat(comb={"method": "naive,front=dummies:4"})).status == 200
    for asked, comb, message in (
        (server, {"method": "legolink-0"}, "ask for naive, legolink:k or full"),
        (behind, {"method": "naive"}, "ask for legolink-0 or full"),
        (server, {"method": "cacheblend"}, "vLLM links documents with"),
        (server, {"method": "focus:0.1"}, "start the server with --method focus:0.1"),
        (server, {"method": "nonsense"}, "unknown method"),
        (server, {"method": 4}, "expected"),
        (server, {"method": "naive", "more": 1}, "expected"),
        (server, "naive", "comb is an object"),
        (server, {"encoder": False}, 'plain model and no encoder: choose with {"method": "full"}'),
        (Server(), {"method": "naive"}, 'an adapter, which is the method: choose with {"encoder": false}'),
    ):
        refused = await asked.chat(comb=comb)
        assert (refused.status, refused.json["error"]["param"]) == (400, "comb")
        assert message in refused.json["error"]["message"]


async def test_the_method_is_switched_for_requests_that_name_none() -> None:
    server = plain(admin_hash=key_hash("boss"))
    admin = server.client("boss")
    state = (await admin.post(SWITCH, {"method": "naive"})).json
    assert (state["method"], state["switchable"]) == ("naive", True)
    assert (await server.chat()).json["comb"]["method"] == "naive"
    assert (await server.chat(comb={"method": METHOD})).json["comb"]["method"] == METHOD
    await admin.post(SWITCH, {"method": "full"})
    for comb in ({}, {"method": METHOD}):  # a request can't switch it on
        answer = await server.chat(comb=comb)
        assert (answer.json["comb"]["method"], answer.states) == ("full", ["inlined"] * 2)
    for body in ({"encoder": True}, {"method": "legolink-0"}, {}):
        assert (await admin.post(SWITCH, body)).status == 400
    await admin.post(SWITCH, {"method": METHOD})
    assert (await server.chat()).states == ["hit"] * 2
    off = plain("full", admin_hash=key_hash("boss"))
    assert (await off.post(SWITCH, {"method": "naive"}, "boss")).status == 409


@pytest.mark.parametrize("why", ["full", "pinned", "quota", "too large", "not compiled"])
async def test_documents_that_find_no_place_are_computed_with_the_prompt(why: str) -> None:
    server = plain(tenant_share=0.1) if why == "quota" else plain()
    documents: list[Any] = DOCUMENTS
    held = None
    if why == "full":  # a request holds the whole pool, until the gate opens
        server.echo.gate = asyncio.Event()
        held = asyncio.create_task(server.chat(documents=[{"token_ids": [n] * 64} for n in (7, 8)], stream=True))
        await until(lambda: server.manager.references)
    elif why == "pinned":
        await server.post("/v1/documents", {"token_ids": [7] * 64, "pin": True})
        await server.post("/v1/documents", {"token_ids": [8] * 60, "pin": True})
    elif why == "too large":
        documents = [{"token_ids": [9 + place] * 64} for place in range(3)]
    elif why == "not compiled":
        server.encoders.at_once = False
    task = asyncio.create_task(server.chat(documents=documents))
    if why == "not compiled":
        await until(lambda: len(server.encoders.open) == 2)
        server.encoders.answer(error="no")
        server.encoders.answer()
    answer = await task
    assert answer.states == ["inlined"] * len(documents)
    assert answer.json["comb"]["method"] == "full"
    assert capability_of(server.echo.bodies[-1]).documents == ()
    assert (server.manager.counters.refused, server.manager.counters.documents["hit"]) == (0, 0)
    if held is not None:
        server.echo.gate.set()
        await held
    server.check_idle()


async def test_pins_are_refused_rather_than_forgotten() -> None:
    server = plain(tenant_pinned_share=0.25)
    answer = await server.post("/v1/documents", {"token_ids": [7] * 64, "pin": True})
    assert answer.status == 429
    made = await server.post("/v1/documents", {"token_ids": [7] * 32, "pin": True, "id": "x"})
    assert (made.json["state"], made.json["cached"]) == ("compiled", True)
    assert (await server.chat(documents=[{"id": "x"}])).states == ["hit"]


@pytest.mark.parametrize("stream", [False, True])
async def test_what_the_engine_says_is_in_the_answer_the_log_and_the_metrics(
    told: Any, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    receiver, sender = told
    server = plain(reports=receiver)
    said = {"prefix_tokens": 3, "linked_tokens": 20, "computed_tokens": 11}

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        async def admitted(message: Any) -> None:
            body = server.echo.bodies[-1]
            if KEY in body.get("vllm_xargs", {}):
                sender.send(name_of(body["vllm_xargs"][KEY]), LinkReport(**said))
            await send(message)

        await server.echo(scope, receive, admitted)

    server.app.app = engine
    with caplog.at_level("INFO", logger="comb_serving"):
        answer = await server.chat(stream=stream)
    comb = answer.events[0]["comb"] if stream else answer.json["comb"]
    assert {name: comb.get(name) for name in said} == said
    found = [json.loads(line.removeprefix("request ")) for line in caplog.messages if line.startswith("request {")]
    assert [line["linked_tokens"] for line in found] == [20]
    prompts = {"prompt": ["a", "b"], "documents": DOCUMENTS}  # of which of them, nobody knows
    assert "linked_tokens" not in (await server.post(COMPLETIONS, prompts)).json["comb"]
    counted = server.manager.counters.prompt_tokens
    assert counted == {(METHOD, "prefix"): 3, (METHOD, "linked"): 20, (METHOD, "computed"): 11}
    assert server.sample("prompt_tokens_total", method=METHOD, origin="computed") == 11
    for number in range(20, 25):  # no client makes new series
        await server.chat(comb={"method": f"legolink:{number},front=none"})
    assert {method for method, _ in counted} == {METHOD, "legolink"}
    assert counted["legolink", "linked"] == 100
    assert server.sample("documents_total", state="compiled") == server.sample("compile_seconds_count") == 2
    assert server.sample("method", method=METHOD) == 1
    assert server.sample("encoder_enabled") is server.sample("encode_seconds_count") is None


async def test_requests_of_one_name_at_one_time_have_a_report_each(told: Any) -> None:
    receiver, sender = told
    server, both = plain(reports=receiver), asyncio.Barrier(2)

    async def engine(scope: Any, receive: Any, send: Any) -> None:
        async def admitted(message: Any) -> None:
            if message["type"] == "http.response.start":
                sender.send(name_of(server.echo.bodies[-1]["vllm_xargs"][KEY]), LinkReport(3, 20, 11))
                await both.wait()
            await send(message)

        await server.echo(scope, receive, admitted)

    server.app.app = engine
    body = {"messages": ASKED, "documents": DOCUMENTS}
    asked = (server.post(CHAT, body, more=[(b"x-request-id", b"same")]) for _ in range(2))
    assert [answer.json["comb"].get("linked_tokens") for answer in await asyncio.gather(*asked)] == [20, 20]
