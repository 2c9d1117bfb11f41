"""`comb serve` as it is: vLLM's server, an encoder process, and who asks over HTTP, with clients of others."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from comb_serving.api.routes import CHAT, COMPLETIONS, GENERATION, RESPONSES
from tests.helpers.processes import wait_for
from tests.helpers.served import QUESTION, TEXTS, Served, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
OFF = {"comb": {"encoder": False}}


def test_what_stands_in_front_of_documents_is_cached_whatever_they_are(served: Served, nano_adapter: Path) -> None:
    from comb import Document, PICEngine

    engine = PICEngine.from_pretrained(nano_adapter)
    first = [{"role": "user", "content": "Who is there? " * 12}, {"role": "assistant", "content": "Ada."}]
    cached = []
    for name, text in zip("abc", (TEXTS[0], *TEXTS[:2]), strict=True):
        assert served.request("POST", "/v1/documents", {"text": text, "id": f"front-{name}"}, "alice")[0] == 200
        engine.add_documents([Document(text, id=f"front-{name}")])
        parts = [{"type": "document", "id": f"front-{name}"}, {"type": "text", "text": " Where is Ada?"}]
        messages = [*first, {"role": "user", "content": parts}]
        answer = served.chat(messages=messages)
        assert text_of(answer) == engine.chat(messages, max_new_tokens=12).text
        cached.append(answer[1]["usage"]["prompt_tokens_details"]["cached_tokens"])
    prefix = len(engine.prompt_builder.build(messages, (), {"front-c": [[5]]}).prefix)
    tokens = sum(document["tokens"] for document in answer[1]["comb"]["documents"])
    assert prefix >= 64
    assert cached[1] >= cached[2] == tokens + prefix // 32 * 32


def test_the_log_has_a_line_with_the_id_that_vllm_uses(served: Served) -> None:
    body = {"model": "nano", "messages": QUESTION, "documents": ["Nobody may read this."], "max_tokens": 2}
    status, answer = served.request("POST", CHAT, body, x_request_id="mine-7")
    assert (status, answer["id"]) == (200, "chatcmpl-mine-7")
    wait_for(lambda: '"mine-7"' in served.log.read_text())
    text = served.log.read_text()
    line = json.loads(next(line for line in text.splitlines() if '"mine-7"' in line).partition(": request ")[2])
    assert (line["status"], line["documents"]) == (200, {"encoded": 1})
    assert "Nobody may read this" not in text


def test_vllm_has_the_series_that_the_dashboard_asks_it_for(served: Served) -> None:
    dashboard = (ROOT / "serving/deploy/grafana/dashboards/comb.json").read_text()
    asked = set(re.findall(r"vllm:[a-z_]+", dashboard))
    _, text = served.request("GET", "/metrics")
    assert asked <= set(re.findall(r"^(vllm:[a-z_]+)", text, re.M))
    assert asked


def test_the_example_asks_with_the_encoder_on_and_off(served: Served) -> None:
    command = [sys.executable, ROOT / "examples" / "serve_and_query.py", served.url, "alice"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert ran.returncode == 0, ran.stderr
    first, again, off = ran.stdout.splitlines()
    assert first.startswith("encoder on  [")
    assert "['hit', 'hit']" in again
    assert first.split(": ")[-1] == again.split(": ")[-1]
    assert off.startswith("encoder off ['inlined', 'inlined']")


# ---- clients ----


@pytest.fixture
def client(served: Served) -> Iterator[Any]:
    from openai import OpenAI

    with OpenAI(base_url=f"{served.url}/v1", api_key="alice", max_retries=0) as found:
        yield found


def chat(client: Any, documents: Any, extra: Any = None, **more: Any) -> Any:
    extra = {"documents": documents, **(extra or {})}
    asked = {"model": "nano", "messages": QUESTION, "temperature": 0, "max_tokens": 12}
    return client.chat.completions.create(**asked, extra_body=extra, **more)


@pytest.mark.parametrize("extra", [{}, OFF])
def test_the_openai_client_gets_answers_and_streams(served: Served, client: Any, extra: dict[str, Any]) -> None:
    expected = text_of(served.chat(TEXTS, **extra))
    whole = chat(client, TEXTS, extra)
    assert whole.choices[0].message.content == expected
    assert whole.comb["encoder"] is not bool(extra)
    assert [one["state"] for one in whole.comb["documents"]] == ["inlined" if extra else "hit"] * 3
    tokens = sum(one["tokens"] for one in whole.comb["documents"])
    assert whole.usage.prompt_tokens > tokens
    if not extra:
        assert whole.usage.prompt_tokens_details.cached_tokens >= tokens
    chunks = list(chat(client, TEXTS, extra, stream=True, stream_options={"include_usage": True}))
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


def test_the_openai_clients_responses_read_documents(served: Served, client: Any) -> None:
    asked = {"model": "nano", "input": QUESTION, "temperature": 0, "max_output_tokens": 12}
    whole = client.responses.create(**asked, extra_body={"documents": TEXTS})
    assert whole.output_text == text_of(served.chat(TEXTS))
    assert len(whole.comb["documents"]) == len(TEXTS)
    assert whole.usage.input_tokens == served.chat(TEXTS)[1]["usage"]["prompt_tokens"]
    with client.responses.stream(**asked, extra_body={"documents": TEXTS}) as stream:
        assert stream.get_final_response().output_text == whole.output_text


def test_the_anthropic_client_sends_documents_in_its_messages(served: Served) -> None:
    from anthropic import Anthropic, BadRequestError

    text = "Olive left her umbrella in the attic."
    source = {"type": "text", "media_type": "text/plain", "data": text}

    def asked(**more: Any) -> dict[str, Any]:
        parts = [{"type": "document", "source": source, **more}, {"type": "text", "text": QUESTION[0]["content"]}]
        messages = [{"role": "user", "content": parts}]
        return {"model": "nano", "max_tokens": 12, "extra_body": {"temperature": 0}, "messages": messages}

    with Anthropic(base_url=served.url, auth_token="alice", max_retries=0) as client:
        kept = {"type": "ephemeral", "ttl": "5m"}
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
        assert (usages[0][2], usages[1][2]) == (document["tokens"], 0)
        assert sum(usages[0]) == sum(usages[1]) == served.chat([text])[1]["usage"]["prompt_tokens"]
        assert cached in [each["id"] for each in served.request("GET", "/v1/documents")[1]["data"]]
        with client.messages.stream(**asked()) as stream:
            assert "".join(stream.text_stream) == expected
            assert stream.get_final_message().usage.cache_creation_input_tokens == 0
        with pytest.raises(BadRequestError, match="can't have citations") as refused:
            client.messages.create(**asked(citations={"enabled": True}))
        assert (refused.value.type, refused.value.body["type"]) == ("invalid_request_error", "error")
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
    whole, expected = client.chat(**asked), served.chat(texts)
    assert whole.message.content[0].text == text_of(expected) != text_of(served.chat([]))
    assert whole.usage.tokens.input_tokens == expected[1]["usage"]["prompt_tokens"]
    events = list(client.chat_stream(**asked))
    deltas = [event.delta.message.content.text for event in events if event.type == "content-delta"]
    assert "".join(deltas) == text_of(expected)
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
    served.wait_until_idle()


# ---- routes ----


@pytest.mark.parametrize(
    ("path", "more"),
    [
        *((path, {}) for path in (*GENERATION, "/invocations", "/v1/chat/completions/batch")),
        (CHAT, {"documents": TEXTS}),
        (CHAT, {"documents": TEXTS, **OFF}),
    ],
)
def test_tenants_share_no_prefix(served: Served, path: str, more: dict[str, Any]) -> None:
    long = "Who is there, and what is it that they have? " * 8
    turn = [{"role": "user", "content": long}]
    asked = {
        RESPONSES: {"input": long},
        COMPLETIONS: {"prompt": long},
        "/v1/chat/completions/batch": {"messages": [turn]},
    }.get(path, {"messages": turn})

    def hits() -> float:
        _, text = served.request("GET", "/metrics")
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("vllm:prefix_cache_hits_total")]
        return sum(float(value) for _, value in rows)

    def cached(key: str, salt: str) -> float:
        """Tokens that vLLM's prefix cache had."""
        before, body = hits(), {"model": "nano", "max_tokens": 2, **asked, **more, "cache_salt": salt}
        status, found = served.request("POST", path, body, key)
        assert status == 200, found
        return hits() - before

    salt = f"{path} {len(more)}"  # so that no other test has asked this before
    assert cached("alice", salt) == 0
    assert cached("alice", salt) >= 64  # the control: one's own prefix is a hit
    assert cached("bob", salt) == 0  # whose salt is another, whatever it is named
    assert cached("alice", f"narrower: {salt}") == 0
    assert cached("bob", salt) >= 64
    served.wait_until_idle()
