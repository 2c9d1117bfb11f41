"""The ingress and two replicas without Ray: small servers in place of `comb serve`, plain calls in place of Ray's."""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import pytest

from comb_serving.api.registered import FOLDER
from comb_serving.api.routes import CHAT, DOCUMENTS, MESSAGES, SWITCH, WEIGHTS
from comb_serving.config.instance import own_disk
from tests.helpers.fakes import Answer, Client, until

pytest.importorskip("ray.serve")
KEY = ("Bearer alice", "a")


class Server:
    """Registers documents, as slowly as the test wants, or answers with `status`."""

    def __init__(self) -> None:
        self.documents, self.asked, self.texts = set[str](), list[str](), dict[str, str]()
        self.status, self.weights, self.encoding, self.running = 200, "w", asyncio.Event(), asyncio.Event()
        self.encoding.set()
        self.running.set()

    async def answer(self, request: Any) -> Any:
        from aiohttp import web

        self.asked.append(f"{request.method} {request.raw_path}")
        name, status = unquote(request.raw_path.rsplit("/", 1)[-1]), self.status
        if request.method == "POST" and request.path == DOCUMENTS:
            await self.encoding.wait()
            body = await request.json()
            name = body["id"]
            if status == 200:
                self.documents.add(name)
                self.texts[name] = body["text"]
        elif request.method == "DELETE" and status == 200:
            status = 200 if name in self.documents else 404
            self.documents.discard(name)
        elif request.path == "/health":
            await self.running.wait()
            status = 200
        return web.json_response({"id": name}, status=status, headers={WEIGHTS: self.weights})


class Stream:
    """An answer as Ray's handles give it."""

    def __init__(self, items: AsyncIterator[Any]) -> None:
        self.items = items

    def __aiter__(self) -> AsyncIterator[Any]:
        return self.items

    async def __anext__(self) -> Any:
        return await anext(self.items)

    def cancel(self) -> None:
        """Closes nothing: whole answers are read."""


class Front:
    """An ingress, its replicas (requests go to the first, broadcasts to both), their servers and the registrations."""

    def __init__(self, ingress: Any, replicas: list[Any], servers: list[Server], registrations: list[Any]) -> None:
        self.ingress, self.replicas, self.servers, self.registrations = ingress, replicas, servers, registrations

    @property
    def documents(self) -> list[set[str]]:
        return [server.documents for server in self.servers]

    async def send(
        self, method: str, path: str, body: Any = None, prefix: str = "", key: str | None = "alice", **options: Any
    ) -> Answer:
        from starlette.requests import Request

        async def app(scope: Any, receive: Any, send: Any) -> None:
            whole = prefix + path
            scope |= {"path": unquote(whole), "raw_path": whole.encode(), "root_path": prefix}
            await (await self.ingress(Request(scope, receive)))(scope, receive, send)

        return await Client(app, key).send(method, path, body, **options)


@asynccontextmanager
async def started(monkeypatch: pytest.MonkeyPatch, arguments: str = "") -> AsyncIterator[Front]:
    from aiohttp import web
    from ray import serve
    from ray.exceptions import RayActorError

    from comb_serving.replicas import application, replica

    class Replica(replica.CombReplica):
        def __del__(self) -> None:  # type: ignore[override]
            """That of Ray's is awaited, at the end."""

    def remote(kept: Any, method: str) -> Any:
        async def run(*given: Any) -> Any:
            if kept is not registrations[-1]:
                raise RayActorError
            return getattr(kept, method)(*given)

        return SimpleNamespace(remote=run)

    def broadcast(method: str, *given: Any) -> Any:
        async def results(*, return_exceptions: bool) -> list[Any]:
            async def one(replica: Any) -> Any:
                found = getattr(replica, method)(*given)
                return await found if inspect.isawaitable(found) else found

            return await asyncio.gather(*map(one, replicas), return_exceptions=return_exceptions)

        return SimpleNamespace(results_async=results)

    def registrations_of(_: str) -> Any:
        kept = registrations[-1]
        return SimpleNamespace(**{name: remote(kept, name) for name in ("put", "missing", "others")})

    context = SimpleNamespace(app_name="comb", rank=SimpleNamespace(rank=0))
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    for module in (application, replica):
        monkeypatch.setattr(module, "registrations_of", registrations_of)
    config = replica.ReplicasConfig.model_validate(
        {"checkpoint": "adapter", "arguments": f"--comb-max-body 1MiB {arguments}"}
    )
    registrations: list[Any] = [replica.Registrations()]
    replicas: list[Any] = []
    servers, runners = [Server(), Server()], []
    for context.rank.rank, server in enumerate(servers):
        runner = web.ServerRunner(web.Server(server.answer))
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        runners.append(runner)
        process = SimpleNamespace(
            url="http://127.0.0.1:{1}".format(*runner.addresses[0]), wait_until_healthy=lambda seconds: None,
            check=lambda: None, stop=lambda: None,
        )  # fmt: skip
        monkeypatch.setattr(replica, "ServerProcess", lambda *_, process=process, **__: process)
        replicas.append(Replica.__new__(Replica))
        await replicas[-1].__init__(config)
    calls = SimpleNamespace(remote=lambda request, documents: Stream(replicas[0].answer(request)))
    handle = SimpleNamespace(options=lambda **_: SimpleNamespace(answer=calls), broadcast=broadcast)
    try:
        yield Front(application.CombIngress(handle, config), replicas, servers, registrations)
    finally:
        for each, server, runner in zip(replicas, servers, runners, strict=True):
            server.encoding.set()
            server.running.set()
            await replica.CombReplica.__del__(each)
            await runner.cleanup()


