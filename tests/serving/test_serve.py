"""`comb serve` as it is: vLLM's server, an encoder process, and HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

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


def test_hits_report_and_usage(served: Served) -> None:
    first, second = served.chat(["A new text."]), served.chat(["A new text."])
    assert [answer[1]["comb"]["documents"][0]["state"] for answer in (first, second)] == ["encoded", "hit"]
    tokens = second[1]["comb"]["documents"][0]["tokens"]
    assert second[1]["usage"]["prompt_tokens_details"]["cached_tokens"] >= tokens
    assert logprobs(first) == pytest.approx(logprobs(second), abs=1e-5)
    other = served.chat(["A new text."], key="bob")
    assert other[1]["comb"]["documents"][0]["state"] == "encoded"
    assert served.chat(["A new text."], key="eve")[0] == 401
    assert served.chat([{"id": "nothing"}])[0] == 404
    assert served.chat([{"token_ids": [5] * 600}], comb={"encoder": False})[0] == 400


def test_clients_at_once_do_not_mix_documents(served: Served) -> None:
    wanted = [[TEXTS[index % 3]] if index % 4 else [] for index in range(24)]
    alone = {str(documents): logprobs(served.chat(documents)) for documents in wanted}
    with ThreadPoolExecutor(12) as pool:
        answers = list(pool.map(served.chat, wanted))
    for documents, answer in zip(wanted, answers, strict=True):
        assert logprobs(answer) == pytest.approx(alone[str(documents)], abs=1e-4)
    assert len({tuple(values) for values in alone.values()}) == 4
    served.wait_until_idle()


def test_streams_carry_the_report(served: Served) -> None:
    served.chat(TEXTS)
    status, text = served.chat(TEXTS, stream=True, stream_options={"include_usage": True})
    events = [event.removeprefix("data: ") for event in text.split("\n\n") if event]
    assert (status, events[-1]) == (200, "[DONE]")
    first, *others, last = (json.loads(event) for event in events[:-1])
    assert [document["state"] for document in first["comb"]["documents"]] == ["hit"] * 3
    assert not any("comb" in event for event in (*others, last))
    assert last["usage"]["prompt_tokens"] > sum(document["tokens"] for document in first["comb"]["documents"])
    served.wait_until_idle()


def test_a_client_that_leaves_and_an_encoder_that_dies(served: Served) -> None:
    body = {"model": "nano", "messages": QUESTION, "documents": TEXTS, "stream": True, "max_tokens": 400}
    with served.asking({**body, "ignore_eos": True}) as client:
        assert client.recv(200)
        assert served.references > 0
    served.wait_until_idle()
    before, pid = served.metric("encoder_restarts"), served.encoder_pid()
    assert pid is not None
    os.kill(pid, signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda index: served.chat([f"After the fall {index}."]), range(4)))
    assert [answer[0] for answer in answers] == [200] * 4
    assert served.metric("encoder_restarts") == before + 1
    served.wait_until_idle()


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
    deadline = time.monotonic() + 60
    while '"mine-7"' not in served.log.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)
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
    assert asked <= there


def test_documents_are_registered_pinned_and_deleted(served: Served) -> None:
    status, made = served.request("POST", "/v1/documents", {"text": "Ada owns a cat.", "pin": True})
    assert (status, made["state"]) == (200, "encoded")
    answer = served.chat([{"id": made["id"]}])
    assert answer[1]["comb"]["documents"] == [
        {"id": made["id"], "state": "hit", "tokens": made["tokens"], "tier": "pool"}
    ]
    assert served.request("DELETE", f"/v1/documents/{made['id']}")[0] == 200
    assert served.chat([{"id": made["id"]}])[0] == 404
