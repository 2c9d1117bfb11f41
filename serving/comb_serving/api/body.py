"""Requests and answers of an ASGI server, as much of them as the middleware needs."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from comb_serving.api.request_error import RequestError

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class ClientLeftError(Exception):
    """The client went away before its answer was complete."""


def header(scope: Scope, name: str) -> str | None:
    """A header's value, or None.

    Raises:
        RequestError: 400 where it stands twice: two readers might each take another one for it.
    """
    wanted = name.lower().encode()
    values = [value for key, value in scope.get("headers", ()) if key.lower() == wanted]
    if len(values) > 1:
        raise RequestError(400, f"the header {name} is given {len(values)} times")
    return values[0].decode("latin-1") if values else None


def path_of(scope: Scope) -> str:
    """The path below the application's root."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "")) or "/"


# a parser is done with long texts at once and with many values slowly, and lets nobody else run meanwhile
MAX_VALUES = 500_000


async def read_body(receive: Receive, limit: int) -> bytes:
    """The whole body.

    Raises:
        RequestError: 413 if it is longer than `limit` bytes.
        ClientLeftError: if the client leaves meanwhile.
    """
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


_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def _has_too_many_values(text: str) -> bool:
    """Whether what stands between the strings of a JSON text begins more than `MAX_VALUES` values, in linear time."""

    def values(text: str) -> int:
        return sum(map(text.count, ",[{"))

    if values(text) <= MAX_VALUES:
        return False
    bare = text.replace("\\\\", "").replace('\\"', "")
    # a value has four quotes at most: those of its name, and its own
    return bare.count('"') > 4 * MAX_VALUES or values("".join(bare.split('"')[::2])) > MAX_VALUES


class Connection:
    """The `receive` of a request whose body has been read: it can be watched, and gives out another body first.

    Attributes:
        left: whether the client went away before its answer was whole (`answered` says whether it is).
    """

    def __init__(self, receive: Receive, body: bytes = b"") -> None:
        self.left = False
        self.body: bytes | None = body
        self.answered: Callable[[], bool] = lambda: False
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


def with_body(scope: Scope, body: bytes, **more: str) -> Scope:
    """The scope with the content length of another body; `more` are headers that replace the client's, with _ for -."""
    changed = {"content-length": str(len(body)), **{name.replace("_", "-"): value for name, value in more.items()}}
    new = [(name.encode(), value.encode("latin-1")) for name, value in changed.items()]
    gone = {b"transfer-encoding", *(name for name, _ in new)}
    return {**scope, "headers": [*((k, v) for k, v in scope.get("headers", ()) if k.lower() not in gone), *new]}


async def send_json(send: Send, status: int, body: bytes, headers: dict[str, str] | None = None) -> None:
    """A whole answer."""
    fields = {"content-type": "application/json", "content-length": str(len(body)), **(headers or {})}
    pairs = [(name.encode(), value.encode()) for name, value in fields.items()]
    await send({"type": "http.response.start", "status": status, "headers": pairs})
    await send({"type": "http.response.body", "body": body})
