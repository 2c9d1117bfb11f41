"""A replica: an actor of Ray Serve that owns one `comb serve`, ends with it, and passes requests on to it.

What clients have registered under /v1/documents is in an actor of its own, that outlives ingress and replicas.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import shutil
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Self
from urllib.parse import quote

import aiohttp
import ray
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from ray import serve
from ray.exceptions import RayActorError
from yarl import URL

from comb_serving.api.http import RequestError
from comb_serving.api.registered import FOLDER
from comb_serving.api.routes import DOCUMENTS, WEIGHTS, error_body
from comb_serving.config.instance import own_disk
from comb_serving.config.serve_options import ServeOptions, parse_bytes
from comb_serving.launch.server_process import COMMAND, ServerProcess

logger = logging.getLogger(__name__)

CONNECT_SECONDS, WATCH_SECONDS, RETRY_AFTER_S = 5.0, 0.2, 5
UP_SECONDS = 10.0  # for so long a replica counts as up that was healthy: Ray asks every second
HANG_SECONDS = 60.0  # in which a server that is alive says how it is
DISK_SECONDS = 60.0  # for the end of the server of the replica whose place this one takes
# of one hop of a connection, not of the request
_HOP = {"connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding", "upgrade", "host"}
_HOP |= {"content-length"}

Key = tuple[str, str]  # of a registered document: the sender (`sender_of`), and its id
WholeAnswer = tuple[int, dict[str, str], bytes]  # status, headers, body
NAME = "{replica}"  # in arguments: stands for the replica's name, for folders that each needs for itself


class ReplicasConfig(BaseModel):
    """Settings of the Ray Serve application, from a configuration file or from the command line."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str  # of `comb serve`
    replicas: int = Field(2, ge=1)
    arguments: tuple[str, ...] = ()  # of every `comb serve`, and vLLM's; `NAME` stands for the replica's name
    gpus: float = 0  # that Ray sets aside for each server
    cpus: float = 1
    environment: Mapping[str, str] = {}  # of every server
    load_factor: float = Field(1.25, ge=1)  # of `affinity.limit`
    load_floor: int = Field(8, ge=1)
    max_ongoing_requests: int = Field(1000, ge=1)  # of each replica; what is above that waits, then gets 503
    start_seconds: float = 900.0  # longest wait for a server
    command: tuple[str, ...] = COMMAND  # run instead of `comb serve`, for tests

    @field_validator("arguments", mode="before")
    @classmethod
    def _words(cls, given: Any) -> list[str]:
        return shlex.split(given) if isinstance(given, str) else [str(word) for word in given]

    @model_validator(mode="after")
    def _a_folder_each(self) -> Self:
        if self.replicas > 1 and NAME not in (self._option("--comb-disk") or NAME):
            raise ValueError(f"a --comb-disk is one server's: write {NAME} into it, as in /data/comb/{NAME}")
        return self

    @property
    def max_body_bytes(self) -> int:
        """Longest body that the servers take; nothing reads on behind it."""
        return parse_bytes(self._option("--comb-max-body") or str(ServeOptions.max_body_bytes))

    def disk_of(self, replica: str) -> Path | None:
        """The disk folder of one replica's server; None if it has none."""
        path = self._option("--comb-disk")
        return None if path is None else Path(path.replace(NAME, replica))

    def _option(self, flag: str) -> str | None:
        words = [word for each in self.arguments for word in each.split("=", 1 if each.startswith("--") else 0)]
        return dict(pairwise(words)).get(flag)

    def command_of(self, replica: str) -> list[str]:
        return [*self.command, self.checkpoint, *(argument.replace(NAME, replica) for argument in self.arguments)]


