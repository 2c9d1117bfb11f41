"""The Ray Serve application: with a small program in place of `comb serve`, and with two real ones."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from comb_serving.replicas.process import free_port

# Ray Serve gives up on its HTTP proxy after five seconds, less than its processes take to start on a busy machine
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

CHAT = "/v1/chat/completions"
PROGRAM = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
documents = {}
class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        self.answer(200, {}) if self.path == "/health" else self.answer(200 if name in documents else 404, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path == "/v1/documents":
            documents[body["id"]] = body
        if not body.get("stream"):
            return self.answer(200, {"id": body.get("id"), "name": options["--name"], "pid": os.getpid()})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        for number in range(3):
            self.wfile.write(b"data: %d\\n\\n" % number)
            while "read" not in documents and not number:
                time.sleep(0.05)
    def log_message(self, *_): pass
ThreadingHTTPServer((options["--host"], int(options["--port"])), Handler).serve_forever()
"""


@contextmanager
def application(**settings: Any) -> Iterator[str]:
    """The application in a Ray of its own; its address."""
    import ray
    from ray import serve

    from comb_serving.replicas.application import application

    port = free_port()
    root = Path(__file__).parents[2]
    paths = os.pathsep.join([*(str(root / part) for part in (".", "training", "serving")), *sys.path])
    ray.init(
        num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}}, object_store_memory=100 * 2**20,
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(settings), name="comb")
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: ask(url, "GET", "/health")[1].get("replicas") == {"replica-0": "up", "replica-1": "up"})
        yield url
    finally:
        serve.shutdown()
        ray.shutdown()


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it doesn't come to pass"
        time.sleep(0.2)
    return found


def ask(url: str, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": "Bearer alice"}
    try:
        asked = urllib.request.Request(url + path, data, headers, method=method)
        with urllib.request.urlopen(asked, timeout=60) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(url: str, text: str) -> Any:
    status, answer = ask(url, "POST", CHAT, {"documents": [text]})
    assert status == 200, answer
    return answer


def test_settings_come_from_files_and_command_lines() -> None:
    from comb_serving.replicas.application import Settings

    given = {"checkpoint": "c", "replicas": "3", "arguments": "--comb-disk '/a b/{replica}' -tp 2", "gpus": "2"}
    found = Settings.parse(given)
    assert (found.replicas, found.gpus, found.load_floor) == (3, 2.0, 8)
    assert found.command_of("replica-1")[-5:] == ["c", "--comb-disk", "/a b/replica-1", "-tp", "2"]
    assert Settings.parse({"checkpoint": "c", "arguments": ["--port-like", 3]}).arguments == ("--port-like", "3")
    for wrong, message in (({}, "checkpoint is missing"), ({"checkpoint": "c", "replica": 2}, "'replica' is none of"),
                           ({"checkpoint": "c", "replicas": 0}, "at least 1")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            Settings.parse(wrong)


def test_replicas_are_restarted_and_streams_pass() -> None:
    with application(
        checkpoint="adapter", replicas=2, arguments=["--name", "{replica}"], command=(sys.executable, "-c", PROGRAM)
    ) as url:
        places = {text: chat(url, text)["name"] for text in map(str, range(20))}
        assert set(places.values()) == {"replica-0", "replica-1"}
        assert all(chat(url, text)["name"] == place for text, place in places.items())
        assert ask(url, "POST", "/v1/documents", {"id": "x", "text": "kept"})[0] == 200
        body = json.dumps({"stream": True, "documents": ["0"]}).encode()
        with urllib.request.urlopen(urllib.request.Request(url + CHAT, body), timeout=60) as answer:
            assert answer.headers["content-type"] == "text/event-stream"
            lines = (line for line in answer if line.strip())
            first = next(lines)
            # the rest is not written before: parts pass as they come, not at the end
            assert ask(url, "POST", "/v1/documents", {"id": "read", "text": "one"})[0] == 200
            assert [first, *lines] == [b"data: 0\n", b"data: 1\n", b"data: 2\n"]
        before = chat(url, "0")
        os.kill(before["pid"], signal.SIGKILL)
        elsewhere = chat(url, "0")
        assert elsewhere["name"] != before["name"]
        assert all(chat(url, text)["name"] in places.values() for text in places)
        again = wait_for(lambda: found if (found := chat(url, "0"))["name"] == before["name"] else None)
        assert again["pid"] != before["pid"]
        for _ in range(8):  # at either replica
            assert ask(url, "GET", "/v1/documents/x")[0] == 200
        assert ask(url, "GET", "/v1/documents/y")[0] == 404
        pids = {chat(url, text)["pid"] for text in places}
    wait_for(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids))


@pytest.mark.vllm
def test_two_real_servers_behind_one_address(plugin: None, nano_adapter: Path) -> None:
    from tests.helpers.served import FLAGS, QUESTION, TEXTS

    arguments = ["--comb-pool-bytes", "2MiB", *FLAGS]

    def answer(documents: list[Any], **more: Any) -> tuple[str, list[str]]:
        body = {"model": "nano", "messages": QUESTION, "temperature": 0, "max_tokens": 8, "documents": documents}
        status, found = ask(url, "POST", CHAT, {**body, **more})
        assert status == 200, found
        return found["choices"][0]["message"]["content"], [one["state"] for one in found["comb"]["documents"]]

    with application(
        checkpoint=str(nano_adapter), replicas=2, arguments=arguments, environment=dict(os.environ)
    ) as url:
        texts = [f"{text} And then {number} more." for text in TEXTS for number in range(3)]
        first = [answer([text]) for text in texts]
        assert [states for _, states in first] == [["encoded"]] * 9
        assert [answer([text]) for text in texts] == [(text, ["hit"]) for text, _ in first]
        together = answer(texts[:3])
        assert answer(texts[:3]) == (together[0], ["hit"] * 3)
        assert answer(texts[2::-1])[1] == ["hit"] * 3  # in another order at the same place
        status, made = ask(url, "POST", "/v1/documents", {"text": "Registered.", "id": "r"})
        assert (status, made["state"]) == (200, "encoded")
        assert ask(url, "POST", CHAT, {"model": "nano", "messages": QUESTION, "documents": [{"id": "none"}]})[0] == 404
        for text in texts:
            assert answer([text, {"id": "r"}])[1][-1] == "hit"
