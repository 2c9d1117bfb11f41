"""The end of a server: open requests have their time, then an error, and nothing is held."""

from __future__ import annotations

import asyncio
import json
import time
from types import SimpleNamespace
from typing import Any

from comb_serving.api.routes import CHAT, COMPLETIONS, DOCUMENTS, MESSAGES, RESPONSES
from tests.helpers.fakes import until
from tests.helpers.middleware_server import ASK, ASKED, Server, chat

DRAIN = 0.5
STREAMS: dict[str, tuple[str, dict[str, Any]]] = {
    "short": (CHAT, chat(seed=3)),
    "chat": (CHAT, chat()),
    "plain": (CHAT, {"messages": ASKED}),
    "completion": (COMPLETIONS, {**ASK[COMPLETIONS], "documents": ["Ada."]}),
    "message": (MESSAGES, ASK[MESSAGES]),
    "response": (RESPONSES, {**ASK[RESPONSES], "documents": ["Ada."]}),
}
WAITING: dict[str, tuple[str, dict[str, Any]]] = {
    "encoding": (CHAT, chat(documents=["Ada goes on."])),
    "registration": (DOCUMENTS, {"text": "Bob goes on."}),
}


async def test_open_requests_have_their_time_then_an_error_and_nothing_is_held() -> None:
    server, uvicorn, begun = Server(drain_seconds=DRAIN), SimpleNamespace(config=SimpleNamespace()), []

    async def model(scope: Any, receive: Any, send: Any) -> None:
        """A word every 10 ms, as many as the seed says, or without end; at the end where it doesn't stream."""
        asked = json.loads((await receive())["body"])
        begun.append(asked)
        kind = b"text/event-stream" if asked.get("stream") else b"application/json"
        if not asked.get("stream"):
            await asyncio.Event().wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", kind)]})
        for step in range(asked.get("seed", 10**6)):
            data = json.dumps({"choices": [{"delta": {"content": str(step)}}]})
            await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})
            await asyncio.sleep(0.01)
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    server.app.app = model
    asked = {name: (path, {**body, "stream": True}) for name, (path, body) in STREAMS.items()}
    asked["whole"] = CHAT, chat()
    open_ones = {name: asyncio.create_task(server.post(*each)) for name, each in asked.items()}
    await until(lambda: len(begun) == len(asked))
    server.encoders.at_once = False
    open_ones |= {name: asyncio.create_task(server.post(*each)) for name, each in WAITING.items()}
    await until(lambda: len(server.encoders.open) == len(WAITING))
    start = time.monotonic()
    server.app._end(uvicorn)  # as SIGTERM does
    assert (await server.send("GET", "/health")).status == 503
    late = await server.chat()
    assert (late.status, "shutting down" in late.json["error"]["message"], len(begun)) == (503, True, len(asked))
    await until(lambda: getattr(uvicorn, "should_exit", False))
    assert time.monotonic() - start > DRAIN
    answers = {name: await found for name, found in open_ones.items()}
    assert answers.pop("short").events[-1] == "[DONE]"
    for name in ("whole", *WAITING):
        answer = answers.pop(name)
        assert (answer.status, answer.json["error"]["code"]) == (503, 503), name
    for name, answer in answers.items():
        body = answer.body.decode()
        event, _, data = body.removesuffix("data: [DONE]\n\n").rstrip().rpartition("\n\n")[2].rpartition("data: ")
        assert (answer.status, json.loads(data)["error"]["code"]) == (200, 503), name
        assert event == ("event: error\n" if name in ("message", "response") else ""), name
        assert ("overloaded_error" in data) == (name == "message"), name  # as Anthropic's clients know it
        assert body.count('"error"') == (2 if event else 1)
    while server.encoders.open:
        server.encoders.answer()
    server.check_idle()
