"""A replica: an actor of Ray Serve that owns one `comb serve` and passes requests on to it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import aiohttp
import ray
from ray import serve
from yarl import URL

from comb_serving.api.routes import DOCUMENTS
from comb_serving.launch.server_process import ServerProcess
from comb_serving.replicas.config import ReplicasConfig
from comb_serving.replicas.registrations import Key, registrations_of

logger = logging.getLogger(__name__)

CONNECT_SECONDS = 5.0
# of one hop of a connection, not of the request
_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
_HOP |= {"content-length"}


class ServerLostError(Exception):
    """A replica's server could not be reached, or broke off before its answer was whole."""

    def __init__(self, replica: str, reached: bool) -> None:
        super().__init__(replica, reached)
        self.replica, self.reached = replica, reached


@dataclass(frozen=True)
class RelayedRequest:
    """A client's request; target: path and query, headers: names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes


class CombReplica:
    """Ray starts another one when the server has ended or says that it isn't healthy.

    Its name is made of its rank, which Ray gives to the next one, so that its documents and folders stay its own.
    """

    async def __init__(self, config: ReplicasConfig) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        context = serve.get_replica_context()
        self.name = f"replica-{context.rank.rank}"
        self._catching_up = asyncio.Lock()
        self._registrations = registrations_of(context.app_name)
        self._told: dict[Key, int] = {}
        self._refused: dict[Key, tuple[int, dict[str, str], bytes]] = {}
        self._changes = 0
        self._server = ServerProcess(
            config.command_of(self.name), host=ray.util.get_node_ip_address(), environment=config.environment
        )
        await asyncio.to_thread(self._server.wait_until_healthy, config.start_seconds)
        # answers may take long; connections mayn't. Each is used once: a server closes idle ones whenever it likes,
        # and a request sent into that moment looks like a lost server
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, connector=connector)
        await self.catch_up()  # before Ray lets requests in

    def record_replica_metadata(self) -> dict[str, str]:
        """What the router knows of this replica; asked by Ray."""
        return {"name": self.name, "address": self._server.url}

    async def check_health(self) -> None:
        """Asked by Ray. Raises RuntimeError or ServerLostError if another one should take this one's place."""
        rank = serve.get_replica_context().rank.rank
        if self.name != f"replica-{rank}":  # after others were taken away for good, Ray fills the gap in the ranks
            raise RuntimeError(f"{self.name} must start again as replica-{rank}")
        self._server.check()
        status, _, body = await self._whole(RelayedRequest("GET", "/health", {}, b""))
        if status != 200:
            raise RuntimeError(f"{self.name} is not healthy: {body[:300]!r}")

    async def answer(self, request: RelayedRequest, changes: int, **_: Any) -> AsyncIterator[Any]:
        """This replica's name as soon as it has the request; status and headers; then the body as it comes.

        Args:
            changes: of registrations that clients may count on.

        Raises:
            ServerLostError: when the server has.
        """
        yield self.name
        if self._changes < changes:
            await self.catch_up()
        async with self._sent(request) as response:
            yield response.status, _end_to_end(response.headers)
            async for chunk in response.content.iter_any():
                yield chunk

    async def catch_up(self) -> dict[Key, tuple[int, dict[str, str], bytes]]:
        """Registers and deletes what this replica hasn't heard of; returns the answers of those that it refuses."""
        async with self._catching_up:
            self._changes, new, gone = await self._registrations.missing.remote(self._told)
            for key in gone:
                await self._tell("DELETE", key, f"{DOCUMENTS}/{quote(key[1], safe='')}", b"")
                # not before: where the connection breaks off, it is told again
                del self._told[key]
                self._refused.pop(key, None)
            for key, (number, body) in new.items():
                answer = await self._tell("POST", key, DOCUMENTS, body)
                self._told[key] = number
                self._refused.pop(key, None)
                if answer[0] != 200:
                    self._refused[key] = answer
            return dict(self._refused)

    async def _tell(self, method: str, key: Key, target: str, body: bytes) -> tuple[int, dict[str, str], bytes]:
        headers = {"content-type": "application/json", **({"authorization": key[0]} if key[0] else {})}
        status, headers, text = await self._whole(RelayedRequest(method, target, headers, body))
        if status not in (200, 404):
            logger.warning("%s doesn't take document %r: %s", self.name, key[1], text[:200])
        return status, headers, text

    async def _whole(self, request: RelayedRequest) -> tuple[int, dict[str, str], bytes]:
        async with self._sent(request) as response:
            return response.status, _end_to_end(response.headers), await response.read()

    @asynccontextmanager
    async def _sent(self, request: RelayedRequest) -> AsyncIterator[aiohttp.ClientResponse]:
        """The server's answer once its head has come; leaving closes the connection, so the server knows."""
        url = URL(f"{self._server.url}{request.target}", encoded=True)
        headers, data = _end_to_end(request.headers), request.body or None
        try:
            async with self._session.request(
                request.method, url, headers=headers, data=data, allow_redirects=False
            ) as response:
                yield response
        except aiohttp.ClientConnectorError as error:
            raise ServerLostError(self.name, False) from error
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            raise ServerLostError(self.name, True) from error

    async def __del__(self) -> None:  # Ray Serve awaits it
        if hasattr(self, "_session"):
            await self._session.close()
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.stop)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}
