"""The router: one address in front of several `comb serve`, whichever program starts them.

    request -> documents in the body -> a replica (`affinity.choose`) -> its answer, chunk by chunk
                                     -> it can't be reached: the next one; none is left: 503

`application` runs it on Ray Serve.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from urllib.parse import quote, unquote

import aiohttp

from comb_serving.api.documents import DOCUMENTS, handles_path
from comb_serving.api.errors import RequestError
from comb_serving.replicas.affinity import Bound, Part, choose, parts_of
from comb_serving.replicas.hop import GONE, Answer, Connections, Replica, once
from comb_serving.replicas.registrations import Key, Registration, Registrations

logger = logging.getLogger(__name__)

PROBE_SECONDS, RETRY_AFTER_S = 10.0, 5
MAX_LOST = 2  # replicas that broke off over one request: a request that ends servers must not end them all
MAX_MISSES = 3  # health checks in a row that a busy replica may leave without an answer


@dataclass
class Router:
    """Sends requests to replicas.

    Args:
        replicas: by name.
        bound: on the load of the replica that documents ask for.
    """

    replicas: Mapping[str, Replica]
    bound: Bound = field(default_factory=Bound)
    registrations: Registrations = field(default_factory=Registrations)
    counters: Counter[tuple[str, str]] = field(default_factory=Counter)
    connections: Connections = field(default_factory=Connections)

    @classmethod
    def of(cls, names: list[str], bound: Bound | None = None) -> Router:
        """A router that knows no address yet."""
        return cls({name: Replica(name) for name in names}, bound or Bound())

    async def close(self) -> None:
        """Closes connections."""
        await self.connections.close()

    # ---- requests ----

    async def handle(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Answers one request. A broken connection in the middle of an answer is raised: the client must see it.

        Args:
            target: path and query. headers: names in lower case.
        """
        path = target.partition("?")[0]
        try:
            if path == "/health":
                return self._health()
            if path == "/metrics":
                return _answer(200, self._metrics(), "text/plain; version=0.0.4")
            if handles_path(path) and method in ("POST", "DELETE"):
                return await self._to_all(method, target, headers, body)
            return await self._to_one(method, target, headers, body)
        except RequestError as error:
            found = _answer(error.status, error.body)
            found.headers |= error.headers
            return found

    async def _to_one(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        parts = await asyncio.to_thread(_parts, body, headers.get("authorization", "")) if body else []
        tried: set[str] = set()
        lost = 0
        while lost < MAX_LOST:
            loads = {r.name: r.under_way for r in self.replicas.values() if r.up and r.name not in tried}
            if not loads:
                break
            name, spilled = choose(parts, loads, self.bound)
            tried.add(name)
            self.counters["requests", name] += 1
            self.counters["spilled", name] += spilled
            try:
                return await self.connections.ask(self.replicas[name], method, target, headers, body)
            except GONE as error:
                # nothing of an answer has gone out, so another one may give it
                self._lost(self.replicas[name], error)
                lost += not isinstance(error, aiohttp.ClientConnectorError)
        why = f"{lost} replicas broke off over this request" if lost >= MAX_LOST else "no replica is up"
        raise RequestError(503, f"{why}; see their logs", retry_after=RETRY_AFTER_S)

    def _lost(self, replica: Replica, error: BaseException) -> None:
        logger.warning("replica %s: %s: %s", replica.name, type(error).__name__, error)
        self.counters["lost", replica.name] += 1
        self.left(replica.name)

    # ---- registered documents ----

    async def _to_all(self, method: str, target: str, headers: Mapping[str, str], body: bytes) -> Answer:
        """Registration and deletion reach every replica that is up, so that any of them can answer any request.

        The answer is the first error, or else a replica's; one that is down gets the document when it comes back.
        """
        found: dict[tuple[str, str | None], tuple[int, dict[str, str], bytes] | None] = {}
        # one that comes up meanwhile has been told only of what was registered before
        while new := [each for each in self.replicas.values() if each.up and (each.name, each.generation) not in found]:
            answers = await asyncio.gather(*(self._whole(each, method, target, headers, body) for each in new))
            found |= {(each.name, each.generation): answer for each, answer in zip(new, answers, strict=True)}
        whole = {name: answer for (name, _), answer in found.items() if answer is not None}
        if not whole:
            raise RequestError(503, "no replica is up; see their logs", retry_after=RETRY_AFTER_S)
        # one replica that knew a document is enough to say that it is deleted
        status, kept, data = (min if method == "DELETE" else max)(whole.values(), key=lambda answer: answer[0])
        authorization = headers.get("authorization", "")
        if method == "DELETE":
            self._take_note(whole, (authorization, _document_of(target)), None)
        elif status == 200:
            self._take_note(whole, *self.registrations.made(authorization, body, data))
        else:
            await self._take_back(whole, authorization, body)
        return Answer(status, kept, once(data))

    def _take_note(self, answered: Iterable[str], key: Key, made: Registration | None) -> None:
        self.registrations.put(key, made)
        for name in answered:
            if made is None:
                self.replicas[name].told.pop(key, None)
            else:
                self.replicas[name].told[key] = made

    async def _take_back(
        self, answers: Mapping[str, tuple[int, dict[str, str], bytes]], authorization: str, body: bytes
    ) -> None:
        """What some replicas have taken and others have refused is registered nowhere."""
        taken = {name: data for name, (status, _, data) in answers.items() if status == 200}
        for name, data in taken.items():
            replica, (key, made) = self.replicas[name], self.registrations.made(authorization, body, data)
            if key in self.registrations.current():
                continue
            replica.told[key] = made
            try:
                await self._tell(replica, key, None)
            except GONE as error:
                self._lost(replica, error)

    async def _whole(
        self, replica: Replica, method: str, target: str, headers: Mapping[str, str], body: bytes
    ) -> tuple[int, dict[str, str], bytes] | None:
        """A replica's whole answer; None if there is none."""
        try:
            answer = await self.connections.ask(replica, method, target, headers, body)
            return answer.status, answer.headers, await answer.body()
        except GONE as error:
            self._lost(replica, error)
            return None

    async def _give_registered(self, replica: Replica) -> None:
        """Tells a replica what was registered and deleted while it wasn't there, and lets requests go to it."""
        while True:
            current = self.registrations.current()
            changed: dict[Key, Registration | None] = dict.fromkeys(replica.told.keys() - current.keys())
            changed |= {key: one for key, one in current.items() if replica.told.get(key) is not one}
            if not changed:
                replica.up = True  # nothing can have been registered since the look
                return
            for key, one in changed.items():
                await self._tell(replica, key, one)

    async def _tell(self, replica: Replica, key: Key, one: Registration | None) -> None:
        """Registers a document at a replica, or deletes it (None). A refusal is logged: others have taken it."""
        headers = {"content-type": "application/json", **({"authorization": key[0]} if key[0] else {})}
        if one is None:
            answer = await self.connections.ask(
                replica, "DELETE", f"{DOCUMENTS}/{quote(key[1], safe='')}", headers, b""
            )
        else:
            body = one.body(self.registrations.clock())
            answer = await self.connections.ask(replica, "POST", DOCUMENTS, headers, body)
        text = await answer.body()
        # not before: where the connection breaks off, it is told again when it is back
        if one is None:
            replica.told.pop(key, None)
        else:
            replica.told[key] = one
        if answer.status not in (200, 404):
            logger.warning("replica %s doesn't take document %r: %s", replica.name, key[1], text[:200])

    # ---- which replicas are up ----

    async def arrived(self, name: str, address: str, generation: str) -> None:
        """A replica says where it is; it gets requests while it is healthy. Called again and again.

        Args:
            generation: another one each time that the replica has been started.
        """
        replica = self.replicas[name]
        if replica.generation != generation:
            replica.address, replica.generation, replica.up, replica.misses = address, generation, False, 0
            replica.told.clear()
        try:
            healthy = await asyncio.wait_for(self._is_healthy(replica), PROBE_SECONDS)
            if healthy and not replica.up:
                await self._give_registered(replica)
                logger.info("replica %s is up at %s", name, address)
            replica.misses = 0 if healthy else MAX_MISSES
        except aiohttp.ClientConnectorError:
            replica.misses = MAX_MISSES
        except GONE:
            self.missed(name)
        if replica.misses >= MAX_MISSES:
            replica.up = False

    def left(self, name: str) -> None:
        """A replica is known to be out of reach; it gets requests again once it has `arrived`."""
        self.replicas[name].up = False

    def missed(self, name: str) -> None:
        """Nobody could say where a replica is, or it didn't answer in time; too often, and it is taken for gone."""
        replica = self.replicas[name]
        replica.misses += 1
        replica.up &= replica.misses < MAX_MISSES

    async def _is_healthy(self, replica: Replica) -> bool:
        answer = await self.connections.ask(replica, "GET", "/health", {}, b"")
        await answer.body()
        return answer.status == 200

    # ---- state ----

    def _health(self) -> Answer:
        states = {replica.name: "up" if replica.up else "down" for replica in self.replicas.values()}
        if not any(replica.up for replica in self.replicas.values()):
            raise RequestError(503, f"no replica is up: {states}", retry_after=RETRY_AFTER_S)
        return _answer(200, json.dumps({"replicas": states}).encode())

    def _metrics(self) -> bytes:
        lines = []
        for name, text in _SERIES.items():
            lines += [f"# HELP comb_router_{name}_total {text}", f"# TYPE comb_router_{name}_total counter"]
            lines += [
                f'comb_router_{name}_total{{replica="{one}"}} {self.counters[name, one]}' for one in self.replicas
            ]
        lines.append("# TYPE comb_router_replica_up gauge")
        lines += [
            f'comb_router_replica_up{{replica="{one.name}",address="{one.address or ""}"}} {int(one.up)}'
            for one in self.replicas.values()
        ]
        lines.append("# TYPE comb_router_requests_under_way gauge")
        lines += [
            f'comb_router_requests_under_way{{replica="{one.name}"}} {one.under_way}' for one in self.replicas.values()
        ]
        return "\n".join([*lines, ""]).encode()


_SERIES = {
    "requests": "requests sent to a replica",
    "spilled": "of them, those whose documents ask for another one, which had too much to do",
    "lost": "times that a replica could not be reached or broke off",
}


def _parts(body: bytes, authorization: str) -> list[Part]:
    try:
        return parts_of(json.loads(body), authorization)
    except (ValueError, RecursionError):
        return []  # the replica says what is wrong with it


def _document_of(target: str) -> str:
    return unquote(target.partition("?")[0].removeprefix(f"{DOCUMENTS}/"))


def _answer(status: int, body: bytes, kind: str = "application/json") -> Answer:
    return Answer(status, {"content-type": kind}, once(body))
