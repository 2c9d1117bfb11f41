"""Requests, answers and errors of an ASGI server, as much of them as the middleware needs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

TYPES = {
    400: "BadRequestError", 401: "AuthenticationError", 403: "PermissionDeniedError", 404: "NotFoundError",
    405: "MethodNotAllowedError", 409: "ConflictError", 413: "RequestTooLargeError", 429: "RateLimitError",
}  # fmt: skip
# a parser is done with long texts at once and with many values slowly, and lets nobody else run meanwhile
MAX_VALUES = 500_000
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


class RequestError(Exception):
    """What is wrong with a request, for the one who sent it: a status, and an OpenAI error object.

    Args:
        param: the field of the body that is meant.
        retry_after: seconds after which trying again makes sense.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message = status, message
        kind = TYPES.get(status, "InternalServerError")
        self.error = {"message": message, "type": kind, "param": param, "code": status}
        self.headers = {} if retry_after is None else {"retry-after": str(retry_after)}


class ClientLeftError(Exception):
    """The client went away before its answer was complete."""


def header(scope: Scope, name: str) -> str | None:
    """A header's value, or None. Raises RequestError: 400 where it stands twice, as each reader might take another."""
    wanted = name.lower().encode()
    values = [value for key, value in scope.get("headers", ()) if key.lower() == wanted]
    if len(values) > 1:
        raise RequestError(400, f"the header {name} is given {len(values)} times")
    return values[0].decode("latin-1") if values else None


def path_of(scope: Scope) -> str:
    """The path below the application's root."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body. Raises RequestError: 413 for more than `limit` bytes; ClientLeftError."""
    parts = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ClientLeftError
        parts += message.get("body", b"")
        if len(parts) > limit:
            raise RequestError(413, f"the body has more than {limit} bytes")
        if not message.get("more_body", False):
            return bytes(parts)


def parse_object(body: bytes) -> dict[str, Any]:
    """A body that must be a JSON object. Raises RequestError: 400, or 413 for one that would take seconds to parse."""
    try:
        text = body.decode(json.detect_encoding(body))  # what JSON allows; half of a surrogate pair is in none of them
    except UnicodeDecodeError as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if _has_too_many_values(text):
        raise RequestError(
            413, f"the body has more than {MAX_VALUES} values: send fewer documents or token ids at once"
        )
    try:
        value = json.loads(text)
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise RequestError(400, f"the body holds half of a surrogate pair: {error.reason}") from error
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"the body is not JSON: {error}") from error
    if not isinstance(value, dict):
        raise RequestError(400, f"the body must be a JSON object, not a {type(value).__name__}")
    return value


def _has_too_many_values(text: str) -> bool:
    """Whether what stands between the strings of a JSON text begins more than `MAX_VALUES` values, in linear time."""
    if sum(map(text.count, ",[{")) <= MAX_VALUES:
        return False
    bare = text.replace("\\\\", "").replace('\\"', "")
    if bare.count('"') > 4 * MAX_VALUES:  # a value has four quotes at most: those of its name, and its own
        return True
    return sum(map("".join(bare.split('"')[::2]).count, ",[{")) > MAX_VALUES


class Connection:
    """The `receive` of a request whose body has been read: it can be watched, and gives out another body first."""

    def __init__(self, receive: Receive) -> None:
        self.left = False  # whether the client went away before its answer was whole
        self.answered: Callable[[], bool] = lambda: False  # whether it is
        self.body: bytes | None = b""
        self._receive = receive
        self._pending: asyncio.Future[Message] | None = None

    async def __call__(self) -> Message:
        body, self.body = self.body, None
        if body is not None:
            return {"type": "http.request", "body": body, "more_body": False}
        pending, self._pending = self._pending, None
        message = await (self._receive() if pending is None else pending)
        # servers say so after every whole answer too
        self.left |= message["type"] == "http.disconnect" and not self.answered()
        return message

    async def unless_left(self, work: Awaitable[Any]) -> Any:
        """The result of `work`, which is cancelled if the client leaves first (ClientLeftError)."""
        task = asyncio.ensure_future(work)
        if self._pending is None:
            self._pending = asyncio.ensure_future(self._receive())
        try:
            await asyncio.wait([task, self._pending], return_when=asyncio.FIRST_COMPLETED)
            if not task.done() and self._pending.result()["type"] == "http.disconnect":
                self.left = True
                raise ClientLeftError
            return await task
        finally:
            if not task.done():
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)

    def close(self) -> None:
        """Stops watching."""
        if self._pending is not None:
            self._pending.cancel()


def with_body(scope: Scope, body: bytes, request_id: str | None = None) -> Scope:
    """The scope with the content length of another body, and with a name for the request in place of the client's."""
    new = [(b"content-length", str(len(body)).encode())]
    if request_id is not None:
        new.append((b"x-request-id", request_id.encode("latin-1")))
    gone = {b"transfer-encoding", *(name for name, _ in new)}
    return {**scope, "headers": [*((k, v) for k, v in scope.get("headers", ()) if k.lower() not in gone), *new]}


async def send_json(scope: Scope, send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """A whole answer, behind vLLM's own layer for other origins (CORS), which stands inside of the middleware."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in fields.items()]

    async def answer(scope: Scope, receive: Any, send: Send) -> None:
        await send({"type": "http.response.start", "status": status, "headers": pairs})
        await send({"type": "http.response.body", "body": body})

    layers = getattr(scope.get("app"), "user_middleware", ())
    cors = [layer for layer in layers if layer.cls.__name__ == "CORSMiddleware"]
    await (cors[0].cls(answer, **cors[0].kwargs) if cors else answer)(scope, None, send)


class AnswerRewriter:
    """A `send` that passes JSON answers on as `whole` and `event` make them; errors and all else go as they are."""

    def __init__(self, send: Send) -> None:
        self.send = send
        self.finished = False  # whether the answer is whole
        self._start: Message = {}
        self._streams = self._passes = False
        self._body = bytearray()

    def whole(self, body: bytes) -> bytes:
        """What goes on in place of a whole answer."""
        raise NotImplementedError

    def event(self, event: bytes) -> bytes:
        """What goes on in place of an event of a stream, which comes without the blank line at its end."""
        raise NotImplementedError

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            kind = headers.get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            readable = self._streams or kind.startswith(b"application/json")
            self._passes = message["status"] != 200 or b"content-encoding" in headers or not readable
            self._start = message
            if self._passes or self._streams:
                await self.send(message)
            return
        more = message.get("more_body", False)
        self.finished |= message["type"] == "http.response.body" and not more
        if self._passes or message["type"] != "http.response.body":
            await self.send(message)
            return
        self._body += message.get("body", b"")
        if self._streams:
            *events, rest = bytes(self._body).split(b"\n\n")
            self._body = bytearray(rest)
            out = b"".join(map(self.event, events)) + (b"" if more else rest)
            if out or not more:
                await self.send({"type": "http.response.body", "body": out, "more_body": more})
        elif not more:
            out, headers = self.whole(bytes(self._body)), self._start.get("headers", ())
            kept = [(name, value) for name, value in headers if name.lower() != b"content-length"]
            await self.send({**self._start, "headers": [*kept, (b"content-length", str(len(out)).encode())]})
            await self.send({"type": "http.response.body", "body": out})
