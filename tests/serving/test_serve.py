"""`comb serve` as it is: vLLM's server, an encoder process, and HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

READY_S = 400
FLAGS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32", "--max-num-seqs", "8",
    "--kv-cache-memory-bytes", "33554432", "--api-key", "alice", "bob", "--enable-prompt-tokens-details",
    "--max-num-batched-tokens", "512", "--served-model-name", "nano",
]  # fmt: skip
QUESTION = [{"role": "user", "content": "Where is Ada?"}]
TEXTS = ["Ada went to the garden.", "Bob is in the kitchen.", "Then Ada took the red ball."]


@dataclass
class Served:
    """A running server. `chat` returns (status, body)."""

    port: int
    root: Path
    process: subprocess.Popen[bytes]
    log: Path

    def request(self, method: str, path: str, body: Any = None, key: str = "alice", **more: str) -> tuple[int, Any]:
        """`more` are headers, with _ for -."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        asked = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                text = answer.read().decode()
                kind = answer.headers["content-type"] or ""
                return answer.status, json.loads(text) if kind.startswith("application/json") else text
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def chat(self, documents: Any = (), key: str = "alice", **more: Any) -> tuple[int, Any]:
        body = {"model": "nano", "messages": QUESTION, "temperature": 0, "max_tokens": 12, "logprobs": True, **more}
        return self.request("POST", "/v1/chat/completions", {**body, "documents": list(documents)}, key)

    def metric(self, name: str) -> float:
        _, text = self.request("GET", "/metrics")
        return float(next(line.split()[1] for line in text.splitlines() if line.startswith(f"{name} ")))

    def wait_until_idle(self) -> None:
        """References are dropped when the answer has gone out, so a client may be faster."""
        deadline = time.monotonic() + 30
        while self.metric("comb:references") > 0:
            assert time.monotonic() < deadline
            time.sleep(0.05)

    def encoder_pid(self) -> int:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes()
                environment = (path.parent / "environ").read_bytes()
            except OSError:
                continue
            if b"comb_serving.encoder_process" in words and str(self.root).encode() in environment:
                return int(path.parent.name)
        raise AssertionError("no encoder process")


def text_of(answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


def logprobs(answer: tuple[int, Any]) -> list[float]:
    return [token["logprob"] for token in answer[1]["choices"][0]["logprobs"]["content"]]


@pytest.fixture(scope="module")
def served(plugin: None, nano_adapter: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    root = tmp_path_factory.mktemp("r")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    log = (root.parent / "serve.log").open("wb")
    code = "from comb.cli import main; main()"
    arguments = ["serve", str(nano_adapter), "--comb-pool-bytes", "2MiB", "--port", str(port), "--host", "127.0.0.1"]
    arguments += ["--comb-log-format", "json"]
    short = Path("/dev/shm") if Path("/dev/shm").is_dir() else root
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", "COMB_TEST_ROOT": str(root), "COMB_ADMIN_KEY": "boss"}
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments, *FLAGS], env=environment, stdout=log, stderr=subprocess.STDOUT
    )
    before = set(short.glob("comb-instance-*"))
    server = Served(port, root, process, Path(log.name))
    deadline = time.monotonic() + READY_S
    try:
        while True:
            assert process.poll() is None, Path(log.name).read_text()[-3000:]
            assert time.monotonic() < deadline, Path(log.name).read_text()[-3000:]
            try:
                if server.request("GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(1)
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)
        log.close()
    assert set(short.glob("comb-instance-*")) <= before


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
    data = json.dumps({**body, "ignore_eos": True}).encode()
    with socket.create_connection(("127.0.0.1", served.port)) as client:
        head = "POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer alice\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        assert client.recv(200)
        assert served.metric("comb:references") > 0
    served.wait_until_idle()
    os.kill(served.encoder_pid(), signal.SIGKILL)
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda index: served.chat([f"After the fall {index}."]), range(4)))
    assert [answer[0] for answer in answers] == [200] * 4
    assert served.metric("comb:encoder_restarts_total") == 1
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
    deadline = time.monotonic() + 10
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
