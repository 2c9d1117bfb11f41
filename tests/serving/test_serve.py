"""`comb serve` as it is: vLLM's server, an encoder process, and HTTP."""

from __future__ import annotations

import json
import os
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from served import QUESTION, TEXTS, Served, logprobs, text_of

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
    chunks = [json.loads(event) for event in events[:-1]]
    (report,) = [chunk["comb"] for chunk in chunks if "comb" in chunk]
    assert [document["state"] for document in report["documents"]] == ["hit"] * 3
    assert chunks[-1]["usage"]["prompt_tokens"] > sum(document["tokens"] for document in report["documents"])
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


def test_documents_are_registered_pinned_and_deleted(served: Served) -> None:
    status, made = served.request("POST", "/v1/documents", {"text": "Ada owns a cat.", "pin": True})
    assert (status, made["state"]) == (200, "encoded")
    answer = served.chat([{"id": made["id"]}])
    assert answer[1]["comb"]["documents"] == [
        {"id": made["id"], "state": "hit", "tokens": made["tokens"], "tier": "pool"}
    ]
    assert served.request("DELETE", f"/v1/documents/{made['id']}")[0] == 200
    assert served.chat([{"id": made["id"]}])[0] == 404