class Registrations:
    """Registered documents by their keys. Changes have numbers, so that replicas can ask for what they have missed.

    And the weights that replicas serve, as those of one configuration have to have the same.
    """

    def __init__(self) -> None:
        self._serving: dict[str, tuple[str, str, float]] = {}  # by replica: its configuration, its weights, and when
        self._known: dict[Key, tuple[int, dict[str, Any], float | None]] = {}
        self._changes = time.time_ns()  # an actor in place of a lost one gives no number again

    def put(self, key: Key, fields: Mapping[str, Any] | None) -> dict[str, Any] | None:
        """Remembers the body of a POST /v1/documents, or forgets it (None); returns the one that it replaces."""
        _, before = self._bodies().get(key, (0, None))
        self._changes += 1
        self._known.pop(key, None)
        if fields is not None:
            ttl = fields.get("ttl_s")
            expires_at = None if ttl is None else time.time() + ttl  # since the epoch: the same on every machine
            self._known[key] = self._changes, dict(fields), expires_at
        return before

    def missing(self, told: Mapping[Key, int]) -> tuple[dict[Key, tuple[int, bytes]], list[Key]]:
        """What a replica hasn't been `told`: documents to register, with numbers of changes, and those to delete."""
        bodies = self._bodies().items()
        new = {key: (number, json.dumps(body).encode()) for key, (number, body) in bodies if told.get(key) != number}
        return new, [key for key in told if key not in self._known]

    def others(self, replica: str, config: str, weights: str) -> list[str]:
        """Replicas of this configuration that are up with other weights; without any, this one is up from now on."""
        now = time.monotonic()
        self._serving = {name: one for name, one in self._serving.items() if one[2] > now - UP_SECONDS}
        before = {name: one for name, one in self._serving.items() if name != replica and one[0] == config}
        found = sorted(name for name, one in before.items() if one[1] != weights)
        if not found:
            self._serving[replica] = config, weights, now
        return found

    def _bodies(self) -> dict[Key, tuple[int, dict[str, Any]]]:
        """With numbers of changes, and the time that is left to them."""
        now = time.time()
        self._known = {key: one for key, one in self._known.items() if one[2] is None or one[2] > now}
        return {
            key: (number, fields if expires_at is None else {**fields, "ttl_s": expires_at - now})
            for key, (number, fields, expires_at) in self._known.items()
        }


def registrations_of(application: str) -> Any:
    """The actor of a Ray Serve application, made at first use and again when lost: ask for it at each use."""
    options = {"name": f"comb-registrations-{application}", "namespace": "comb", "lifetime": "detached"}
    return ray.remote(Registrations).options(num_cpus=0, get_if_exists=True, **options).remote()


@dataclass(frozen=True)
class RelayedRequest:
    """A client's request; target: path and query, headers: names in lower case."""

    method: str
    target: str
    headers: Mapping[str, str]
    body: bytes = b""


