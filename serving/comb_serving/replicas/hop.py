"""One hop: a request to a replica, and its answer as it comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field

import aiohttp
from yarl import URL

from comb_serving.replicas.registrations import Key, Registration

CONNECT_SECONDS = 5.0
# of one hop of a connection, not of the request
_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
_HOP |= {"content-length"}
GONE = (aiohttp.ClientError, ConnectionError, TimeoutError)


@dataclass
class Replica:
    """A `comb serve` by its name, which stays when it is started again at another address.

    Args:
        generation: which start of it this is.
        told: the registered documents that it has.
    """

    name: str
    address: str | None = None
    generation: str | None = None
    told: dict[Key, Registration] = field(default_factory=dict)
    up: bool = False
    under_way: int = 0
    misses: int = 0


class _Chunks:
    """The body of a replica's answer; when it ends, breaks or is closed, the replica has one request less."""

    def __init__(self, replica: Replica, response: aiohttp.ClientResponse) -> None:
        self._replica, self._response, self._open = replica, response, True

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self

    async def __anext__(self) -> bytes:
        try:
            chunk: bytes = await self._response.content.readany()
        except BaseException:
            await self.aclose()
            raise
        if not chunk:
            await self.aclose()
            raise StopAsyncIteration
        return chunk

    async def aclose(self) -> None:
        """Closes the connection, which tells the replica that nobody waits for the rest."""
        if self._open:
            self._open = False
            self._replica.under_way -= 1
            self._response.close()


async def once(data: bytes) -> AsyncIterator[bytes]:
    """A body that is all there."""
    yield data


@dataclass
class Answer:
    """Status, headers and body of an answer; whoever takes it reads `chunks` to the end, or closes them."""

    status: int
    headers: dict[str, str]
    chunks: AsyncIterator[bytes]

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([chunk async for chunk in self.chunks])

    async def close(self) -> None:
        """Whoever takes it has left: the rest isn't needed."""
        if isinstance(self.chunks, _Chunks):
            await self.chunks.aclose()


@dataclass
class Connections:
    """To all replicas."""

    _session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Closes what is open."""
        if self._session is not None:
            await self._session.close()

    async def ask(self, replica: Replica, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """A replica's answer once its head has come. Raises what `GONE` names if it doesn't."""
        if self._session is None:
            # answers may take long; connections mayn't. Each is used once: a server closes idle ones whenever it likes,
            # and a request sent into that moment looks like a lost replica
            timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, connector=connector)
        replica.under_way += 1
        try:
            sent = {name: value for name, value in headers.items() if name.lower() not in _HOP}
            url = URL(f"{replica.address}{target}", encoded=True)
            response = await self._session.request(method, url, headers=sent, data=body or None, allow_redirects=False)
        except BaseException:
            replica.under_way -= 1
            raise
        kept = {name: value for name, value in response.headers.items() if name.lower() not in _HOP}
        return Answer(response.status, kept, _Chunks(replica, response))
