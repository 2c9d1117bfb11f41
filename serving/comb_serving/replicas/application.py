"""The replicas as a Ray Serve application.

    serve run comb_serving.replicas.application:application checkpoint=out/adapter replicas=2 \\
        "arguments=--comb-pool-bytes 8GiB --dtype bfloat16"

Each replica is a deployment of its own with one actor, which owns a `comb serve`: so the router can name it, its name
(and with it its share of the documents) stays when Ray starts it again, and each has its own place in the cluster.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shlex
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, cast

import ray
from ray import serve
from starlette.requests import Request
from starlette.responses import StreamingResponse

from comb_serving.replicas.affinity import Bound
from comb_serving.replicas.hop import Answer
from comb_serving.replicas.process import COMMAND, ServeProcess
from comb_serving.replicas.router import Router

logger = logging.getLogger(__name__)

LOOK_SECONDS, ANSWER_SECONDS = 1.0, 10.0
NAME = "{replica}"  # in arguments: stands for the replica's name, for folders that each needs for itself


@dataclass(frozen=True)
class Settings:
    """Of the application.

    Args:
        checkpoint: of `comb serve`.
        replicas: how many servers.
        arguments: of every `comb serve`, and vLLM's; ``{replica}`` in one of them stands for the replica's name.
        gpus, cpus: that Ray sets aside for each server.
        environment: of every server.
        load_factor, load_floor: of `Bound`.
        start_seconds: longest wait for a server.
        command: run instead of `comb serve`, for tests.
    """

    checkpoint: str
    replicas: int = 2
    arguments: tuple[str, ...] = ()
    gpus: float = 0
    cpus: float = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    load_factor: float = Bound.factor
    load_floor: int = Bound.floor
    start_seconds: float = 900.0
    command: tuple[str, ...] = COMMAND

    @classmethod
    def parse(cls, given: Mapping[str, Any]) -> Settings:
        """From a configuration file, or from the command line, where all values are texts.

        Raises:
            ValueError: an unknown name, none for the checkpoint, or a value of the wrong kind.
        """
        known = {one.name: one for one in fields(cls)}
        unknown = sorted(given.keys() - known.keys())
        if unknown or "checkpoint" not in given:
            what = f"{unknown[0]!r} is none of" if unknown else "checkpoint is missing from"
            raise ValueError(f"{what} the settings {sorted(known)}")
        values = dict(given)
        if isinstance(values.get("arguments"), str):
            values["arguments"] = shlex.split(values["arguments"])
        values["arguments"] = tuple(map(str, values.get("arguments", ())))
        for name in ("gpus", "cpus", "load_factor", "start_seconds"):
            values[name] = float(values.get(name, known[name].default))
        for name in ("replicas", "load_floor"):
            values[name] = int(values.get(name, known[name].default))
        if values["replicas"] < 1:
            raise ValueError(f"replicas must be at least 1, not {values['replicas']}")
        return cls(**values)

    def command_of(self, replica: str) -> list[str]:
        """What one replica runs."""
        return [*self.command, self.checkpoint, *(argument.replace(NAME, replica) for argument in self.arguments)]


@serve.deployment(health_check_period_s=2, health_check_timeout_s=30, graceful_shutdown_timeout_s=100)
class CombReplica:
    """An actor that owns one `comb serve`; Ray starts another one when the server has ended."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], start_seconds: float) -> None:
        host = ray.util.get_node_ip_address()
        self._server = ServeProcess(command, host=host, environment=environment, start_seconds=start_seconds)
        self._generation = f"{os.getpid()}-{time.time_ns()}"

    def where(self) -> tuple[str, str]:
        """Address, and a word that is another one after a restart."""
        return self._server.address, self._generation

    def pid(self) -> int | None:
        """Of `comb serve`."""
        return self._server.pid

    def check_health(self) -> None:
        """Asked by Ray. Raises RuntimeError if the server has ended."""
        self._server.check()

    def __del__(self) -> None:
        if hasattr(self, "_server"):
            self._server.stop()


@serve.deployment(max_ongoing_requests=100_000, graceful_shutdown_timeout_s=30)
class CombRouter:
    """The application's address: `Router` over the replicas' actors."""

    async def __init__(  # type: ignore[misc]  # Ray Serve awaits it
        self, replicas: Mapping[str, Any], bound: Bound
    ) -> None:
        self._router = Router.of(list(replicas), bound)
        self._watching = [asyncio.create_task(self._watch(name, handle)) for name, handle in replicas.items()]

    async def _watch(self, name: str, replica: Any) -> None:
        """Asks a replica where it is, again and again."""
        while True:
            try:
                async with asyncio.timeout(ANSWER_SECONDS):
                    address, generation = await replica.where.remote()
                await self._router.arrived(name, address, generation)
            except Exception as error:  # of an actor that is gone or not there yet: any kind that Ray has
                logger.info("replica %s: %s", name, type(error).__name__)
                self._router.missed(name)
            await asyncio.sleep(LOOK_SECONDS)

    async def __call__(self, request: Request) -> StreamingResponse:
        scope = request.scope
        target = scope.get("raw_path", request.url.path.encode()).decode("latin-1")
        query = scope.get("query_string", b"").decode("latin-1")
        headers = {name.lower(): value for name, value in request.headers.items()}
        answer = await self._router.handle(
            request.method, f"{target}?{query}" if query else target, headers, await request.body()
        )
        return StreamingResponse(_passed(answer), status_code=answer.status, headers=answer.headers)


async def _passed(answer: Answer) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.chunks:
            yield chunk
    finally:
        await answer.close()


def application(given: dict[str, Any]) -> Any:
    """The Ray Serve application of `Settings`."""
    settings = Settings.parse(given)
    names = [f"replica-{number}" for number in range(settings.replicas)]
    resources = {"num_cpus": settings.cpus, "num_gpus": settings.gpus}
    replicas = {
        name: cast(Any, CombReplica)
        .options(name=name, ray_actor_options=resources)
        .bind(settings.command_of(name), dict(settings.environment), settings.start_seconds)
        for name in names
    }
    bound = Bound(settings.load_factor, settings.load_floor)
    return cast(Any, CombRouter).options(ray_actor_options={"num_cpus": 0}).bind(replicas, bound)