async def test_what_would_switch_one_server_of_them_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(monkeypatch) as front:
        answer = await front.send("POST", SWITCH, {"encoder": False})
        assert (answer.status, "/health" in answer.json["error"]["message"]) == (409, True)
        assert f"POST {SWITCH}" not in front.servers[0].asked
        assert (await front.send("GET", SWITCH)).status == 200
        large = await front.send("POST", MESSAGES, b" " * (2**20 + 1))
        assert (large.status, large.json["type"], large.json["error"]["type"]) == (413, "error", "request_too_large")


async def test_what_replicas_were_not_told_of_is_deleted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(monkeypatch) as front:
        front.servers[1].documents.add("x/y")  # of a client that left, or a server's own
        front.servers[1].status = 503
        assert (await front.send("DELETE", f"{DOCUMENTS}/x%2Fy")).status == 503  # by one: it may still be there
        front.servers[1].status = 200
        assert (await front.send("DELETE", f"{DOCUMENTS}/x%2Fy")).status == 200
        assert front.documents == [set(), set()]
        assert (await front.send("DELETE", f"{DOCUMENTS}/x%2Fy")).status == 404
        # the control: what they were told of
        assert (await front.send("POST", DOCUMENTS, {"id": "a", "text": "A."})).status == 200
        assert front.documents == [{"a"}, {"a"}]
        assert (await front.send("DELETE", f"{DOCUMENTS}/a")).status == 200
        assert front.documents == [set(), set()]


def test_what_another_server_has_registered_is_not_deleted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from comb_serving.replicas import replica

    kept = tmp_path / FOLDER
    kept.mkdir()
    monkeypatch.setattr(replica, "DISK_SECONDS", 0.0)
    with own_disk(str(tmp_path), 0), pytest.raises(ValueError, match="in use by another server"):
        replica._forget_registered(tmp_path)
    assert kept.exists()
    replica._forget_registered(tmp_path)  # of a server that is gone
    assert not kept.exists()


