"""The replicas as a Ray Serve application: its address, and what makes it.

    serve run comb_serving.replicas.application:application checkpoint=out/adapter replicas=2 \\
        "arguments=--comb-pool-bytes 8GiB --dtype bfloat16"
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any, cast

from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from comb_serving.api.fields import check_counts
from comb_serving.api.http import ClientLeftError, RequestError, header, parse_object, path_of, read_body
from comb_serving.api.routes import (
    ASKING,
    DOCUMENTS,
    SWITCH,
    check_request,
    error_body,
    is_documents,
    is_ours,
    sender_of,
)
from comb_serving.config.serve_options import ServeOptions
from comb_serving.launch.launcher import read_flags
from comb_serving.replicas.affinity import RoutedDocument, documents_of, ranked
from comb_serving.replicas.replica import (
    RETRY_AFTER_S,
    CombReplica,
    RelayedRequest,
    ReplicasConfig,
    registrations_of,
)

WAIT_SECONDS = 10.0
_GONE = (RayActorError, DeploymentUnavailableError, BackPressureError)


class CombIngress:
    """Reads which documents a request has, and passes the answer of the replica that Ray's routing finds for it."""

    def __init__(self, replicas: Any, config: ReplicasConfig) -> None:
        self._replicas, self._max_body_bytes = replicas, config.max_body_bytes
        keys = read_flags(config.arguments, {**os.environ, **config.environment}).key_hashes
        self._options = ServeOptions(config.checkpoint, key_hashes=keys)
        self._application = serve.get_replica_context().app_name
        self._registering = asyncio.Lock()  # what a refusal puts back is no older than what others were told of

    async def __call__(self, request: Request) -> Response:
        try:
            path = path_of(request.scope)
            if path == "/health":
                found = dict(await self._all("address"))
                if not found:
                    raise RequestError(503, "no replica is up", retry_after=RETRY_AFTER_S)
                return JSONResponse({"replicas": dict(sorted(found.items()))})
            if path == "/metrics":
                raise RequestError(404, "every replica has its own /metrics: /health gives their addresses")
            if path == SWITCH and request.method == "POST":
                raise RequestError(409, f"POST {SWITCH} to every replica: /health gives their addresses")
            return await self._pass_on(request)
        except ClientLeftError:
            return Response()
        except RequestError as error:
            refusal = error
        except RayActorError:
            refusal = RequestError(503, "a replica or the registrations are lost; try again", retry_after=RETRY_AFTER_S)
        body = error_body(path_of(request.scope), refusal)
        return Response(body, refusal.status, refusal.headers, "application/json")

    async def _pass_on(self, request: Request) -> Response:
        scope = request.scope
        path, sender = path_of(scope), sender_of(header(scope, "authorization"))
        for name in ("content-type", "content-length", "x-request-id"):
            header(scope, name)  # refused when given twice, of which a mapping keeps one
        # as in a server, the key comes before the body; but the admin's, which the servers alone know
        if path != SWITCH and (is_ours(path) or request.method not in ASKING):
            check_request(self._options, request.method, path, header(scope, "authorization"))
        target = scope.get("raw_path", scope["path"].encode()).decode("latin-1")
        target = target.removeprefix(scope.get("root_path", ""))
        query = scope.get("query_string", b"").decode("latin-1")
        headers = {name.lower(): value for name, value in request.headers.items()}
        raw = await read_body(request.receive, self._max_body_bytes)
        relayed = RelayedRequest(request.method, f"{target}?{query}" if query else target, headers, raw)
        documents = await asyncio.to_thread(_documents, path, raw, sender) if raw else []
        chunks = self._answer(relayed, documents)
        status, kept = await anext(chunks)
        if not (is_documents(path) and request.method in ("POST", "DELETE")):
            return _RelayedResponse(chunks, status, kept)
        body = b"".join([chunk async for chunk in chunks])
        async with self._registering:
            if request.method == "DELETE" and status in (200, 404):
                key = sender, path.removeprefix(f"{DOCUMENTS}/")
                # whatever they were told: clients that left have registered some, and servers keep some by themselves
                answers = [(status, kept, body), *await self._all("delete", key)]
                status, kept, body = max(answers, key=lambda answer: (answer[0] not in (200, 404), answer[0] == 200))
                await registrations_of(self._application).put.remote(key, None)
                await self._all("catch_up")
            elif request.method == "POST" and status == 200:
                key = sender, str(json.loads(body)["id"])
                fields = {**parse_object(raw), "id": key[1]}
                before = await registrations_of(self._application).put.remote(key, fields)
                for refused in await self._all("catch_up"):
                    if key in refused:  # the first refusal takes it back everywhere
                        status, kept, body = refused[key]
                        await registrations_of(self._application).put.remote(key, before)
                        await self._all("catch_up")
                        break
        return Response(body, status, kept)

    async def _answer(self, request: RelayedRequest, documents: list[RoutedDocument]) -> AsyncIterator[Any]:
        """Status and headers, then the body, from the replica that has taken the request."""
        stream = self._replicas.options(stream=True).answer.remote(request=request, documents=documents)
        begun = False
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                await anext(stream)
            async for item in stream:
                begun = True
                yield item
        except (TimeoutError, *_GONE) as error:
            if begun:
                raise
            waited = isinstance(error, TimeoutError)
            why = "no replica is up, or all have too much to do" if waited else "a replica is lost"
            raise RequestError(503, f"{why}; try again", retry_after=RETRY_AFTER_S) from error
        finally:
            stream.cancel()

    async def _all(self, method: str, *given: Any) -> list[Any]:
        """What the replicas that are up return; who can't be asked catches up when Ray next asks for its health."""
        try:
            found = await self._replicas.broadcast(method, *given).results_async(return_exceptions=True)
        except _GONE:
            return []
        return [each for each in found if not isinstance(each, BaseException)]


class _RelayedResponse(StreamingResponse):
    """A replica's answer; a client that leaves ends it at once, not when the generator is collected."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            await cast(Any, self.body_iterator).aclose()


def _documents(path: str, raw: bytes, sender: str) -> list[RoutedDocument]:
    try:
        body = parse_object(raw)
        check_counts(body)
        if path == DOCUMENTS:
            body = {"documents": [body]}  # to be registered: where requests that hold it go
        return documents_of(body, sender)
    except RequestError:
        return []  # the replica says what is wrong with it


class DocumentRequestRouter(RequestRouter):
    """Ray Serve's routing with an order of its own: replicas ranked by a request's documents (`affinity.ranked`).

    What else routing needs is Ray's: replicas that are full, dead or not there yet, and the queue in front of them.
    Calls carry ``documents`` (`RoutedDocument`); replicas say their name in `record_replica_metadata`.
    """

    def initialize_state(self, load_factor: float, load_floor: int) -> None:
        """Called by Ray with the settings."""
        self._factor, self._floor = load_factor, load_floor

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """All candidates, the best first; Ray takes the first that isn't full."""
        documents = ()
        if pending_request is not None:
            documents = pending_request.kwargs.get("documents", ())
            pending_request.routing_context.should_backoff = True  # all may be full: not again at once
        replicas = {replica.replica_metadata["name"]: replica for replica in candidate_replicas}
        loads = {name: self.replica_queue_len_cache.get(each.replica_id) or 0 for name, each in replicas.items()}
        return [[replicas[name]] for name in ranked(documents, loads, factor=self._factor, floor=self._floor)]


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
