"""`comb serve` as users start it, for tests: a process of its own, asked over HTTP."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from comb_serving.config.serve_options import INSTANCE_DIR
from comb_serving.launch.server_process import COMMAND, free_port
from tests.helpers.processes import wait_for

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
READY_S = 400
ADMIN = "boss"
ROOT = "COMB_TEST_ROOT"  # a variable by which a server's processes are known
FLAGS = [
    "--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--block-size", "32", "--max-num-seqs", "8",
    "--kv-cache-memory-bytes", "33554432", "--api-key", "alice", "bob",
    "--max-num-batched-tokens", "512", "--served-model-name", "nano",
]  # fmt: skip
QUESTION = [{"role": "user", "content": "Where is Ada?"}]
TEXTS = ["Ada went to the garden.", "Bob is in the kitchen.", "Then Ada took the red ball."]


@dataclass
class Served:
    """A running server. `request` and `chat` return (status, body)."""

    port: int
    root: Path
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def request(self, method: str, path: str, body: Any = None, key: str = "alice", **more: str) -> tuple[int, Any]:
        """`body` is bytes, or something for JSON; `more` are headers, with _ for -."""
        data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
        headers |= {name.replace("_", "-"): value for name, value in more.items()}
        asked = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(asked, timeout=120) as answer:
                text = answer.read().decode()
                kind = answer.headers["content-type"] or ""
                return answer.status, json.loads(text) if kind.startswith("application/json") else text
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def chat(self, documents: Any = (), key: str = "alice", **more: Any) -> tuple[int, Any]:
        body = {"model": "nano", "messages": QUESTION, "temperature": 0, "max_tokens": 12, "logprobs": True, **more}
        return self.request("POST", CHAT, {**body, "documents": list(documents)}, key)

    @contextmanager
    def asking(self, body: Any, path: str = CHAT, key: str = "alice") -> Iterator[socket.socket]:
        """A connection over which a request has gone out; leaving the block closes it, answered or not."""
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        with socket.create_connection(("127.0.0.1", self.port), timeout=120) as client:
            client.sendall(head.encode() + data)
            yield client

    def metric(self, name: str) -> float:
        """The sum of our series whose name holds `name`, over all labels."""
        _, text = self.request("GET", "/metrics")
        rows = [line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("comb")]
        values = [float(value) for series, value in rows if name in series.partition("{")[0]]
        assert values, f"no series of {name}"
        return sum(values)

    @property
    def references(self) -> float:
        return self.metric("references")

    def wait_until_idle(self) -> None:
        """References are dropped when the answer has gone out, so a client may be faster."""
        wait_for(lambda: self.references == self.metric("requests_waiting") == 0)

    def processes(self) -> Iterator[tuple[int, list[bytes], list[bytes]]]:
        """Number, command line and environment of each process of this server."""
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                words, environment = ((folder / name).read_bytes().split(b"\0") for name in ("cmdline", "environ"))
            except OSError:
                continue
            if f"{ROOT}={self.root}".encode() in environment:
                yield int(folder.name), words, environment

    def encoder_pid(self) -> int | None:
        """The encoder's process; None while there is none."""
        return next((pid for pid, words, _ in self.processes() if b"comb_serving.encoding.process" in words), None)

    def instance(self) -> Path:
        """The folder of its pools."""
        start = f"{INSTANCE_DIR}=".encode()
        entries = (entry for _, _, environment in self.processes() for entry in environment)
        return Path(next(entry for entry in entries if entry.startswith(start)).removeprefix(start).decode())


@contextmanager
def serve(adapter: Path, folder: Path, *options: str, pool: str = "2MiB") -> Iterator[Served]:
    """`comb serve ADAPTER` with small caches; `options` come behind `FLAGS`. Its log lies beside `folder`."""
    port = free_port()
    arguments = [str(adapter), "--comb-pool-bytes", pool, "--port", str(port), "--host", "127.0.0.1"]
    environment = {**os.environ, "VLLM_LOGGING_LEVEL": "WARNING", ROOT: str(folder), "COMB_ADMIN_KEY": ADMIN}
    environment.pop(INSTANCE_DIR, None)  # of an engine in this process
    log = folder.with_suffix(".log")
    with log.open("wb") as out:
        process = subprocess.Popen(
            [*COMMAND, *arguments, *FLAGS, *options],
            env=environment, stdout=out, stderr=subprocess.STDOUT,
        )  # fmt: skip
    server = Served(port, folder, process, log)
    deadline = time.monotonic() + READY_S
    try:
        while True:
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            try:
                if server.request("GET", "/health")[0] == 200:
                    break
            except OSError:
                time.sleep(0.5)
        instance = server.instance()
        assert instance.is_dir()
        yield server
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(90)
    assert not instance.exists()


def text_of(answer: tuple[int, Any]) -> str:
    status, body = answer
    assert status == 200, body
    return str(body["choices"][0]["message"]["content"])


def logprobs(answer: tuple[int, Any]) -> list[float]:
    assert answer[0] == 200, answer[1]
    return [token["logprob"] for token in answer[1]["choices"][0]["logprobs"]["content"]]


def states(answer: tuple[int, Any]) -> list[str]:
    """What became of an answer's documents."""
    assert answer[0] == 200, answer[1]
    return [document.get("tier", document["state"]) for document in answer[1]["comb"]["documents"]]
