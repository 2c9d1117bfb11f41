"""Encoders without processes, and a small server in vLLM's place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from comb_serving.encoding.protocol import Encoded, EncoderError, EncoderIdentity
from comb_serving.pool.capability import PoolHandle

IDENTITY = EncoderIdentity(fingerprint="adapter", dtype="float32", max_document_tokens=64, vocab_size=4096)


async def until(condition: Callable[[], Any]) -> None:
    while not condition():
        await asyncio.sleep(0.001)


@dataclass
class FakeEncoders:
    """Documents are answered when a test says so, or at once."""

    at_once: bool = True
    known: EncoderIdentity = IDENTITY
    made: str = "encoded"
    open: list[tuple[str, PoolHandle, asyncio.Future[Encoded]]] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    forgotten: list[str] = field(default_factory=list)

    async def identity(self) -> EncoderIdentity:
        return self.known

    def submit(
        self, key: str, token_ids: Sequence[int], handle: PoolHandle, lora: str = "", *, exact: bool = False
    ) -> asyncio.Future[Encoded]:
        assert len(token_ids) == handle.tokens
        future: asyncio.Future[Encoded] = asyncio.get_running_loop().create_future()
        self.asked.append(key)
        self.open.append((key, handle, future))
        if self.at_once:
            self.answer()
        return future

    def forget(self, key: str) -> None:
        self.forgotten.append(key)

    def answer(self, *, error: str | None = None, tier: str = "") -> None:
        """Ends the oldest open document."""
        _, _, future = self.open.pop(0)
        if error is None:
            future.set_result(Encoded(tier or self.made, 0.01))
        else:
            future.set_exception(EncoderError(error))


@dataclass
class Echo:
    """Answers with the body it got; streams if asked to, and waits in the middle while `gate` is closed."""

    bodies: list[dict[str, Any]] = field(default_factory=list)
    gate: asyncio.Event | None = None
    fails: bool = False
    says: str = "a"

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        body = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            body += message.get("body", b"")
            if not message.get("more_body"):
                break
        sizes = [int(value) for name, value in scope["headers"] if name == b"content-length"]
        assert sizes in ([], [len(body)])
        asked = json.loads(body) if body else {}
        self.bodies.append(asked)
        if self.fails:
            raise RuntimeError("the engine died")
        transfer = asked.get("kv_transfer_params")
        ids = transfer.get("prompt_token_ids") if isinstance(transfer, dict) else None
        rows = asked.get("prompt") if ids is None else [ids]
        count = sum(map(len, rows)) if isinstance(rows, list) and all(isinstance(r, list) for r in rows) else 7
        usage = {"prompt_tokens": count, "completion_tokens": 1, "total_tokens": count + 1}
        if asked.get("stream"):
            await self._stream(receive, send, usage)
        else:
            whole = json.dumps({"got": asked, "usage": usage}).encode()
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(whole)).encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": whole})

    async def _stream(self, receive: Any, send: Any, usage: dict[str, int]) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        first = {"choices": [{"index": 0, "delta": {"content": self.says}, "finish_reason": None}]}
        last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}
        events = [json.dumps(event, separators=(",", ":")) for event in (first, last, {"choices": [], "usage": usage})]
        for event in (*events, "[DONE]"):
            data = f"data: {event}\n\n".encode()
            # chunks need not end where events do
            await send({"type": "http.response.body", "body": data[:9], "more_body": True})
            await send({"type": "http.response.body", "body": data[9:], "more_body": True})
            if self.gate is not None:
                waiting = asyncio.ensure_future(self.gate.wait())
                leaving = asyncio.ensure_future(receive())
                await asyncio.wait([waiting, leaving], return_when=asyncio.FIRST_COMPLETED)
                left = leaving.done()
                waiting.cancel()
                leaving.cancel()
                if left:
                    return
        await send({"type": "http.response.body", "body": b""})


@dataclass
class Answer:
    """What a client got."""

    status: int | None = None
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def states(self) -> list[str]:
        """What became of its documents."""
        assert self.status == 200, self.body
        return [document["state"] for document in self.json["comb"]["documents"]]

    @property
    def events(self) -> list[Any]:
        data = [event.removeprefix("data: ") for event in self.body.decode().split("\n\n") if event]
        return [event if event == "[DONE]" else json.loads(event) for event in data]


class Client:
    """Sends one request at a time to an ASGI application."""

    def __init__(self, app: Any, key: str | None = None) -> None:
        self.app, self.key = app, key

    async def send(
        self, method: str, path: str, body: Any = None, *, leave: asyncio.Event | None = None, kind: str | None = None,
        more: Sequence[tuple[bytes, bytes]] = (),
    ) -> Answer:  # fmt: skip
        """`body` is bytes, or something for JSON; the client leaves once `leave` is set; `more` are headers."""
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        headers = [(b"content-length", str(len(data)).encode())]
        headers += [(b"content-type", kind.encode())] if kind else [(b"content-type", b"application/json")]
        if self.key is not None:
            headers.append((b"authorization", f"Bearer {self.key}".encode()))
        headers += more
        parts = [data[:5], data[5:]]
        answer = Answer()

        async def receive() -> dict[str, Any]:
            if parts:
                part = parts.pop(0)
                return {"type": "http.request", "body": part, "more_body": bool(parts)}
            await (leave or asyncio.Event()).wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message["type"] == "http.response.start":
                answer.status = message["status"]
                answer.headers = {name.decode(): value.decode() for name, value in message["headers"]}
            else:
                answer.body += message.get("body", b"")

        scope = {"type": "http", "method": method, "path": path, "headers": headers, "query_string": b""}
        await self.app(scope, receive, send)
        if "content-length" in answer.headers:
            assert int(answer.headers["content-length"]) == len(answer.body)
        return answer

    async def post(self, path: str, body: Any, **options: Any) -> Answer:
        return await self.send("POST", path, body, **options)
