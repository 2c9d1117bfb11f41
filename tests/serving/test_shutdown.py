"""The end of a server: real signals, sockets and middleware, with a small model in vLLM's place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from comb_serving.api.routes import CHAT, COMPLETIONS, MESSAGES, RESPONSES
from comb_serving.launch.server_process import free_port
from tests.helpers.processes import wait_for
from tests.helpers.served import Served

pytest.importorskip("uvicorn")

DRAIN = 3.0
SERVER = """
import asyncio, contextlib, json, os, sys
from types import SimpleNamespace
import uvicorn
from comb_serving.config.serve_options import ServeOptions
from tests.helpers.middleware_server import Server

begun = []
async def model(scope, receive, send):
    if scope["type"] == "lifespan":
        await receive()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        return await send({"type": "lifespan.shutdown.complete"})
    asked = json.loads((await receive())["body"] or b"{}")
    stream, steps = asked.get("stream"), asked.get("max_tokens", 0)
    kind = b"text/event-stream" if stream else b"application/json"
    begun.append(bool(asked))
    if not stream:
        await asyncio.sleep(steps / 10)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
    for step in range(steps if stream else 0):
        data = json.dumps({"choices": [{"delta": {"content": str(step)}}]})
        await send({"type": "http.response.body", "body": f"data: {data}\\n\\n".encode(), "more_body": True})
        await asyncio.sleep(0.1)
    await send({"type": "http.response.body", "body": b"data: [DONE]\\n\\n" if stream else b"%d" % sum(begun)})

server = Server(drain_seconds=ServeOptions.from_environment().drain_seconds)
server.app.app = model
submit = server.encoders.submit
def short_ones(key, token_ids, handle, lora="", *, exact=False):
    return submit(key, token_ids, handle) if len(token_ids) < 30 else asyncio.Future()
server.encoders.submit = short_ones
application = SimpleNamespace(state=SimpleNamespace())
async def app(scope, receive, send):
    await server.app({**scope, "app": application}, receive, send)
uvicorn.Server.capture_signals = lambda self: contextlib.nullcontext()  # as vLLM's
flags = dict(zip(sys.argv[3::2], sys.argv[4::2]))
application.state.server = uvicorn.Server(
    uvicorn.Config(app, flags["--host"], int(flags["--port"]), log_level="warning", lifespan="on")
)
asyncio.run(application.state.server.serve())
os._exit(0)
"""
LAUNCH = f"""
import pathlib, sys
from comb_serving.config.serve_options import ServeOptions
from comb_serving.launch.launcher import launch
sys.exit(launch(ServeOptions("owner/adapter", drain_seconds={DRAIN}), ["--host", "127.0.0.1", "--port", sys.argv[2]],
    root=pathlib.Path(sys.argv[1]), server=[sys.executable, "-c", sys.argv[3]]))
"""
SAID = [{"role": "user", "content": "Where?"}]
LONG = {"messages": SAID, "max_tokens": 10_000}


def test_open_streams_have_their_time_then_an_error_and_nothing_is_left(tmp_path: Path) -> None:
    port = free_port()
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCH, str(tmp_path), str(port), SERVER])
    server = Served(port, tmp_path, launcher, tmp_path)

    def healthy() -> bool:
        assert launcher.poll() is None
        try:
            return server.request("GET", "/health")[0] == 200
        except OSError:
            return False

    wait_for(healthy)
    cases: dict[str, tuple[str, Any]] = {
        "short": (CHAT, {**LONG, "stream": True, "max_tokens": 12, "documents": ["Ada."]}),
        "chat": (CHAT, {**LONG, "stream": True, "documents": ["Ada."]}),
        "plain": (CHAT, {**LONG, "stream": True}),
        "completion": (COMPLETIONS, {"prompt": "x", "stream": True, "max_tokens": 10_000, "documents": ["Ada."]}),
        "message": (MESSAGES, {**LONG, "stream": True}),
        "response": (RESPONSES, {"input": "x", "stream": True, "max_tokens": 10_000, "documents": ["Ada."]}),
        "whole": (CHAT, {**LONG, "documents": ["Ada."]}),
        "encoding": (CHAT, {**LONG, "documents": ["Ada goes on. " * 8]}),
        "registration": ("/v1/documents", {"text": "Ada goes on. " * 8}),
    }
    with ThreadPoolExecutor(16) as clients, ExitStack() as ending:
        ending.callback(launcher.kill)  # and with it the server
        open_ones = {name: clients.submit(server.request, "POST", *case) for name, case in cases.items()}
        wait_for(lambda: server.request("GET", "/begun")[1] == 7)
        start = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        wait_for(lambda: server.request("GET", "/health")[0] == 503)
        status, body = server.request("POST", CHAT, LONG)
        assert (status, "shutting down" in body["error"]["message"]) == (503, True)
        assert launcher.wait(DRAIN + 20) == 0
        assert time.monotonic() - start > DRAIN
        answers = {name: found.result() for name, found in open_ones.items()}
    assert answers.pop("short")[1].endswith("data: [DONE]\n\n")
    for name in ("whole", "encoding", "registration"):
        status, body = answers.pop(name)
        assert (status, body["error"]["code"]) == (503, 503), name
    for name, (status, body) in answers.items():
        last = body.removesuffix("data: [DONE]\n\n").rstrip().rpartition("\n\n")[2]
        event, _, data = last.rpartition("data: ")
        assert (status, json.loads(data)["error"]["code"]) == (200, 503), name
        assert event == ("event: error\n" if name in ("message", "response") else ""), name
        assert body.count('"error"') == (2 if event else 1)
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(launcher.pid, 0)
