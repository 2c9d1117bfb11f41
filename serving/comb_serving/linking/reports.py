"""What the engine did for a request, said to the front beside vLLM's own outputs: one datagram each.

vLLM has no field for it that all of its routes and streams would show. The engine sends when it has admitted a request,
before any token of the answer can be seen, so who writes the answer finds it in the socket. It is information only:
when the front is gone, or slow, reports are dropped and nothing else happens.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import socket
from collections import OrderedDict
from dataclasses import astuple, dataclass
from pathlib import Path

SOCKET = "reports.sock"
_KEPT = 4096  # reports that nobody has asked for


@dataclass(frozen=True)
class LinkReport:
    """Args:
    head_tokens: taken from the exact prefix cache.
    linked_tokens: taken from the pool.
    computed_tokens: of the prompt that passed through the model: seams and query.
    """

    head_tokens: int
    linked_tokens: int
    computed_tokens: int


def name_of(token: str) -> str:
    """How a request's report is found: by its signed `Capability`, which both sides have."""
    return hashlib.sha256(token.encode("utf-8", "surrogatepass")).hexdigest()[:32]


class ReportSender:
    """The engine's end."""

    def __init__(self, folder: Path) -> None:
        self._path = str(folder / SOCKET)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def send(self, name: str, report: LinkReport) -> None:
        """Never waits and never fails."""
        with contextlib.suppress(OSError):
            self._socket.sendto(json.dumps([name, *astuple(report)]).encode(), self._path)


class ReportReceiver:
    """The front's end; made before the engine has requests."""

    def __init__(self, folder: Path) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)
        self._socket.bind(str(folder / SOCKET))
        self._found: OrderedDict[str, LinkReport] = OrderedDict()

    def take(self, name: str) -> LinkReport | None:
        """The newest report of a request; None if there is none."""
        with contextlib.suppress(BlockingIOError):
            while True:
                found, *numbers = json.loads(self._socket.recv(1024))
                self._found[found] = LinkReport(*numbers)
                while len(self._found) > _KEPT:
                    self._found.popitem(last=False)
        return self._found.pop(name, None)

    def close(self) -> None:
        """Closes the socket; its file goes with the instance's folder."""
        self._socket.close()
