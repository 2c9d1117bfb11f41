"""The Ray Serve application: with a small program in place of `comb serve`, and with two real ones."""

from __future__ import annotations

import http.client
import json
import os
import signal
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from comb_serving.api.registered import FOLDER
from comb_serving.api.routes import WEIGHTS
from comb_serving.launch.server_process import free_port
from tests.helpers import processes

# Ray Serve gives up on its HTTP proxy after five seconds, less than its processes take to start on a busy machine
os.environ.setdefault("RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S", "60")
pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.ray, pytest.mark.slow]

CHAT = "/v1/chat/completions"
wait_for = partial(processes.wait_for, seconds=120, step=0.2)
PROGRAM = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
documents, left, waiting = {}, [], []
class Handler(BaseHTTPRequestHandler):
    def answer(self, status, body):
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(data)))
        self.send_header("x-kept", "yes")
        self.end_headers()
        self.wfile.write(data)
    def do_GET(self):
        name = self.path.rsplit("/", 1)[-1]
        if self.path == "/waiting":
            return self.answer(200, len(waiting))
        self.answer(200, {}) if self.path == "/health" else self.answer(200 if self.key(name) in documents else 404, {})
    def key(self, name):
        return self.headers.get("authorization"), unquote(name)
    def do_DELETE(self):
        found = documents.pop(self.key(self.path.rsplit("/", 1)[-1]), None)
        self.answer(200 if found else 404, {})
    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if unquote(self.path) == "/v1/documents":
            name = body.get("id", "made-" + body["text"])
            documents[self.key(name)] = body
            return self.answer(200, {"id": name, "state": "encoded"})
        if body["documents"] == ["poison"]:
            return self.connection.shutdown(2)
        if body.get("wait"):
            waiting.append(body)
            while not os.path.exists(options["--gate"]):
                time.sleep(0.05)
        if not body.get("stream"):
            known = [name for key, name in documents if key == self.headers.get("authorization")]
            return self.answer(200, {"got": body, "path": self.path, "name": options["--name"], "pid": os.getpid(),
                                     "known": known, "left": left})
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.end_headers()
        try:
            for number in range(1000):
                self.wfile.write(b"data: %d\\n\\n" % number)
                while self.key("read") not in documents and not number:
                    time.sleep(0.05)
                if number == 2 and not body.get("endless"):
                    return
                time.sleep(0.05)
        except OSError:
            left.append(body["documents"][0])
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
    ray.init(  # "local": whatever else of Ray runs on this machine isn't asked
        address="local", num_cpus=4, include_dashboard=False, logging_level="ERROR", log_to_driver=False,
        runtime_env={"env_vars": {"PYTHONPATH": paths}}, object_store_memory=100 * 2**20,
    )  # fmt: skip
    try:
        serve.start(http_options={"host": "127.0.0.1", "port": port})
        serve.run(application(settings), name="comb")
        url = f"http://127.0.0.1:{port}"
        wait_for(lambda: both_up(url))
        yield url
    finally:
        serve.shutdown()
        ray.shutdown()


def both_up(url: str) -> bool:
    try:
        return addresses(url).keys() == {"replica-0", "replica-1"}
    except OSError:  # no ingress now
        return False


def addresses(url: str) -> dict[str, str]:
    """Of the servers, by replica."""
    found: dict[str, str] = ask(url, "GET", "/health")[1].get("replicas", {})
    return found


def ask(url: str, method: str, path: str, body: Any = None, *, key: str = "alice") -> tuple[int, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    try:
        asked = urllib.request.Request(url + path, data, headers, method=method)
        with urllib.request.urlopen(asked, timeout=20) as answer:
            return answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read())


def chat(url: str, text: str, key: str = "alice", **more: Any) -> Any:
    status, answer = ask(url, "POST", CHAT, {"documents": [text], **more}, key=key)
    assert status == 200, answer
    return answer


def answered(url: str, text: str) -> Any:
    """The same; nothing while a server that has just ended is still asked."""
    try:
        status, answer = ask(url, "POST", CHAT, {"documents": [text]})
    except http.client.IncompleteRead:  # it ended while it answered
        return {}
    assert status in (200, 503), answer
    return answer if status == 200 else {}


