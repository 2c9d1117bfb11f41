"""Settings of the Ray Serve application, from a configuration file or from the command line."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from comb_serving.config.options import ServeOptions
from comb_serving.config.sizes import parse_bytes
from comb_serving.launch.server_process import COMMAND

NAME = "{replica}"  # in arguments: stands for the replica's name, for folders that each needs for itself


class ReplicasConfig(BaseModel):
    """Of the application.

    Args:
        checkpoint: of `comb serve`.
        replicas: how many servers.
        arguments: of every `comb serve`, and vLLM's; ``{replica}`` in one of them stands for the replica's name.
        gpus, cpus: that Ray sets aside for each server.
        environment: of every server.
        load_factor, load_floor: of `affinity.limit`.
        max_ongoing_requests: of each replica; what is above that waits, then gets 503.
        start_seconds: longest wait for a server.
        command: run instead of `comb serve`, for tests.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str
    replicas: int = Field(2, ge=1)
    arguments: tuple[str, ...] = ()
    gpus: float = 0
    cpus: float = 1
    environment: Mapping[str, str] = {}
    load_factor: float = Field(1.25, ge=1)
    load_floor: int = Field(8, ge=1)
    max_ongoing_requests: int = Field(1000, ge=1)
    start_seconds: float = 900.0
    command: tuple[str, ...] = COMMAND

    @field_validator("arguments", mode="before")
    @classmethod
    def _words(cls, given: Any) -> list[str]:
        return shlex.split(given) if isinstance(given, str) else [str(word) for word in given]

    @property
    def max_body_bytes(self) -> int:
        """Longest body that the servers take; nothing reads on behind it."""
        words = [word for argument in self.arguments for word in argument.split("=", 1)]
        options = dict(pairwise(words))
        return parse_bytes(options.get("--comb-max-body", str(ServeOptions.max_body_bytes)))

    def command_of(self, replica: str) -> list[str]:
        """What one replica runs."""
        return [*self.command, self.checkpoint, *(argument.replace(NAME, replica) for argument in self.arguments)]
