"""Who asks: the official `openai` client, and two tenants that must not learn of each other."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.served import QUESTION, TEXTS, Served, states, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LONG_QUESTION = [{"role": "user", "content": "Where is Ada? " * 24}]
OFF = {"encoder": False}


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{served.url}/v1", api_key="alice", max_retries=0) as found:
        yield found


def chat(client: Any, documents: Any, **more: Any) -> Any:
    extra = {"documents": documents, **more.pop("extra", {})}
    return client.chat.completions.create(
        model="nano", messages=QUESTION, temperature=0, max_tokens=12, extra_body=extra, **more
    )


@pytest.mark.parametrize("extra", [{}, {"comb": OFF}])
def test_the_openai_client_gets_answers_and_streams(served: Served, client: Any, extra: dict[str, Any]) -> None:
    expected = text_of(served.chat(TEXTS, **extra))
    whole = chat(client, TEXTS, extra=extra)
    assert whole.choices[0].message.content == expected
    assert whole.comb["encoder"] is not bool(extra)
    assert [one["state"] for one in whole.comb["documents"]] == ["inlined" if extra else "hit"] * 3
    tokens = sum(one["tokens"] for one in whole.comb["documents"])
    assert whole.usage.prompt_tokens > tokens
    if not extra:
        assert whole.usage.prompt_tokens_details.cached_tokens >= tokens
    chunks = list(chat(client, TEXTS, extra=extra, stream=True, stream_options={"include_usage": True}))
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == expected
    assert [chunk.comb for chunk in chunks if hasattr(chunk, "comb")] == [whole.comb]
    assert [chunk.usage.prompt_tokens for chunk in chunks if chunk.usage][-1] == whole.usage.prompt_tokens
    assert expected != text_of(served.chat([]))


def test_the_openai_client_completes(client: Any) -> None:
    extra = {"documents": [{"title": "T", "text": TEXTS[0]}]}
    asked: dict[str, Any] = {"model": "nano", "prompt": "Where is Ada?", "temperature": 0, "max_tokens": 8}
    whole = client.completions.create(**asked, extra_body=extra)
    chunks = list(client.completions.create(**asked, extra_body=extra, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text
    assert whole.choices[0].text != client.completions.create(**asked).choices[0].text


def test_the_anthropic_client_sends_documents_in_its_messages(served: Served) -> None:
    from anthropic import Anthropic, BadRequestError

    text = "Olive left her umbrella in the attic."
    kept = {"type": "ephemeral", "ttl": "5m"}
    source = {"type": "text", "media_type": "text/plain", "data": text}
    question = {"type": "text", "text": QUESTION[0]["content"]}

    def asked(**more: Any) -> dict[str, Any]:
        parts = [{"type": "document", "source": source, **more}, question]
        messages = [{"role": "user", "content": parts}]
        return {"model": "nano", "max_tokens": 12, "extra_body": {"temperature": 0}, "messages": messages}

    with Anthropic(base_url=served.url, auth_token="alice", max_retries=0) as client:
        first, again = (client.messages.create(**asked(cache_control=kept)) for _ in range(2))
        expected = text_of(served.chat([text]))
        assert first.content[0].text == again.content[0].text == expected
        assert expected != text_of(served.chat([]))
        usages = [
            (one.usage.input_tokens, one.usage.cache_read_input_tokens, one.usage.cache_creation_input_tokens)
            for one in (first, again)
        ]
        (document,) = first.comb["documents"]
        cached = f"cached-{document['id']}"
        assert usages[0][2] == document["tokens"]
        assert usages[1][2] == 0
        assert sum(usages[0]) == sum(usages[1]) == served.chat([text])[1]["usage"]["prompt_tokens"]
        assert cached in [each["id"] for each in served.request("GET", "/v1/documents")[1]["data"]]
        with client.messages.stream(**asked()) as stream:
            assert "".join(stream.text_stream) == expected
            assert stream.get_final_message().usage.cache_creation_input_tokens == 0
        with pytest.raises(BadRequestError, match="can't have citations"):
            client.messages.create(**asked(citations={"enabled": True}))
    assert served.request("DELETE", f"/v1/documents/{cached}")[0] == 200
    served.wait_until_idle()


def test_the_cohere_client_sends_documents(served: Served) -> None:
    from cohere import ClientV2
    from cohere.core import ApiError

    texts = ["Otto plays the tuba.", "Pia reads in the tree."]
    documents = [{"id": str(place), "data": {"text": text}} for place, text in enumerate(texts)]
    asked: dict[str, Any] = {"model": "nano", "messages": QUESTION, "documents": documents, "temperature": 0.0,
                             "max_tokens": 12}  # fmt: skip
    client = ClientV2(api_key="alice", base_url=f"{served.url}/cohere")
    whole = client.chat(**asked)
    expected = served.chat(texts)
    assert whole.message.content[0].text == text_of(expected)
    assert text_of(expected) != text_of(served.chat([]))
    assert whole.usage.tokens.input_tokens == expected[1]["usage"]["prompt_tokens"]
    events = list(client.chat_stream(**asked))
    assert "".join(event.delta.message.content.text for event in events if event.type == "content-delta") == text_of(
        expected
    )
    assert events[-1].delta.finish_reason == whole.finish_reason
    with pytest.raises(ApiError, match="no model here marks"):
        client.chat(**asked, citation_options={"mode": "FAST"})
    served.wait_until_idle()


def test_errors_are_the_openai_clients_own(served: Served, client: Any) -> None:
    import openai

    def raised(kind: type[openai.APIStatusError], documents: Any, client: Any = client, **more: Any) -> Any:
        for stream in (False, True):
            with pytest.raises(kind) as found:
                chat(client, documents, stream=stream, **more)
        return found.value

    missing = raised(openai.NotFoundError, [{"id": "nothing"}])
    assert (missing.status_code, missing.param, missing.type) == (404, "documents", "NotFoundError")
    assert "POST /v1/documents" in missing.message
    assert raised(openai.BadRequestError, "a text").param == "documents"
    assert raised(openai.BadRequestError, [], extra={"comb": 3}).param == "comb"
    raised(openai.BadRequestError, [{"token_ids": [5] * 3000}])
    raised(openai.AuthenticationError, TEXTS, client.with_options(api_key="eve"))
    pinned = []
    try:
        for number in range(40):  # until the pool is full of what can't go
            body = {"token_ids": [5 + number] * 200, "id": f"pinned-{number}", "pin": True}
            key = ("alice", "bob")[number % 2]  # each may pin its half
            status, made = served.request("POST", "/v1/documents", body, key)
            if status != 200:
                break
            pinned.append((made["id"], key))
        assert status == 429, made
        # neither has room for one more in its half, so together they leave none for two
        full = raised(openai.RateLimitError, [{"token_ids": [900 + number] * 200} for number in range(2)])
        assert int(full.response.headers["retry-after"]) > 0
    finally:
        for name, key in pinned:
            assert served.request("DELETE", f"/v1/documents/{name}", key=key)[0] == 200
    assert states(served.chat([{"token_ids": [900] * 200}])) == ["encoded"]
    served.wait_until_idle()


def test_who_pins_too_much_is_refused_and_nobody_else(served: Served) -> None:
    def pin(number: int, key: str = "alice") -> tuple[int, Any]:
        body = {"token_ids": [5 + number] * 300, "id": f"mine-{number}", "pin": True}
        return served.request("POST", "/v1/documents", body, key)

    pinned = [number for number in range(40) if pin(number)[0] == 200]
    try:
        assert 0 < len(pinned) < 40
        status, body = pin(99)
        assert status == 429
        assert "your key would pin" in body["error"]["message"]
        quota = served.request("GET", "/v1/comb")[1]["quota"]
        assert 0.8 * quota["pinned_bytes"]["limit"] < quota["pinned_bytes"]["used"] <= quota["pinned_bytes"]["limit"]
        assert quota["documents"]["used"] >= len(pinned)
        assert served.request("GET", "/v1/comb", key="bob")[1]["quota"]["pinned_bytes"]["used"] == 0
        assert served.metric("tenant_blocks") > 0
        assert pin(99, "bob")[0] == 200
        assert states(served.chat([{"token_ids": [1000] * 300}], key="bob")) == ["encoded"]
        assert served.request("DELETE", "/v1/documents/mine-99", key="bob")[0] == 200
    finally:
        for number in pinned:
            assert served.request("DELETE", f"/v1/documents/mine-{number}")[0] == 200
    served.wait_until_idle()


def cached(answer: tuple[int, Any]) -> int:
    """Prompt tokens that vLLM's prefix cache had, without those of documents."""
    assert answer[0] == 200, answer[1]
    documents = answer[1].get("comb", {"documents": ()})["documents"]
    linked = sum(one["tokens"] for one in documents if one["state"] == "hit")
    return int((answer[1]["usage"]["prompt_tokens_details"] or {}).get("cached_tokens") or 0) - linked


