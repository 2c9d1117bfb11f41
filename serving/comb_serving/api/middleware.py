"""The ASGI middleware of `comb serve`: documents go in here, and references are dropped here.

It is the outermost layer of vLLM's server (``--middleware``), so it looks at the API key itself before it does
anything for a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import signal
import time
from collections.abc import Awaitable, Callable
from typing import Any

from comb_serving.api import own_routes, routes
from comb_serving.api.cohere import CohereWriter, as_chat
from comb_serving.api.front import ServerFront
from comb_serving.api.http import (
    ClientLeftError,
    Connection,
    Message,
    Receive,
    RequestError,
    Scope,
    Send,
    header,
    parse_object,
    path_of,
    read_body,
    send_json,
    with_body,
)
from comb_serving.api.preprocessor import salted
from comb_serving.api.response import LEFT, RequestLogEntry, ResponseWriter, cached_and_made, error_events, report
from comb_serving.config.instance import READY, read_secret
from comb_serving.config.serve_options import ServeOptions, instance_dir
from comb_serving.encoding.protocol import EncoderError
from comb_serving.manager.leases import Lease, PoolFullError, PoolPinnedError, TenantQuotaError
from comb_serving.manager.manager import NO_PLACE
from comb_serving.pool.capability import KEY, name_of

logger = logging.getLogger(__name__)

App = Callable[[Scope, Receive, Send], Awaitable[None]]
RETRY_AFTER_S, RETRY_AFTER_PINNED_S, RETRY_AFTER_SHUTDOWN_S = 2, 60, 10
SHUTDOWN = "the server is shutting down"
DRAIN_SECONDS = 60.0
CUT_OFF_SECONDS = 1.0  # for the last words to those that are cut off when the server ends


class CombMiddleware:
    """Around vLLM's server (`app`). `front` is made from the environment and the instance's folder, but in tests."""

    def __init__(self, app: App, *, front: ServerFront | None = None) -> None:
        self.app, self._front = app, front
        self._ending: set[asyncio.Task[None]] = set()
        self._starting: asyncio.Task[None] | None = None
        self._requests: set[asyncio.Task[Any]] = set()
        self._shutdown: asyncio.Task[None] | None = None
        self._patient = self._answering = True

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._lifespan(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})  # nothing that is served here speaks it
        elif path_of(scope) == "/health":
            await self._health(scope, receive, send)
        elif scope["method"] == "OPTIONS" or (not routes.is_ours(path_of(scope)) and scope["method"] in routes.ASKING):
            await self.app(with_body(scope, b""), Connection(receive), send)
        else:
            await self._guarded(scope, receive, send)

    # ---- start and end ----

    async def _lifespan(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def watched() -> Message:
            message = await receive()
            if message["type"] == "lifespan.startup":
                front, engine, server = self.front(), _state_of(scope, "engine_client"), _state_of(scope, "server")
                messages = _state_of(scope, "anthropic_serving_messages")
                if engine is not None:
                    front.attach(engine, _state_of(scope, "openai_serving_models"))
                if server is not None:  # in place of vLLM's handler, which ends the engine under open requests
                    for number in (signal.SIGINT, signal.SIGTERM):
                        asyncio.get_running_loop().add_signal_handler(number, self._end, server)
                self._starting = asyncio.create_task(self._start(engine, messages))
            elif message["type"] == "lifespan.shutdown":
                await self.stop()
            return message

        await self.app(scope, watched, send)

    async def _start(self, engine: Any, messages: Any) -> None:
        """What has to be true before the server says that it is healthy. A wrong engine ends the server."""
        if engine is not None:
            try:
                await self.front().check(engine, messages)
            except Exception:
                logger.exception("the engine doesn't read documents as it must: the server ends")
                os.kill(os.getpid(), signal.SIGTERM)
                return
        (instance_dir() / READY).touch()
        self._starting = None

    def front(self) -> ServerFront:
        """What the options ask for, started the first time. Raises ValueError if vLLM's worker has made no pool."""
        if self._front is None:
            self._front = ServerFront.start(ServeOptions.from_environment(), read_secret(instance_dir()))
        return self._front

    def _end(self, server: Any) -> None:
        """At the first signal lets open requests come to their end, at the second cuts them off."""
        if self._shutdown is None:
            self._shutdown = asyncio.create_task(self._drain(server))
        else:
            self._patient = False

    async def _drain(self, server: Any) -> None:
        """Takes no new requests, waits for the open ones, cuts off what is left, and ends uvicorn's `server`."""
        seconds = self.front().options.drain_seconds
        logger.info("the server ends: %d requests have %g s", len(self._requests), seconds)
        deadline = time.monotonic() + seconds
        while self._requests and self._patient and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        self._answering = False
        if self._requests:
            logger.warning("%d requests are cut off", len(self._requests))
            for task in self._requests:
                task.cancel()
            await asyncio.wait(self._requests, timeout=CUT_OFF_SECONDS)
        server.config.timeout_graceful_shutdown = CUT_OFF_SECONDS  # for clients that don't read
        server.should_exit = True

    async def stop(self) -> None:
        """Ends what is under way here, and encoder processes."""
        tasks = [*self._ending, *filter(None, [self._starting])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._front is not None:
            await self._front.stop()

    async def _health(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's answer, unless documents can't be encoded and won't be soon, or aren't known to be read yet."""
        fault = None if self._front is None else self._front.fault()
        fault = fault or ("it is starting" if self._starting is not None else None)
        fault = SHUTDOWN if self._shutdown is not None else fault
        if fault is not None:
            error = RequestError(503, f"documents can't be read: {fault}")
            await send_json(scope, send, error.status, routes.error_body(path_of(scope), error))
            return

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start" and self._front is not None:
                weights = routes.WEIGHTS.encode(), self._front.weights.encode()
                message = {**message, "headers": [*message["headers"], weights]}
            await send(message)

        await self.app(scope, receive, named)

    # ---- requests ----

    async def _guarded(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Whatever goes wrong is an error object where nothing has been answered yet, and never silence."""
        entry, task, streams, whole = RequestLogEntry(path_of(scope)), asyncio.current_task(), False, False
        assert task is not None

        async def watched(message: Message) -> None:
            nonlocal streams, whole
            if message["type"] == "http.response.start":
                entry.status = message["status"]
                streams = (b"content-type", b"text/event-stream") in [(k, v[:17]) for k, v in message["headers"]]
            else:
                whole = not message.get("more_body", False)
            await send(message)

        self._requests.add(task)
        try:
            if self._shutdown is not None:
                raise RequestError(503, SHUTDOWN, retry_after=RETRY_AFTER_SHUTDOWN_S)
            entry.id = (header(scope, "x-request-id") or entry.id)[:128]
            await self._request(scope, receive, watched, entry)
        except ClientLeftError:
            entry.status = LEFT
        except (Exception, asyncio.CancelledError) as error:
            cut_off = isinstance(error, asyncio.CancelledError)
            if cut_off and (self._answering or task.uncancel()):
                raise  # not by `_drain`
            found = _as_request_error(error)
            if found.status == 429:
                self.front().preprocessor.counters.refused += 1
            entry.error = type(error).__name__
            if found.status == 500 and self._shutdown is None:
                logger.exception("request %s failed", entry.id)
            elif found.status > 500 and not cut_off and self._shutdown is None:  # foreseen
                logger.warning("request %s failed: %s", entry.id, found.message)
            if entry.status is None:
                entry.status = found.status
                await send_json(scope, send, found.status, routes.error_body(entry.path, found), found.headers)
            elif cut_off and streams and not whole:
                await send({"type": "http.response.body", "body": error_events(entry.path, found)})
            elif not whole:
                raise  # the server closes the connection: the client sees that the answer is not whole
        finally:
            self._requests.discard(task)
            entry.log()

    async def _request(self, scope: Scope, receive: Receive, send: Send, entry: RequestLogEntry) -> None:
        front, path, method = self.front(), path_of(scope), scope["method"]
        authorization = header(scope, "authorization")
        for name in ("content-type", "content-length"):
            header(scope, name)  # refused when given twice
        # the key comes first: without one nobody makes the server read, parse or keep anything
        routes.check_request(front.options, method, path, authorization)
        if path in routes.OPEN:
            await self.app(with_body(scope, b""), Connection(receive), send)
            return
        raw = await read_body(receive, front.options.max_body_bytes)
        preprocessor, tenant = front.preprocessor, routes.tenant_of(authorization)
        if path == routes.SWITCH:
            if method == "POST":
                preprocessor.choice.switch(parse_object(raw))
            state = own_routes.state(preprocessor, tenant, front.options.ranks)
            await send_json(scope, send, 200, json.dumps(state).encode())
            return
        connection, entry.tenant = Connection(receive), tenant
        try:
            if routes.is_ours(path):
                body = parse_object(raw) if method == "POST" else {}
                work = own_routes.documents(preprocessor, method, path, body, tenant)
                await send_json(scope, send, 200, json.dumps(await connection.unless_left(work)).encode())
            elif path in routes.GENERATION or path == routes.COHERE:
                asked = parse_object(raw)
                if path == routes.COHERE:
                    asked, send = as_chat(asked), CohereWriter(send)
                    chat = scope["path"].replace(routes.COHERE, routes.CHAT)
                    scope = {**scope, "path": chat, "raw_path": chat.encode()}
                sightings = preprocessor.sightings  # while a request is open, few segments are compiled that were found
                with contextlib.nullcontext() if sightings is None else sightings.answering():
                    await self._generation(scope, connection, send, asked, entry)
            else:  # what vLLM answers without documents
                body = parse_object(raw) if raw else {}
                preprocessor.check(body)
                for name in ("documents", "comb"):  # they would be ignored
                    if body.get(name) is not None:
                        there = f"there are {', '.join(routes.GENERATION)}, and encoding at {routes.DOCUMENTS}"
                        raise RequestError(400, f"{path} takes no {name}: {there}", param=name)
                if path == routes.COUNT:
                    tokens = await connection.unless_left(preprocessor.count(body, tenant))
                    if tokens is not None:
                        await send_json(scope, send, 200, json.dumps({"input_tokens": tokens}).encode())
                        return
                connection.body = json.dumps(salted(body, tenant)).encode() if raw else b""
                await self.app(with_body(scope, connection.body), connection, send)
            if connection.left:
                entry.status = LEFT
        finally:
            connection.close()

    async def _generation(
        self, scope: Scope, connection: Connection, send: Send, asked: dict[str, Any], entry: RequestLogEntry
    ) -> None:
        front, path, engine = self.front(), path_of(scope), _state_of(scope, "engine_client")
        preprocessor = front.preprocessor
        entry.documents = bool(asked.get("documents"))
        prepared = await connection.unless_left(preprocessor.preprocess(path, asked, entry.tenant))
        entry.prepared = prepared
        lease: Lease | None = None
        writer: ResponseWriter | None = None
        token: str | None = None

        def note_link() -> None:
            """Takes what the engine has said of the request, once."""
            # several prompts have one name, and which of them is meant nobody knows
            if front.reports is None or token is None or entry.link is not None or len(prepared.prompts) != 1:
                return
            entry.link = front.reports.take(name_of(token))
            if entry.link is not None:
                preprocessor.counters.count_prompt(preprocessor.choice.label(prepared.method), entry.link)
                if prepared.unlinked is not None:
                    preprocessor.counters.count_found(prepared.spans[0], entry.link)

        def comb() -> dict[str, Any]:
            note_link()
            return report(prepared, lease, entry.link)

        def counted() -> tuple[int, int] | None:
            note_link()
            return None if entry.link is None or lease is None else cached_and_made(entry.link, lease)

        try:
            if prepared.unlinked is not None:
                # nothing is linked before the server has looked at itself
                held = preprocessor.hold(prepared, entry.tenant) if self._starting is None else None
                prepared, lease = held or (prepared.plain, None)
                entry.prepared, entry.lease = prepared, lease
            if prepared.segments and self._starting is not None:
                await connection.unless_left(asyncio.shield(self._starting))
            if prepared.linked and lease is None:
                try:
                    work = preprocessor.acquire(prepared.segments, entry.tenant, prepared.compiled_with)
                    lease = entry.lease = await connection.unless_left(work)
                except NO_PLACE as error:
                    if not preprocessor.choice.plain:
                        raise
                    logger.info("request %s is computed whole: %s", entry.id, error)
                    prepared = entry.prepared = preprocessor.inlined(prepared)
                else:
                    preprocessor.leased(prepared, entry.tenant, lease)
            if lease is not None and prepared.unlinked is None:  # found text is counted by itself
                preprocessor.counters.count_hits(lease.documents)
            body = prepared.body
            if prepared.segments:
                token = prepared.signed(lease, entry.id, front.secret)
                body = {**body, "vllm_xargs": {**(body.get("vllm_xargs") or {}), KEY: token}}
                if path == routes.RESPONSES:  # whose name doesn't come from the header
                    body["request_id"] = f"resp_{entry.id}"
                # without a lease they are in the prompt, and in vLLM's own usage
                documents = () if lease is None else lease.documents
                tokens = sum(each.handle.tokens for each in documents)
                cached = sum(each.handle.tokens for each in documents if each.state == "hit")
                in_prompt = counted if prepared.spans else None
                prompts = max(1, len(prepared.prompts))
                answer = writer = ResponseWriter(send, comb, tokens, cached, prompts=prompts, counted=in_prompt)
                connection.answered = lambda: answer.finished
            connection.body = json.dumps(body).encode()
            await self.app(with_body(scope, connection.body, request_id=entry.id), connection, writer or send)
        finally:
            note_link()
            if front.audit is not None:
                front.audit.consider(prepared, entry.link, entry.tenant, engine)
            if lease is not None:
                stops = bool(asked.get("stop") or asked.get("stop_sequences"))  # by a text: the engine is told
                in_engine = writer is not None and (connection.left or not writer.finished or stops)
                if in_engine and engine is not None:
                    task = asyncio.create_task(_release_after(lease, engine))
                    self._ending.add(task)
                    task.add_done_callback(self._ending.discard)
                else:
                    lease.release()


def _state_of(scope: Scope, name: str) -> Any:
    """What vLLM's application keeps under a name: `engine_client` is its client of its engine."""
    return getattr(getattr(scope.get("app"), "state", None), name, None)


async def _release_after(lease: Lease, engine: Any) -> None:
    """Releases when the engine core has answered twice: an aborted request may be in a step of it still."""
    try:
        with contextlib.suppress(Exception):
            async with asyncio.timeout(DRAIN_SECONDS):  # it reads messages between steps, so the abort came first
                await engine.is_sleeping()
                await engine.is_sleeping()
    finally:
        lease.release()


def _as_request_error(error: BaseException) -> RequestError:
    if isinstance(error, RequestError):
        return error
    if isinstance(error, asyncio.CancelledError):
        return RequestError(503, f"{SHUTDOWN}: ask again", retry_after=RETRY_AFTER_SHUTDOWN_S)
    if isinstance(error, PoolFullError | TenantQuotaError | PoolPinnedError):
        after = RETRY_AFTER_PINNED_S if isinstance(error, PoolPinnedError) else RETRY_AFTER_S
        return RequestError(429, str(error), param="documents", retry_after=after)
    if isinstance(error, EncoderError):
        return RequestError(503, f"the documents could not be encoded: {error}", param="documents", retry_after=10)
    if isinstance(error, ValueError | RecursionError):  # the latter of a body nested nearly as deep as json reads one
        return RequestError(400, str(error))
    return RequestError(500, f"{type(error).__name__} in the server; see its log")
