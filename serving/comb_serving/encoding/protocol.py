"""What the manager asks of encoders and what they answer: here as objects, between processes as JSON, one a line."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from comb_serving.pool.capability import PoolHandle

MADE = ("encoded", "compiled")  # tiers of what was computed just now: by an adapter's encoder, by vLLM


class EncoderError(RuntimeError):
    """A document could not be encoded."""


@dataclass(frozen=True)
class EncodeJob:
    """One document to encode: where it goes, and the number under which it is answered."""

    number: int
    key: str
    token_ids: tuple[int, ...]
    handle: PoolHandle

    def message(self) -> dict[str, Any]:
        """For the encoder process."""
        blocks = list(self.handle.blocks)
        return {"job": self.number, "key": self.key, "token_ids": list(self.token_ids), "blocks": blocks}

    @classmethod
    def parse(cls, message: dict[str, Any]) -> EncodeJob:
        """The inverse of `message`."""
        ids = tuple(message["token_ids"])
        return cls(int(message["job"]), str(message["key"]), ids, PoolHandle(len(ids), tuple(message["blocks"])))


@dataclass(frozen=True)
class EncoderIdentity:
    """What the encoder says about its weights; part of every content key. `method`: how it compiles documents."""

    fingerprint: str
    dtype: str
    max_document_tokens: int
    vocab_size: int
    method: str = "comb"


@dataclass(frozen=True)
class Encoded:
    """Where a document's keys and values came from (one of `MADE`, "host" or "disk"), and in how many seconds."""

    tier: str
    seconds: float


class Encoders(Protocol):
    """What the manager needs of them; tests have one without processes."""

    async def identity(self) -> EncoderIdentity:
        """Waits for the first encoder. Raises EncoderError if none can be had."""

    def submit(
        self, key: str, token_ids: Sequence[int], handle: PoolHandle, lora: str = "", *, exact: bool = False
    ) -> asyncio.Future[Encoded]:
        """Asks for one document. The future ends when nobody writes to the handle's blocks any more.

        Args:
            lora: name of vLLM's LoRA that it is compiled with; encoders have none.
            exact: whether it is the beginning of prompts, and compiled behind nothing.
        """

    def forget(self, name: str) -> None:
        """Has deleted what may be kept beyond the pool: under one key, or, given a `document_key`, of a document.

        Returns at once. What is asked for meanwhile may be kept all the same.
        """


def encode_message(message: dict[str, Any]) -> bytes:
    """One line."""
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


def decode_message(line: bytes) -> dict[str, Any]:
    """The message of a line.

    Raises:
        ConnectionResetError: the other end was closed before the line ended.
        ValueError, RecursionError: it is anything else; nothing behind it can be trusted.
    """
    if not line.endswith(b"\n"):
        raise ConnectionResetError("the connection was closed")
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError(f"a message is an object, not a {type(message).__name__}")
    return message