def stream(url: str, text: str, **more: Any) -> Any:
    body = json.dumps({"stream": True, "documents": [text], **more}).encode()
    headers = {"authorization": "Bearer alice"}
    return urllib.request.urlopen(urllib.request.Request(url + CHAT, body, headers), timeout=60)


def test_settings_come_from_files_and_command_lines() -> None:
    from comb_serving.replicas.replica import ReplicasConfig

    given = {"checkpoint": "c", "replicas": "3", "arguments": "--comb-disk '/a b/{replica}' -tp 2", "gpus": "2"}
    found = ReplicasConfig.model_validate(given)
    assert (found.replicas, found.gpus, found.load_floor) == (3, 2.0, 8)
    assert found.command_of("replica-1")[-5:] == ["c", "--comb-disk", "/a b/replica-1", "-tp", "2"]
    assert (found.disk_of("replica-1"), found.max_body_bytes) == (Path("/a b/replica-1"), 2**24)
    written = ReplicasConfig.model_validate({"checkpoint": "c", "arguments": "--comb-disk /a=b/{replica}"})
    assert written.disk_of("replica-1") == Path("/a=b/replica-1")
    given = {"checkpoint": "c", "arguments": ["--port-like", 3]}
    assert ReplicasConfig.model_validate(given).arguments == ("--port-like", "3")
    assert ReplicasConfig.model_validate(given).disk_of("replica-1") is None
    for wrong, message in (({}, "checkpoint"), ({"checkpoint": "c", "replica": 2}, "replica"),
                           ({"checkpoint": "c", "replicas": 0}, "greater than or equal to 1"),
                           ({"checkpoint": "c", "arguments": "--comb-disk /x"}, "write {replica}")):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            ReplicasConfig.model_validate(wrong)


# in front of what shares one Ray: that keeps it until the end of this file
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
        health = [urllib.request.urlopen(f"{address}/health").headers for address in addresses(url).values()]
        (weights,) = {headers[WEIGHTS] for headers in health}
        assert weights
        status, made = ask(url, "POST", "/v1/documents", {"text": "Registered.", "id": "r"})
        assert (status, made["state"]) == (200, "encoded")
        assert ask(url, "POST", CHAT, {"model": "nano", "messages": QUESTION, "documents": [{"id": "none"}]})[0] == 404
        for text in texts:
            assert answer([text, {"id": "r"}])[1][-1] == "hit"


