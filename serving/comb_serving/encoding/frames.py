"""Messages between the manager and an encoder process: JSON in frames that begin with their length."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

MAX_FRAME_BYTES = 256 * 2**20
_LENGTH = struct.Struct(">I")


class FrameError(ConnectionError):
    """What came is no frame; nothing behind it can be trusted."""


def encode(message: dict[str, Any]) -> bytes:
    """One frame. Raises FrameError if it would be too long."""
    data = json.dumps(message, separators=(",", ":")).encode()
    if len(data) > MAX_FRAME_BYTES:
        raise FrameError(f"a message of {len(data)} bytes, at most {MAX_FRAME_BYTES} are allowed")
    return _LENGTH.pack(len(data)) + data


def _length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > MAX_FRAME_BYTES:
        raise FrameError(f"a frame of {length} bytes announced, at most {MAX_FRAME_BYTES} are allowed")
    return int(length)


def _decode(data: bytes) -> dict[str, Any]:
    try:
        message = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"a frame that isn't JSON: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a frame holds an object, not a {type(message).__name__}")
    return message


async def receive(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message. Raises ConnectionError or IncompleteReadError when there is none any more."""
    return _decode(await reader.readexactly(_length(await reader.readexactly(_LENGTH.size))))


def receive_blocking(connection: socket.socket) -> dict[str, Any]:
    """The next message from a blocking socket. Raises ConnectionError when there is none any more."""
    return _decode(_read(connection, _length(_read(connection, _LENGTH.size))))


def _read(connection: socket.socket, size: int) -> bytes:
    parts = bytearray()
    while len(parts) < size:
        part = connection.recv(min(size - len(parts), 2**20))
        if not part:
            raise ConnectionResetError("the connection was closed")
        parts += part
    return bytes(parts)