async def test_slow_encoding_is_no_ill_health(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(monkeypatch) as front:
        server, replica = front.servers[1], front.replicas[1]
        server.encoding.clear()
        front.registrations[-1].put(KEY, {"id": "a", "text": "A."})
        for _ in range(3):
            await asyncio.wait_for(replica.check_health(), 5)
            await until(lambda: f"POST {DOCUMENTS}" in server.asked)
        server.encoding.set()
        await until(lambda: server.documents == {"a"})
        assert server.asked.count(f"POST {DOCUMENTS}") == 1


async def test_a_replica_whose_server_hangs_ends_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    from comb_serving.replicas import replica

    def ended(status: int) -> None:
        raise SystemExit(status)

    async with started(monkeypatch) as front:
        monkeypatch.setattr(replica, "HANG_SECONDS", 0.2)
        monkeypatch.setattr(replica, "os", SimpleNamespace(_exit=ended))
        await front.replicas[1].check_health()
        front.servers[1].running.clear()
        with pytest.raises(SystemExit):
            await front.replicas[1].check_health()


@pytest.mark.parametrize(("status", "lasts"), [(503, False), (429, False), (400, True), (413, True)])
async def test_what_is_refused_for_now_is_told_again(monkeypatch: pytest.MonkeyPatch, status: int, lasts: bool) -> None:
    async with started(monkeypatch) as front:
        server, replica, registrations = front.servers[1], front.replicas[1], front.registrations[-1]
        server.status = status
        registrations.put(KEY, {"id": "a", "text": "A."})
        assert (await replica.catch_up())[KEY][0] == status
        server.status = 200
        assert (await replica.catch_up()).keys() == ({KEY} if lasts else set())
        assert server.documents == (set() if lasts else {"a"})
        # and nothing of it is left when it is taken back
        server.status = status
        registrations.put(KEY, {"id": "a", "text": "B."})
        await replica.catch_up()
        server.status = 200
        registrations.put(KEY, None)
        assert await replica.catch_up() == {}
        assert server.documents == set()


@pytest.mark.parametrize("status", [400, 429, 503])
async def test_a_refused_renewal_leaves_what_was_there(monkeypatch: pytest.MonkeyPatch, status: int) -> None:
    async with started(monkeypatch) as front:
        first, second = front.servers
        assert (await front.send("POST", DOCUMENTS, {"id": "a", "text": "A.", "ttl_s": 60, "pin": True})).status == 200
        second.status = status
        assert (await front.send("POST", DOCUMENTS, {"id": "a", "text": "B.", "ttl_s": 900})).status == status
        assert (await front.send("POST", DOCUMENTS, {"id": "b", "text": "B."})).status == status
        assert [first.documents, first.texts["a"]] == [{"a"}, "A."]  # what wasn't there isn't there
        # who refuses all has kept what it had, and is asked again as its own replica is
        assert [second.documents, second.texts["a"]] == [{"a"}, "A."]
        ((_, body),) = front.registrations[-1].missing({})[0].values()
        kept = json.loads(body)
        assert 50 < kept.pop("ttl_s") < 60
        assert kept == {"id": "a", "text": "A.", "pin": True}


async def test_a_refusal_takes_back_nothing_that_others_were_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(monkeypatch) as front:
        assert (await front.send("POST", DOCUMENTS, {"id": "a", "text": "A."})).status == 200
        second = front.servers[1]
        second.status = 429
        second.encoding.clear()
        refused = asyncio.create_task(front.send("POST", DOCUMENTS, {"id": "a", "text": "B."}))
        await until(lambda: second.asked.count(f"POST {DOCUMENTS}") == 2)
        second.status = 200
        meanwhile = asyncio.create_task(front.send("POST", DOCUMENTS, {"id": "a", "text": "C."}))
        await until(lambda: front.servers[0].asked.count(f"POST {DOCUMENTS}") >= 5)
        await asyncio.sleep(0.1)  # what it does next, it would have done
        second.encoding.set()
        assert [(await refused).status, (await meanwhile).status] == [429, 200]
        assert [server.texts["a"] for server in front.servers] == ["C.", "C."]


async def test_lost_registrations_are_an_error_then_begin_again(monkeypatch: pytest.MonkeyPatch) -> None:
    from ray.exceptions import RayActorError

    from comb_serving.replicas.replica import Registrations

    def lost(*_: Any) -> None:
        raise RayActorError

    async with started(monkeypatch) as front:
        assert (await front.send("POST", DOCUMENTS, {"id": "a", "text": "A."})).status == 200
        front.registrations.append(SimpleNamespace(put=lost))  # while it is asked
        answer = await front.send("POST", DOCUMENTS, {"id": "b", "text": "B."})
        assert (answer.status, answer.json["error"]["code"]) == (503, 503)
        front.registrations.append(Registrations())
        # the first of its changes, as that of "a" was of those that are lost
        assert (await front.send("POST", DOCUMENTS, {"id": "b", "text": "B."})).status == 200
        assert front.documents == [{"b"}, {"b"}]


async def test_the_key_comes_before_the_body(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(monkeypatch, "--api-key alice carol") as front:
        long = b" " * 2**21
        assert (await front.send("POST", CHAT, long, key="bob")).status == 401
        assert (await front.send("POST", CHAT, long)).status == 413
        assert (await front.send("POST", "/v1/unknown", long, key="bob")).status == 404
        assert not any(request.startswith("POST") for request in front.servers[0].asked)
        assert (await front.send("POST", CHAT, {"documents": []}, key="carol")).status == 200
        assert (await front.send("GET", "/v1/models", key="bob")).status == 200  # whom it tells, the server says


async def test_a_sender_is_its_key_and_a_path_what_it_stands_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(monkeypatch) as front:
        spelled, asked = [(b"authorization", b"bearer zoe")], {"id": "a", "text": "A."}
        assert (await front.send("POST", "/v1/%64ocuments", asked, key=None, more=spelled)).status == 200
        assert front.documents == [{"a"}, {"a"}]
        assert (await front.send("DELETE", f"{DOCUMENTS}/a", key="zoe")).status == 200
        assert front.registrations[-1].missing({}) == ({}, [])
        for name in (b"authorization", b"x-request-id", b"content-type"):
            twice = [(name, b"a"), (name, b"b")]
            assert (await front.send("POST", CHAT, {"documents": []}, more=twice)).status == 400


async def test_a_route_prefix_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    async with started(monkeypatch) as front:
        assert len((await front.send("GET", "/health", prefix="/comb")).json["replicas"]) == 2
        assert (await front.send("GET", "/metrics", prefix="/comb")).status == 404
        assert (await front.send("POST", CHAT, {"documents": []}, prefix="/comb")).status == 200
        assert (await front.send("GET", f"{DOCUMENTS}/x%2Fy", prefix="/comb")).status == 200
        assert front.servers[0].asked[-2:] == [f"POST {CHAT}", f"GET {DOCUMENTS}/x%2Fy"]


async def test_replicas_of_one_configuration_have_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    from comb_serving.replicas import replica

    async with started(monkeypatch) as front:
        first, second = front.replicas
        front.servers[1].weights = "other"  # its files were replaced, and it has started again
        with pytest.raises(RuntimeError, match="adapter has other weights than replica-0 started with: put its files"):
            await second._check()
        await first._check()
        monkeypatch.setattr(replica, "UP_SECONDS", 0.0)  # the first was healthy long ago
        await second._check()
        monkeypatch.setattr(replica, "UP_SECONDS", 60.0)
        with pytest.raises(RuntimeError, match="other weights than replica-1"):
            await first._check()
        # those of another configuration take its place with other weights
        first._config = first._config.model_copy(update={"arguments": ("--dtype", "float32")})
        await first._check()
