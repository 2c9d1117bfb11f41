"""The replicas as a Ray Serve application: its address, and what makes it.

    serve run comb_serving.replicas.application:application checkpoint=out/adapter replicas=2 \\
        "arguments=--comb-pool-bytes 8GiB --dtype bfloat16"
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, cast
from urllib.parse import unquote

from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from comb_serving.api.errors import RequestError
from comb_serving.api.routes import DOCUMENTS, is_documents
from comb_serving.replicas.affinity import RoutedDocument, documents_of
from comb_serving.replicas.config import ReplicasConfig
from comb_serving.replicas.registrations import Registration, registrations_of
from comb_serving.replicas.replica import CombReplica, RelayedRequest, ServerLostError
from comb_serving.replicas.routing import DocumentRequestRouter
from comb_serving.replicas.state import REGISTRY, STATE

WAIT_SECONDS, RETRY_AFTER_S = 10.0, 5
MAX_LOST = 2  # replicas that broke off over one request: a request that ends servers must not end them all
_GONE = (RayActorError, DeploymentUnavailableError, BackPressureError)


class CombIngress:
    """Reads which documents a request has, and passes the answer of the replica that Ray's routing finds for it."""

    async def __init__(self, replicas: Any, config: ReplicasConfig) -> None:  # type: ignore[misc]  # Ray awaits it
        self._replicas, self._config = replicas, config
        self._registrations = registrations_of(serve.get_replica_context().app_name)
        self._registering = asyncio.Lock()
        self._changes: int = await self._registrations.changes.remote()
        self._first_look = asyncio.create_task(
            self._catch_up()
        )  # with it Ray begins to follow which replicas there are

    async def __call__(self, request: Request) -> Response:
        """Answers one request."""
        try:
            if request.url.path == "/health":
                return self._health()
            if request.url.path == "/metrics":
                return Response(generate_latest(REGISTRY), media_type=CONTENT_TYPE_LATEST)
            return await self._pass_on(request)
        except RequestError as error:
            return Response(error.body, error.status, error.headers, "application/json")

    def _health(self) -> Response:
        names = {f"replica-{rank}" for rank in range(self._config.replicas)} | STATE.up.keys()
        states = {name: "up" if name in STATE.up else "down" for name in sorted(names)}
        if not STATE.up:
            raise RequestError(503, f"no replica is up: {states}", retry_after=RETRY_AFTER_S)
        return Response(json.dumps({"replicas": states}), media_type="application/json")

    async def _pass_on(self, request: Request) -> Response:
        scope = request.scope
        path = scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        headers = {name.lower(): value for name, value in request.headers.items()}
        relayed = RelayedRequest(request.method, f"{path}?{query}" if query else path, headers, await request.body())
        documents = await asyncio.to_thread(_documents, relayed) if relayed.body else []
        chunks = self._first(relayed, documents)
        status, kept = await anext(chunks)
        if not (is_documents(path) and request.method in ("POST", "DELETE")):
            return _Relayed(chunks, status, kept)
        body = b"".join([chunk async for chunk in chunks])
        sender = headers.get("authorization", "")
        if request.method == "DELETE" and status in (200, 404):
            await self._register((sender, unquote(path.removeprefix(f"{DOCUMENTS}/"))), None)
        elif request.method == "POST" and status == 200:
            name, made = Registration.of(relayed.body, body)
            status, kept, body = await self._register((sender, name), made) or (status, kept, body)
        return Response(body, status, kept)

    async def _first(self, request: RelayedRequest, documents: list[RoutedDocument]) -> AsyncIterator[Any]:
        """Status and headers, then the body, of the first replica that begins an answer.

        Where nothing of an answer has gone out, another replica may give it.
        """
        avoid: list[str] = []
        broke_off = 0
        while broke_off < MAX_LOST and len(avoid) <= self._config.replicas:
            stream = self._replicas.options(stream=True).answer.remote(
                request=request, documents=documents, avoid=avoid, changes=self._changes
            )
            begun, name = False, ""
            try:
                async with asyncio.timeout(WAIT_SECONDS):
                    name = await anext(stream)
                with STATE.counted(name, () if avoid else documents):
                    async for item in stream:
                        begun = True
                        yield item
            except TimeoutError:
                break
            except (ServerLostError, *_GONE) as error:
                if begun:
                    raise
                broke_off += getattr(error, "reached", True)
            else:
                return
            finally:
                stream.cancel()
            STATE.lost[name] += 1
            avoid.append(name)
        why = f"{broke_off} replicas broke off over this request" if broke_off >= MAX_LOST else (
            "no replica is up, or all have too much to do"
        )  # fmt: skip
        raise RequestError(503, f"{why}; see their logs", retry_after=RETRY_AFTER_S)

    async def _register(self, key: tuple[str, str], one: Registration | None) -> Any:
        """Every replica hears of a document, or of its end; what one of them refuses is registered nowhere.

        Returns:
            Status, headers and body of a refusal, or None.
        """
        async with self._registering:
            before = await self._registrations.put.remote(key, one)
            refusals = await self._catch_up()
            if one is not None and key in refusals:
                await self._registrations.put.remote(key, before)
                await self._catch_up()
            return refusals.get(key)

    async def _catch_up(self) -> dict[tuple[str, str], Any]:
        self._changes = await self._registrations.changes.remote()
        try:
            found = await self._replicas.broadcast("catch_up").results_async(return_exceptions=True)
        except _GONE:
            found = []
        # who could not be asked catches up before its next request
        return {key: answer for each in found if not isinstance(each, BaseException) for key, answer in each.items()}


class _Relayed(StreamingResponse):
    """A replica's answer; a client that leaves ends it at once, not when the generator is collected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await cast(Any, self.body_iterator).aclose()


def _documents(request: RelayedRequest) -> list[RoutedDocument]:
    try:
        body = json.loads(request.body)
    except (ValueError, RecursionError):
        return []  # the replica says what is wrong with it
    if request.target.partition("?")[0] == DOCUMENTS:
        body = {"documents": [body]}  # to be registered: where requests that hold it go
    return documents_of(body, request.headers.get("authorization", ""))


def application(given: dict[str, Any]) -> Any:
    """The Ray Serve application of a `ReplicasConfig`."""
    config = ReplicasConfig.model_validate(given)
    routing = RequestRouterConfig(
        request_router_class=DocumentRequestRouter,
        request_router_kwargs={"load_factor": config.load_factor, "load_floor": config.load_floor},
    )
    replicas = serve.deployment(
        CombReplica, num_replicas=config.replicas, max_ongoing_requests=config.max_ongoing_requests,
        request_router_config=routing, ray_actor_options={"num_cpus": config.cpus, "num_gpus": config.gpus},
        health_check_period_s=1, health_check_timeout_s=30, graceful_shutdown_timeout_s=100,
    )  # fmt: skip
    ingress = serve.deployment(
        CombIngress, max_ongoing_requests=100_000, graceful_shutdown_timeout_s=30, ray_actor_options={"num_cpus": 0}
    )
    return ingress.bind(replicas.bind(config), config)
