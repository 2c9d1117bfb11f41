"""Every route of a real server: documents are read there or refused, and tenants share nothing."""

from __future__ import annotations

import json
import socket
from typing import Any

import pytest

from comb_serving.api.routes import CHAT, COMPLETIONS, GENERATION, MESSAGES, PASSED, RESPONSES
from tests.helpers.served import QUESTION, TEXTS, Served, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": QUESTION, "max_tokens": 12},
    COMPLETIONS: {"prompt": "Where is Ada?", "max_tokens": 12},
    RESPONSES: {"input": QUESTION[0]["content"], "max_output_tokens": 12},
    MESSAGES: {"messages": QUESTION, "max_tokens": 12},
}
OTHERS = ["Cy sleeps in the hall.", *TEXTS[::-1]]


def ask(served: Served, path: str, key: str = "alice", **more: Any) -> tuple[int, Any]:
    body = {"model": "nano", "temperature": 0, **ASKED.get(path, ASKED[CHAT] | ASKED[COMPLETIONS]), **more}
    return served.request("POST", path, body, key)


def said(path: str, answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 200, body
    if path == CHAT:
        return text_of(answer)
    if path == RESPONSES:
        return "".join(part["text"] for item in body["output"] for part in item["content"])
    return str(body["content"][0]["text"] if path == MESSAGES else body["choices"][0]["text"])


def streamed(path: str, text: str) -> tuple[str, list[dict[str, Any]]]:
    """The text of a stream, and all its events."""
    lines = [line.removeprefix("data:").strip() for line in text.splitlines() if line.startswith("data:")]
    events = [json.loads(line) for line in lines if line != "[DONE]"]
    deltas = [event.get("delta") for event in events]
    if path == RESPONSES:
        return "".join(delta for delta in deltas if isinstance(delta, str)), events
    return "".join((delta or {}).get("text") or "" for delta in deltas), events


@pytest.mark.parametrize("path", [RESPONSES, MESSAGES])
def test_documents_are_read_by_the_responses_and_the_messages_api(served: Served, path: str) -> None:
    for documents, more in ((TEXTS, {}), (OTHERS, {}), (TEXTS, {"comb": {"encoder": False}})):
        expected = text_of(served.chat(documents, **more))
        found = ask(served, path, documents=documents, **more)
        assert said(path, found) == expected
        assert found[1]["comb"]["encoder"] is not bool(more)
        assert [one["state"] for one in found[1]["comb"]["documents"]] == ["inlined" if more else "hit"] * len(
            documents
        )
        status, stream = ask(served, path, documents=documents, stream=True, **more)
        assert status == 200, stream
        text, events = streamed(path, stream)
        assert text == expected
        assert [event["comb"] for event in events if "comb" in event] == [found[1]["comb"]]
        usages = [found[1]["usage"], *(event.get("response", event).get("usage") for event in events[-3:])]
        tokens = served.chat(documents, **more)[1]["usage"]["prompt_tokens"]
        counted = [usage["input_tokens"] + usage.get("cache_read_input_tokens", 0) for usage in usages if usage]
        assert counted[0] == counted[-1] == tokens
    assert text_of(served.chat(TEXTS)) != said(path, ask(served, path))
    served.wait_until_idle()


def test_the_openai_clients_responses_read_documents(served: Served) -> None:
    from openai import OpenAI

    with OpenAI(base_url=f"{served.url}/v1", api_key="alice", max_retries=0) as client:
        asked = {"model": "nano", "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
        whole = client.responses.create(**asked, extra_body={"documents": TEXTS})  # type: ignore[call-overload]
        assert whole.output_text == text_of(served.chat(TEXTS))
        assert len(whole.comb["documents"]) == len(TEXTS)
        with client.responses.stream(**asked, extra_body={"documents": TEXTS}) as stream:
            assert stream.get_final_response().output_text == whole.output_text


@pytest.mark.parametrize("path", sorted(PASSED - {"/start_profile", "/stop_profile"}))
def test_other_routes_refuse_documents_and_ask_for_a_key(served: Served, path: str) -> None:
    status, body = ask(served, path, documents=TEXTS)
    assert (status, body["error"]["param"]) == (400, "documents")
    assert ask(served, path, key="eve")[0] == 401
    assert ask(served, path, key="eve", documents=TEXTS)[0] == 401


def raw(served: Served, path: str, body: Any, *headers: str) -> bytes:
    """The first line of the answer to a request with headers as they stand here."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "host: x", "connection: close", *headers]
    if not any(header.lower().startswith("content-length") for header in headers):
        lines.append(f"content-length: {len(data)}")
    with socket.create_connection(("127.0.0.1", served.port), timeout=60) as client:
        client.sendall("\r\n".join([*lines, "", ""]).encode() + data)
        return client.makefile("rb").readline()


def test_nobody_reads_anothers_document_by_its_place(served: Served) -> None:
    assert text_of(served.chat(["The secret of Alice is 42."]))
    kind, multipart = "content-type: application/json", "content-type: multipart/form-data; boundary=x"
    bob, more = "authorization: Bearer bob", {"vllm_xargs": {"comb_docs": [22, 2, 0, 1]}}
    asked = {"model": "nano", **ASKED[CHAT], **ASKED[COMPLETIONS], **ASKED[RESPONSES]}
    for path in (*GENERATION, *PASSED):
        forged = {**asked, **more}
        assert b" 401 " in raw(served, path, forged, kind)
        assert b" 401 " in raw(served, path, asked, kind)
        assert b" 400 " in raw(served, path, forged, kind, bob)
        for headers in ((kind, multipart), (multipart, kind)):
            assert b" 400 " in raw(served, path, forged, *headers, bob)
            assert b" 400 " in raw(served, path, forged, *headers)
        assert b" 400 " in raw(served, path, forged, kind, bob, "authorization: Bearer alice")


@pytest.mark.parametrize("path", GENERATION)
def test_what_goes_around_the_prompt_is_refused_with_documents(served: Served, path: str) -> None:
    fields = {"use_beam_search": True, "truncate_prompt_tokens": 4, "background": True, "previous_response_id": "x"}
    for name, value in {**fields, "truncation": "auto"}.items():
        for more in ({}, {"stream": True}, {"comb": {"encoder": False}}, {"comb": {"encoder": False}, "stream": True}):
            status, body = ask(served, path, documents=TEXTS, **{name: value}, **more)
            assert (status, body["error"]["param"]) == (400, name)


@pytest.mark.parametrize("path", [*GENERATION, "/invocations", "/v1/chat/completions/batch"])
def test_tenants_share_no_prefix(served: Served, path: str) -> None:
    long = "Who is there, and what is it that they have? " * 8
    turn = [{"role": "user", "content": long}]
    ways = {
        RESPONSES: {"input": long},
        COMPLETIONS: {"prompt": long},
        "/v1/chat/completions/batch": {"messages": [turn]},
    }

    def cached(key: str, **more: Any) -> int:
        body = {"model": "nano", "max_tokens": 2, **ways.get(path, {"messages": turn}), **more}
        before = hits(served)
        status, found = served.request("POST", path, body, key)
        assert status == 200, found
        return int(hits(served) - before)

    name = {"cache_salt": path}  # so that no other test has asked this before
    assert cached("alice", **name) == 0
    assert cached("alice", **name) >= 64
    assert cached("bob", **name) == 0


def hits(served: Served) -> float:
    """Tokens that vLLM's prefix cache has had so far."""
    _, text = served.request("GET", "/metrics")
    rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
    return sum(float(value) for _, value in rows)