class CombReplica:
    """Its name is made of its rank, which Ray gives to the next one, so that its documents and folders stay its own."""

    async def __init__(self, config: ReplicasConfig) -> None:  # type: ignore[misc]  # Ray Serve awaits it
        context = serve.get_replica_context()
        self.name, self._config = f"replica-{context.rank.rank}", config
        self._catching_up = asyncio.Lock()
        self._application = context.app_name
        self._told: dict[Key, int] = {}
        self._refused: dict[Key, WholeAnswer] = {}
        if (disk := config.disk_of(self.name)) is not None:
            await asyncio.to_thread(_forget_registered, disk)
        self._server = ServerProcess(
            config.command_of(self.name), host=ray.util.get_node_ip_address(), environment=config.environment
        )
        await asyncio.to_thread(self._server.wait_until_healthy, config.start_seconds)
        # answers may take long; connections mayn't. Each is used once: a server closes idle ones whenever it likes,
        # and a request sent into that moment looks like a lost server
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(timeout=timeout, auto_decompress=False, connector=connector)
        await self._check()
        await self.catch_up()  # before Ray lets requests in
        self._watch = asyncio.create_task(self._end_with_server())

    async def _end_with_server(self) -> None:
        """Ray sends no more requests to an actor that is gone, and starts another one at once."""
        try:
            while True:
                self._server.check()
                await asyncio.sleep(WATCH_SECONDS)
        except RuntimeError:
            logger.exception("%s ends with its server", self.name)
            os._exit(1)

    def record_replica_metadata(self) -> dict[str, str]:
        """What the router knows of this replica; asked by Ray."""
        return {"name": self.name}

    def address(self) -> tuple[str, str]:
        """Its name, and where its server listens."""
        return self.name, self._server.url

    async def check_health(self) -> None:
        """Asked by Ray. Raises RuntimeError if another one should take this one's place."""
        rank = serve.get_replica_context().rank.rank
        if self.name != f"replica-{rank}":  # after others were taken away for good, Ray fills the gap in the ranks
            raise RuntimeError(f"{self.name} must start again as replica-{rank}")
        await self._check()
        if not self._catching_up.locked():  # with what was registered while it started; slow encoding isn't ill health
            self._caught_up = asyncio.create_task(self.catch_up())

    async def _check(self) -> None:
        """Raises RuntimeError for an unhealthy server, and for one that would answer otherwise than others do."""
        try:
            async with asyncio.timeout(HANG_SECONDS) as limit:
                status, headers, body = await self._whole(RelayedRequest("GET", "/health", {}))
        except TimeoutError:
            if limit.expired():
                logger.exception("%s ends, as its server hangs", self.name)
                os._exit(1)  # Ray would wait minutes for its requests, and so would all who register documents
            raise
        if status != 200:
            raise RuntimeError(f"{self.name} is not healthy: {body[:300]!r}")
        # without what says nothing of the answers: Ray leaves replicas as they are when only their number changes
        config, weights = self._config.model_dump_json(exclude={"replicas"}), headers.get(WEIGHTS, "")
        others = []
        with suppress(RayActorError):  # lost, and made again where it is asked next
            others = await registrations_of(self._application).others.remote(self.name, config, weights)
        if others:
            raise RuntimeError(
                f"{self._config.checkpoint} has other weights than {', '.join(others)} started with: put its files "
                "back, or deploy the new ones from a folder of their own"
            )

    async def answer(self, request: RelayedRequest, **_: Any) -> AsyncIterator[Any]:
        """None as soon as this replica has the request; status and headers; then the body as it comes."""
        yield None
        begun = False
        try:
            async with self._sent(request) as response:
                yield response.status, _end_to_end(response.headers)
                begun = True
                async for chunk in response.content.iter_any():
                    yield chunk
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            if begun:
                raise RuntimeError(f"the server of {self.name} broke off: {error}") from None
            lost = RequestError(503, f"the server of {self.name} broke off; see its log", retry_after=RETRY_AFTER_S)
            yield lost.status, {**lost.headers, "content-type": "application/json"}
            yield error_body(request.target.partition("?")[0], lost)

    async def catch_up(self) -> dict[Key, WholeAnswer]:
        """Registers and deletes what this replica hasn't heard of; returns the answers of those that it refuses."""
        async with self._catching_up:
            new, gone = await registrations_of(self._application).missing.remote(self._told)
            for key in gone:
                await self.delete(key)
                # not before: where the connection breaks off, it is told again
                del self._told[key]
                self._refused.pop(key, None)
            for key, (number, body) in new.items():
                answer = await self._tell("POST", key, DOCUMENTS, body)
                # what is refused for now (no room, no encoder yet) is told again: 0 is no number
                self._told[key] = number if answer[0] in (200, 400, 404, 413) else 0
                self._refused.pop(key, None)
                if answer[0] != 200:
                    self._refused[key] = answer
            return dict(self._refused)

    async def delete(self, key: Key) -> WholeAnswer:
        """Deletes a document at its server, also one that this replica hasn't heard of."""
        return await self._tell("DELETE", key, f"{DOCUMENTS}/{quote(key[1], safe='')}")

    async def _tell(self, method: str, key: Key, target: str, body: bytes = b"") -> WholeAnswer:
        headers = {"content-type": "application/json", **({"authorization": key[0]} if key[0] else {})}
        answer = await self._whole(RelayedRequest(method, target, headers, body))
        if answer[0] not in (200, 404):
            logger.warning("%s doesn't take document %r: %s", self.name, key[1], answer[2][:200])
        return answer

    async def _whole(self, request: RelayedRequest) -> WholeAnswer:
        async with self._sent(request) as response:
            return response.status, _end_to_end(response.headers), await response.read()

    def _sent(self, request: RelayedRequest) -> Any:
        """The server's answer once its head has come; leaving closes the connection, so the server knows."""
        return self._session.request(
            request.method,
            URL(f"{self._server.url}{request.target}", encoded=True),
            headers=_end_to_end(request.headers),
            data=request.body or None,
            allow_redirects=False,
        )

    async def __del__(self) -> None:  # Ray Serve awaits it
        if hasattr(self, "_watch"):
            self._watch.cancel()
            await self._session.close()
        if hasattr(self, "_server"):
            await asyncio.to_thread(self._server.stop)


def _forget_registered(disk: Path) -> None:
    """The actor knows them all, and nobody tells what was deleted while this replica was down."""
    with own_disk(str(disk), DISK_SECONDS):  # they aren't those of another server
        shutil.rmtree(disk / FOLDER, ignore_errors=True)


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP}
