"""The router in front of small servers: affinity, spill, streams, replicas that die, and registered documents."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest

pytest.importorskip("aiohttp")

from aiohttp import web

from comb_serving.replicas.affinity import Bound, home, parts_of
from comb_serving.replicas.registrations import Registrations
from comb_serving.replicas.router import Router

CHAT = "/v1/chat/completions"
HEADERS = {"authorization": "Bearer a", "content-type": "application/json"}


class Server:
    """A stand-in for one `comb serve`: says its name, keeps documents, streams when asked to."""

    def __init__(self, name: str) -> None:
        self.name, self.generation = name, 0
        self.documents: dict[tuple[str, str], Any] = {}
        self.asked: list[Any] = []
        self.gate, self.healthy, self.left = asyncio.Event(), True, 0
        self.breaks: str | None = None
        self.holds: asyncio.Event | None = None  # registrations wait for it
        self.held = asyncio.Event()  # one does
        self.runner: web.AppRunner | None = None
        self.address = ""

    async def start(self) -> None:
        """At another address each time, without documents."""
        app = web.Application()
        app.router.add_get("/health", self._health)
        app.router.add_post(CHAT, self._chat)
        app.router.add_post("/v1/documents", self._add)
        app.router.add_route("*", "/v1/documents/{id}", self._one)
        self.runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        port = self.runner.addresses[0][1]
        self.address = f"http://127.0.0.1:{port}"
        self.documents = {}
        self.generation += 1

    async def stop(self) -> None:
        if self.runner is not None:
            await self.runner.cleanup()
        self.runner = None

    async def _health(self, request: web.Request) -> web.Response:
        return web.Response(status=200 if self.healthy else 503)

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = await request.json()
        self.asked.append(asked)
        if self.breaks == "before":
            request.transport.close()
        if not asked.get("stream"):
            return web.json_response({"name": self.name, "got": asked}, headers={"x-kept": "yes"})
        answer = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await answer.prepare(request)
        await answer.write(f"data: {self.name}\n\n".encode())
        try:
            await self.gate.wait()
            if self.breaks == "middle":
                request.transport.close()
            await answer.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.left += 1
            raise
        return answer

    async def _add(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.breaks == "adding":
            request.transport.close()
            return web.Response()
        if self.holds is not None:
            self.held.set()
            await self.holds.wait()
        if body.get("text") == "refused" and self.name == "c":
            return web.json_response({"error": {"message": "full"}}, status=429, headers={"retry-after": "2"})
        name = body.get("id", "made-" + body["text"])
        self.documents[request.headers["authorization"], name] = body
        return web.json_response({"id": name, "state": "encoded"})

    async def _one(self, request: web.Request) -> web.Response:
        key = request.headers["authorization"], request.match_info["id"]
        found = key in self.documents
        if self.breaks == "deleting":
            request.transport.close()
            return web.Response()
        if request.method == "DELETE":
            self.documents.pop(key, None)
        return web.json_response({"id": key[1]}, status=200 if found else 404)


@asynccontextmanager
async def running(bound: Bound | None = None) -> AsyncIterator[tuple[Router, dict[str, Server]]]:
    servers = {name: Server(name) for name in "abc"}
    router = Router.of(list(servers), bound)
    try:
        for server in servers.values():
            await server.start()
            await arrive(router, server)
        yield router, servers
        assert [replica.under_way for replica in router.replicas.values()] == [0, 0, 0]
    finally:
        await router.close()
        for server in servers.values():
            await server.stop()


async def arrive(router: Router, server: Server) -> None:
    await router.arrived(server.name, server.address, str(server.generation))


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 60))


async def ask(router: Router, *documents: Any, **more: Any) -> tuple[int, Any]:
    body = {"documents": list(documents), **more}
    answer = await router.handle("POST", f"{CHAT}?x=%2F", HEADERS, json.dumps(body).encode())
    return answer.status, json.loads(await answer.body())


def home_of(*documents: Any) -> str:
    (part,) = parts_of({"documents": list(documents)}, HEADERS["authorization"])
    return home(part.key, ["a", "b", "c"])


async def call(router: Router, method: str, path: str, body: Any = None, key: str = "Bearer a") -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    answer = await router.handle(method, path, {**HEADERS, "authorization": key}, data)
    return answer.status, json.loads(await answer.body())


def test_the_same_documents_go_to_the_same_replica_unchanged() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            texts = [f"text {number}" for number in range(30)]
            seen = set()
            for text in texts:
                status, answer = await ask(router, text)
                assert (status, answer["name"]) == (200, home_of(text))
                assert answer["got"] == {"documents": [text]}
                seen.add(answer["name"])
            assert seen == set(servers)
            answer = await router.handle("POST", CHAT, {**HEADERS, "host": "x", "connection": "close"}, b'{"a": 1}')
            assert answer.headers["x-kept"] == "yes"
            assert "content-length" not in {name.lower() for name in answer.headers}
            await answer.body()
            assert (await call(router, "GET", "/health"))[1]["replicas"] == dict.fromkeys("abc", "up")
            assert (await call(router, "GET", "/v1/documents/x"))[0] == 404

    run(work())


def test_too_many_requests_for_one_replica_spill() -> None:
    async def work() -> None:
        async with running(Bound(floor=2)) as (router, servers):
            streams = []
            for _ in range(6):
                body = json.dumps({"documents": ["hot"], "stream": True}).encode()
                streams.append(await router.handle("POST", CHAT, HEADERS, body))
            assert len(servers[home_of("hot")].asked) in (2, 3)
            assert all(server.asked for server in servers.values())
            metrics = b"".join([chunk async for chunk in (await router.handle("GET", "/metrics", {}, b"")).chunks])
            spilled = sum(int(line.split()[1]) for line in metrics.decode().splitlines() if "spilled_total{" in line)
            assert spilled == 6 - len(servers[home_of("hot")].asked)
            for server in servers.values():
                server.gate.set()
            for stream in streams:
                assert (await stream.body()).endswith(b"[DONE]\n\n")

    run(work())


def test_streams_pass_at_once_and_a_client_that_leaves_is_passed_on() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            body = json.dumps({"documents": ["one"], "stream": True}).encode()
            answer = await router.handle("POST", CHAT, HEADERS, body)
            server = servers[home_of("one")]
            assert await anext(answer.chunks) == f"data: {server.name}\n\n".encode()  # the rest isn't there yet
            assert router.replicas[server.name].under_way == 1
            await answer.chunks.aclose()
            assert router.replicas[server.name].under_way == 0
            server.gate.set()
            other = await router.handle("POST", CHAT, HEADERS, body)
            assert (await other.body()).endswith(b"[DONE]\n\n")
            server.breaks = "middle"
            server.gate.clear()
            broken = await router.handle("POST", CHAT, HEADERS, body)
            await anext(broken.chunks)
            server.gate.set()
            with pytest.raises(Exception, match=r"(?i)payload|connection|closed"):  # never an answer that looks whole
                await broken.body()

    run(work())


def test_a_dead_replicas_requests_go_elsewhere_until_it_is_back() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            dead = servers[home_of("text")]
            await dead.stop()
            status, answer = await ask(router, "text")
            assert (status, answer["name"] != dead.name) == (200, True)
            second = answer["name"]
            assert not router.replicas[dead.name].up
            assert (await ask(router, "text"))[1]["name"] == second
            others = [text for text in map(str, range(40)) if home_of(text) != dead.name]
            for text in others:
                assert (await ask(router, text))[1]["name"] == home_of(text)
            await arrive(router, dead)  # still at the old address
            assert not router.replicas[dead.name].up
            await dead.start()
            await arrive(router, dead)
            assert (await ask(router, "text"))[1]["name"] == dead.name
            for server in servers.values():
                await server.stop()
            status, answer = await ask(router, "text")
            assert (status, answer["error"]["code"]) == (503, 503)
            health = await router.handle("GET", "/health", {}, b"")
            assert (health.status, health.headers["retry-after"]) == (503, "5")
            assert (await call(router, "POST", "/v1/documents", {"text": "t"}))[0] == 503

    run(work())


def test_a_request_that_ends_servers_does_not_end_all_of_them() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            for server in servers.values():
                server.breaks = "before"
            status, answer = await ask(router, "poison")
            assert status == 503
            assert "2 replicas broke off" in answer["error"]["message"]
            assert sum(len(server.asked) for server in servers.values()) == 2
            for server in servers.values():
                server.breaks = None
                await arrive(router, server)
            assert (await ask(router, "poison"))[0] == 200

    run(work())


def test_a_replica_that_is_not_healthy_gets_nothing() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            server = servers[home_of("text")]
            server.healthy = False
            await arrive(router, server)
            assert (await ask(router, "text"))[1]["name"] != server.name
            server.healthy = True
            await arrive(router, server)
            assert (await ask(router, "text"))[1]["name"] == server.name
            assert server.generation == 1  # the same process: what is registered is there

    run(work())


def test_registered_documents_are_everywhere_also_after_a_restart() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            for name in ("x", "y", "a/b"):
                assert (await call(router, "POST", "/v1/documents", {"text": name, "id": name}))[0] == 200
            assert (await call(router, "POST", "/v1/documents", {"text": "no id"}))[1]["id"] == "made-no id"
            assert (await call(router, "POST", "/v1/documents", {"text": "hers", "id": "x"}, key="Bearer b"))[0] == 200
            assert (await call(router, "POST", "/v1/documents", {"text": "refused", "id": "r"}))[0] == 429
            await servers["a"].stop()
            assert (await call(router, "DELETE", "/v1/documents/y"))[0] == 200
            assert (await call(router, "DELETE", "/v1/documents/y"))[0] == 404
            assert (await call(router, "POST", "/v1/documents", {"text": "later", "id": "z"}))[0] == 200
            assert not router.replicas["a"].up
            await servers["a"].start()
            await arrive(router, servers["a"])
            assert router.replicas["a"].up
            expected = {("Bearer a", name) for name in ("x", "a/b", "made-no id", "z")} | {("Bearer b", "x")}
            assert set(servers["a"].documents) == expected
            assert set(servers["c"].documents) == expected
            assert servers["a"].documents["Bearer b", "x"]["text"] == "hers"
            # one that was out of sight keeps its process, and learns what it has missed
            router.left("b")
            assert (await call(router, "DELETE", "/v1/documents/z"))[0] == 200
            assert (await call(router, "POST", "/v1/documents", {"text": "new", "id": "n"}))[0] == 200
            assert ("Bearer a", "z") in servers["b"].documents
            await arrive(router, servers["b"])
            expected = expected - {("Bearer a", "z")} | {("Bearer a", "n")}
            assert all(set(server.documents) == expected for server in servers.values())

    run(work())


def test_what_is_registered_while_a_replica_comes_up_reaches_it() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            await servers["a"].stop()
            assert (await call(router, "POST", "/v1/documents", {"text": "x", "id": "before"}))[0] == 200
            await servers["a"].start()
            servers["b"].holds = asyncio.Event()
            slow = asyncio.create_task(call(router, "POST", "/v1/documents", {"text": "x", "id": "meanwhile"}))
            await servers["b"].held.wait()
            await arrive(router, servers["a"])
            assert router.replicas["a"].up
            assert not slow.done()
            servers["b"].holds.set()
            assert (await slow)[0] == 200
            assert {name for _, name in servers["a"].documents} == {"before", "meanwhile"}

    run(work())


def test_what_a_replica_was_not_told_it_is_told_when_it_is_back() -> None:
    async def work() -> None:
        async with running() as (router, servers):
            a, there = servers["a"], {("Bearer a", "x")}
            router.left("a")
            assert (await call(router, "POST", "/v1/documents", {"text": "x", "id": "x"}))[0] == 200
            a.breaks = "adding"
            await arrive(router, a)
            assert not router.replicas["a"].up
            a.breaks = None
            await arrive(router, a)
            assert (router.replicas["a"].up, set(a.documents)) == (True, there)
            # refused by one; another has taken it and can't be told so
            a.breaks = "deleting"
            assert (await call(router, "POST", "/v1/documents", {"text": "refused", "id": "r"}))[0] == 429
            assert (router.replicas["a"].up, set(a.documents)) == (False, there | {("Bearer a", "r")})
            await arrive(router, a)
            assert not router.replicas["a"].up
            a.breaks = None
            await arrive(router, a)
            assert (router.replicas["a"].up, set(a.documents)) == (True, there)
            assert a.generation == 1

    run(work())


def test_registrations_expire() -> None:
    now = 0.0
    known = Registrations(clock=lambda: now)
    known.put(*known.made("k", b'{"text": "t", "ttl_s": 10}', b'{"id": "n"}'))
    known.put(*known.made("k", b'{"text": "u", "pin": true}', b'{"id": "m"}'))
    now = 4.0
    found = known.current()
    assert json.loads(found["k", "n"].body(now)) == {"text": "t", "ttl_s": 6.0, "id": "n"}
    assert json.loads(found["k", "m"].body(now)) == {"text": "u", "pin": True, "id": "m"}
    now = 10.0
    assert set(known.current()) == {("k", "m")}
    known.put(("k", "m"), None)
    assert not known.current()
