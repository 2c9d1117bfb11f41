"""Messages between the engine and a worker process: JSON over a socket pair, tensors in shared memory.

A payload lies in anonymous shared memory (memfd) whose descriptor goes along with the message. It has no name, so
there is nothing in /dev/shm that a crash could leave behind or another user could open, and the size of that folder is
no limit; the system frees it when the last process that holds it ends, in whatever way. It is read, not mapped: were
it cut short, a mapping would kill the reader. No pickle.
"""

from __future__ import annotations

import json
import os
import socket
import struct
import tempfile
from collections.abc import Mapping
from typing import Any

_LENGTH = struct.Struct("<I")
MAX_MESSAGE_BYTES = 2**20  # ours have some hundred bytes: what is large is a payload


class WireError(RuntimeError):
    """The other side sent something that isn't a message."""


def send(channel: socket.socket, message: Mapping[str, Any], payload: bytes | None = None) -> None:
    """Sends one message. Raises OSError (TimeoutError among them) if the other side doesn't take it."""
    text = json.dumps(message).encode()
    data = _LENGTH.pack(len(text)) + text
    if payload is None:
        channel.sendall(data)
        return
    descriptor = _shared(payload)
    try:
        sent = socket.send_fds(channel, [data], [descriptor])
        channel.sendall(data[sent:])
    finally:
        os.close(descriptor)


def receive(channel: socket.socket) -> tuple[dict[str, Any], bytes | None]:
    """The next message and its payload.

    Raises:
        EOFError: the other side has closed, or died.
        WireError: not a message.
        OSError: the channel is broken, or timed out.
    """
    head, descriptors, _, _ = socket.recv_fds(channel, _LENGTH.size, 1)
    try:
        if not head:
            raise EOFError("the other side has closed")
        head += _exactly(channel, _LENGTH.size - len(head))
        (length,) = _LENGTH.unpack(head)
        if length > MAX_MESSAGE_BYTES:
            raise WireError(f"a message of {length} bytes, at most {MAX_MESSAGE_BYTES} expected")
        text = _exactly(channel, length)
        try:
            message = json.loads(text)
        except ValueError as error:
            raise WireError(f"not JSON: {error}") from error
        if not isinstance(message, dict):
            raise WireError(f"expected a JSON object, got {type(message).__name__}")
        return message, _read(descriptors[0]) if descriptors else None
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


def _exactly(channel: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = channel.recv(count - len(parts))
        if not part:
            raise EOFError("the other side has closed in the middle of a message")
        parts += part
    return parts


def _shared(payload: bytes) -> int:
    """A descriptor of anonymous shared memory that holds `payload`."""
    if hasattr(os, "memfd_create"):
        descriptor = os.memfd_create("comb-picache")
    else:  # systems other than Linux: a file without a name
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    try:
        view = memoryview(payload)
        while len(view):
            view = view[os.write(descriptor, view) :]  # one call writes at most 2 GiB
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _read(descriptor: int) -> bytes:
    with open(descriptor, "rb", buffering=0, closefd=False) as file:
        file.seek(0)  # the position is shared with the writer
        return file.read()