@pytest.mark.parametrize(
    "more", [{"documents": ["Of two tenants.", *TEXTS]}, {"documents": ["Of two.", *TEXTS], "comb": OFF}, {}]
)
def test_two_tenants_share_no_document_and_no_prefix(served: Served, more: dict[str, Any]) -> None:
    def ask(key: str, **changed: Any) -> tuple[int, Any]:
        return served.chat(key=key, **{"messages": LONG_QUESTION, **more, **changed})

    first, again = ask("alice"), ask("alice")
    assert cached(first) == 0
    assert cached(again) >= 64  # the control: one's own prefix is a hit
    other = ask("bob", cache_salt="alice")
    assert cached(other) == 0
    if "documents" in more and "comb" not in more:
        assert (states(again)[0], states(other)[0]) == ("pool", "encoded")
    assert cached(ask("alice", cache_salt="narrower")) == 0
    assert cached(ask("bob", cache_salt="alice")) >= 64
    assert text_of(other) == text_of(again)
    served.wait_until_idle()


def test_a_tenants_registered_documents_are_nobody_elses(served: Served) -> None:
    status, made = served.request("POST", "/v1/documents", {"text": "Alice keeps this.", "id": "hers", "pin": True})
    assert (status, made["state"]) == (200, "encoded")
    asked = [("GET", "/v1/documents/hers"), ("DELETE", "/v1/documents/hers")]
    assert [served.request(method, path, key="bob")[0] for method, path in asked] == [404, 404]
    assert served.chat([{"id": "hers"}], key="bob")[0] == 404
    assert "hers" not in [one["id"] for one in served.request("GET", "/v1/documents", key="bob")[1]["data"]]
    documents = served.chat([{"id": "hers"}])[1]["comb"]["documents"]
    assert documents == [{"id": "hers", "state": "hit", "tokens": made["tokens"], "tier": "pool"}]
    assert served.request("DELETE", "/v1/documents/hers")[0] == 200
    assert served.chat([{"id": "hers"}])[0] == 404


def test_the_example_asks_with_the_encoder_on_and_off(served: Served) -> None:
    example = Path(__file__).parents[2] / "examples" / "serve_and_query.py"
    ran = subprocess.run(
        [sys.executable, example, served.url, "alice"], capture_output=True, text=True, timeout=120, check=False
    )
    assert ran.returncode == 0, ran.stderr
    first, again, off = ran.stdout.splitlines()
    assert first.startswith("encoder on  [")
    assert "['hit', 'hit']" in again
    assert first.split(": ")[-1] == again.split(": ")[-1]
    assert off.startswith("encoder off ['inlined', 'inlined']")