@pytest.fixture(scope="module")
def gate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Requests that wait do so until this file exists."""
    return tmp_path_factory.mktemp("gate") / "open"


@pytest.fixture(scope="module")
def url(gate: Path) -> Iterator[str]:
    with application(
        checkpoint="adapter",
        arguments=["--name", "{replica}", "--gate", gate, "--comb-disk", gate.with_name("{replica}")],
        command=(sys.executable, "-c", PROGRAM), load_floor=2,
    ) as found:  # fmt: skip
        yield found


def test_the_same_documents_go_to_the_same_replica_unchanged(url: str) -> None:
    from comb_serving.replicas.affinity import documents_of, home

    for text in map(str, range(20)):
        (document,) = documents_of({"documents": [text]}, "Bearer alice")
        answer = chat(url, text, other=[1])
        assert answer["name"] == home(document.key, ["replica-0", "replica-1"])
        assert answer["got"] == {"documents": [text], "other": [1]}
    assert ask(url, "POST", f"{CHAT}?x=%2F", {"documents": []})[1]["path"] == f"{CHAT}?x=%2F"
    with stream(url, "0", stream=False) as answer:
        assert answer.headers["x-kept"] == "yes"


def test_too_many_requests_for_one_replica_spill(url: str, gate: Path) -> None:
    home, each = chat(url, "hot")["name"], addresses(url)
    other = {"replica-0": "replica-1", "replica-1": "replica-0"}[home]

    def waiting() -> dict[str, Any]:
        return {name: ask(address, "GET", "/waiting")[1] for name, address in each.items()}

    with ThreadPoolExecutor(8) as threads:
        asked = []
        for number in range(6):
            asked.append(threads.submit(chat, url, "hot", wait=True))
            wait_for(lambda number=number: sum(waiting().values()) > number)  # type: ignore[misc]
        assert waiting() == {home: 4, other: 2}  # 1.25 times the mean of six is four
        gate.touch()
        assert sorted(one.result()["name"] for one in asked) == sorted([home] * 4 + [other] * 2)
    assert chat(url, "hot")["name"] == home


def test_streams_pass_at_once_and_a_client_that_leaves_is_passed_on(url: str) -> None:
    with stream(url, "0") as answer:
        assert answer.headers["content-type"] == "text/event-stream"
        lines = (line for line in answer if line.strip())
        first = next(lines)
        # the rest is not written before: parts pass as they come, not at the end
        assert ask(url, "POST", "/v1/documents", {"id": "read", "text": "one"})[0] == 200
        assert [first, *lines] == [b"data: 0\n", b"data: 1\n", b"data: 2\n"]
    with stream(url, "leaving", endless=True) as answer:
        next(iter(answer))
    wait_for(lambda: chat(url, "leaving")["left"] == ["leaving"])


def test_a_request_that_breaks_a_server_off_is_not_sent_to_others(url: str) -> None:
    status, answer = ask(url, "POST", CHAT, {"documents": ["poison"]})
    assert status == 503
    assert "broke off" in answer["error"]["message"]
    assert chat(url, "0")


def test_registered_documents_are_everywhere_also_after_restarts(url: str, gate: Path) -> None:
    def at_each(key: str = "alice") -> set[frozenset[str]]:
        """What the replicas know."""
        answers = [chat(url, text, key=key) for text in map(str, range(12))]
        assert len({answer["name"] for answer in answers}) == 2
        return {frozenset(answer["known"]) - {"read"} for answer in answers}

    def add(name: str, text: str = "text", key: str = "alice") -> tuple[int, Any]:
        return ask(url, "POST", "/v1/documents", {"id": name, "text": text}, key=key)

    assert [add("x")[0], add("y")[0], add("x", "hers", key="bob")[0]] == [200] * 3
    assert ask(url, "POST", "/v1/documents", {"text": "no id"})[1]["id"] == "made-no id"
    assert ask(url, "DELETE", "/v1/documents/y")[0] == 200
    assert ask(url, "DELETE", "/v1/documents/y")[0] == 404
    assert at_each() == {frozenset({"x", "made-no id"})}
    assert at_each("bob") == {frozenset({"x"})}
    assert [ask(url, "GET", f"/v1/documents/{name}")[0] for name in "xy"] == [200, 404]

    places = {text: chat(url, text)["name"] for text in map(str, range(9))}
    before = chat(url, "0")
    # what its server has registered may have been deleted when it is up again
    kept = gate.with_name(before["name"]) / FOLDER
    kept.mkdir(parents=True)
    os.kill(before["pid"], signal.SIGKILL)
    assert wait_for(lambda: answered(url, "0"), seconds=10)["name"] != before["name"]
    assert all(chat(url, text)["name"] in places.values() for text in places)
    assert add("meanwhile")[0] == 200
    again = wait_for(lambda: found if (found := chat(url, "0"))["name"] == before["name"] else None)
    assert again["pid"] != before["pid"]
    assert not kept.exists()
    assert {text: chat(url, text)["name"] for text in places} == places
    assert at_each() == {frozenset({"x", "made-no id", "meanwhile"})}
    assert at_each("bob") == {frozenset({"x"})}


def test_a_router_that_starts_again_knows_what_is_registered(url: str) -> None:
    import ray

    assert ask(url, "POST", "/v1/documents", {"id": "kept", "text": "text"})[0] == 200

    def routers() -> list[str]:
        return [one["name"] for one in ray.util.list_named_actors(all_namespaces=True) if "CombIngress" in one["name"]]

    (name,) = routers()
    ray.kill(ray.get_actor(name, namespace="serve"))
    wait_for(lambda: name not in routers())
    before = wait_for(lambda: both_up(url) and chat(url, "0"))
    os.kill(before["pid"], signal.SIGKILL)

    def replaced() -> bool:
        found = answered(url, "0")
        return bool(found) and found["pid"] != before["pid"] and found["name"] == before["name"]

    wait_for(replaced)
    assert all("kept" in chat(url, text)["known"] for text in map(str, range(12)))
    # those that are lost begin again, with none: everywhere the same
    ray.kill(ray.get_actor("comb-registrations-comb", namespace="comb"))
    wait_for(lambda: ask(url, "POST", "/v1/documents", {"id": "new", "text": "text"})[0] == 200)
    wait_for(lambda: all(chat(url, text)["known"] == ["new"] for text in map(str, range(12))))
