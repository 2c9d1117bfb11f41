"""`comb serve` as it is: vLLM's server, an encoder process, and HTTP."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.helpers.processes import wait_for
from tests.helpers.served import QUESTION, TEXTS, Served, logprobs, text_of

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_answers_over_documents_equal_those_in_process(served: Served, nano_adapter: Path) -> None:
    from comb import PICEngine

    engine = PICEngine.from_pretrained(nano_adapter)
    for documents in (TEXTS, TEXTS[::-1], TEXTS[:1], []):
        expected = engine.chat(QUESTION, documents, max_new_tokens=12).text
        assert text_of(served.chat(documents)) == expected
        inlined = engine.chat(QUESTION, documents, encoder=False, max_new_tokens=12).text
        assert text_of(served.chat(documents, comb={"encoder": False})) == inlined
    assert engine.chat(QUESTION, TEXTS).text != engine.chat(QUESTION, []).text


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
    head = len(engine.prompt_builder.build(messages, (), {"front-c": [[5]]}).head)
    tokens = sum(document["tokens"] for document in answer[1]["comb"]["documents"])
    assert head >= 64
    assert cached[1] >= cached[2] == tokens + head // 32 * 32


def test_the_encoder_is_switched_off_and_on(served: Served) -> None:
    inlined = text_of(served.chat(TEXTS, comb={"encoder": False}))
    linked = served.chat(TEXTS)
    assert served.request("POST", "/v1/comb", {"encoder": False})[0] == 401
    assert served.request("POST", "/v1/comb", {"encoder": False}, key="boss")[1]["encoder"] is False
    try:
        off = served.chat(TEXTS)
        assert (text_of(off), off[1]["comb"]["encoder"]) == (inlined, False)
        assert served.metric("comb:encoder_enabled") == 0
        assert served.request("GET", "/health")[0] == 200
    finally:
        assert served.request("POST", "/v1/comb", {"encoder": True}, key="boss")[1]["encoder"] is True
    on = served.chat(TEXTS)
    assert logprobs(on) == pytest.approx(logprobs(linked), abs=1e-5)
    assert [document["state"] for document in on[1]["comb"]["documents"]] == ["hit"] * 3


def test_the_log_has_a_line_with_the_id_that_vllm_uses(served: Served) -> None:
    body = {"model": "nano", "messages": QUESTION, "documents": ["Nobody may read this."], "max_tokens": 2}
    status, answer = served.request("POST", "/v1/chat/completions", body, x_request_id="mine-7")
    assert (status, answer["id"]) == (200, "chatcmpl-mine-7")
    wait_for(lambda: '"mine-7"' in served.log.read_text())
    text = served.log.read_text()
    line = json.loads(next(line for line in text.splitlines() if '"mine-7"' in line))
    assert (line["status"], line["documents"]) == (200, {"encoded": 1})
    assert "Nobody may read this" not in text


def test_metrics_have_what_the_dashboard_asks_for(served: Served) -> None:
    dashboard = Path(__file__).parents[2] / "serving/deploy/grafana/dashboards/comb.json"
    asked = set(re.findall(r"(?:vllm|comb):[a-z_]+", dashboard.read_text()))
    _, text = served.request("GET", "/metrics")
    there = set(re.findall(r"^((?:vllm|comb):[a-z_]+)", text, re.M))
    assert {name for name in asked if name.startswith("vllm:")}
    # a server of a plain model has these (test_deploy)
    plain = re.compile("comb:(method|(prompt|audit)_tokens_total|found_total|compile_seconds_(bucket|sum|count))")
    assert {name for name in asked if not plain.fullmatch(name)} <= there
    assert {name for name in asked if plain.fullmatch(name)}
