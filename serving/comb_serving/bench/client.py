"""The asyncio client: sends requests when they are due, reads streams, and says what came when.

Open loop: a request is sent at its arrival whether or not earlier ones have been answered, and its times count from
the arrival, so a slow server can't slow down what it is measured with (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from comb_serving.bench.servers import MODEL
from comb_serving.bench.workload import Ask, linked_messages, plain_messages

GIVE_UP = 5  # failed requests in a row after which a phase ends


@dataclass(frozen=True)
class Record:
    """What became of one request; times in seconds.

    Args:
        due_s: its arrival, from the start of its phase. late_s: by which it was sent later than that.
        ttft_s: from arrival to the first token. total_s: to the end of the stream.
        tokens: of the answer. prompt_tokens, cached_tokens: as the server counts them, documents included.
        hits, encoded: documents, and document_tokens theirs, by the answer's report; 0 for a server without documents.
        error: why it counts as failed; "" for a good answer.
    """

    server: str
    phase: str
    number: int
    due_s: float
    late_s: float = 0.0
    ttft_s: float = 0.0
    total_s: float = 0.0
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    hits: int = 0
    encoded: int = 0
    document_tokens: int = 0
    error: str = ""

    @property
    def tpot_s(self) -> float | None:
        """Per token behind the first; None for a single token."""
        return (self.total_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else None

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Target:
    """A server and how it is asked.

    Args:
        linked: it takes `documents`; otherwise they stand in the message.
        tokens: of every answer, exactly.
    """

    name: str
    url: str
    linked: bool
    tokens: int = 16
    timeout_s: float = 300.0

    def body(self, ask: Ask) -> dict[str, Any]:
        """Of a request to ``/v1/chat/completions``."""
        body: dict[str, Any] = {
            "model": MODEL, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if not self.linked:
            return {**body, "messages": plain_messages(ask)}
        messages, documents = linked_messages(ask)
        return {**body, "messages": messages, "documents": documents}


def run_closed(
    target: Target, phase: str, asks: Iterable[Ask], clients: int, on_record: Callable[[Record], Any]
) -> list[Record]:
    """`clients` at once, each sends its next request when its last one is answered; ready when all are."""

    async def work(session: Any, clock: Callable[[], float]) -> list[Record]:
        waiting, records = iter(asks), []

        async def client() -> None:
            for ask in waiting:
                record = await _send(session, target, phase, ask, clock(), clock)
                records.append(record)
                on_record(record)
                _check_alive(records)

        await _all([client() for _ in range(clients)])
        return records

    return asyncio.run(_in_session(work))


def run_open(
    target: Target, phase: str, asks: Sequence[Ask], arrivals: Sequence[float], on_record: Callable[[Record], Any]
) -> list[Record]:
    """Each request at its arrival, in seconds from now, however many are unanswered."""

    async def work(session: Any, clock: Callable[[], float]) -> list[Record]:
        records: list[Record] = []

        async def one(ask: Ask, due: float) -> None:
            await asyncio.sleep(max(0.0, due - clock()))
            record = await _send(session, target, phase, ask, due, clock)
            records.append(record)
            on_record(record)
            _check_alive(records)

        await _all([one(ask, due) for ask, due in zip(asks, arrivals, strict=True)])
        return records

    return asyncio.run(_in_session(work))


async def _all(work: Sequence[Any]) -> None:
    """Runs everything at once; the first failure cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            for each in work:
                group.create_task(each)
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from None


async def _in_session(work: Callable[[Any, Callable[[], float]], Any]) -> Any:
    import aiohttp

    start = time.perf_counter()
    # no limit of connections: it would be a queue in front of the server, out of the server's sight
    # nor a time-out: the target has one
    unlimited = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=None)}
    async with aiohttp.ClientSession(**unlimited) as session:
        return await work(session, lambda: time.perf_counter() - start)


def _check_alive(records: Sequence[Record]) -> None:
    last = records[-GIVE_UP:]
    if len(last) == GIVE_UP and all(record.error for record in last):
        raise RuntimeError(f"{GIVE_UP} requests in a row have failed, the last with: {last[-1].error}")


async def _send(session: Any, target: Target, phase: str, ask: Ask, due: float, clock: Callable[[], float]) -> Record:
    import aiohttp

    reading = StreamReading()
    sent = clock()
    try:
        async with (
            asyncio.timeout(target.timeout_s),
            session.post(f"{target.url}/v1/chat/completions", json=target.body(ask)) as answer,
        ):
            if answer.status != 200:
                reading.error = f"status {answer.status}: {(await answer.text())[:300]}"
            else:
                async for line in answer.content:
                    reading.line(line, clock())
    except TimeoutError:
        reading.error = f"no whole answer within {target.timeout_s:g} s"
    except (aiohttp.ClientError, OSError, ValueError) as error:
        reading.error = f"{type(error).__name__}: {error}"
    return reading.record(target, phase, ask, due, sent, clock())


class StreamReading:
    """The lines of a stream, as they come."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.done = False
        self.usage: dict[str, Any] = {}
        self.comb: dict[str, Any] | None = None
        self.error = ""

    def line(self, line: bytes, now: float) -> None:
        """Takes in one line. Raises ValueError for data that isn't JSON."""
        if not line.startswith(b"data: "):
            return
        data = line[6:].strip()
        if data == b"[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            self.error = f"in the stream: {str(event['error'])[:300]}"
        # the chunk with the role only comes with the first token too, but the token is what counts
        if self.first is None and any("role" not in (choice.get("delta") or {}) for choice in event.get("choices", ())):
            self.first = now
        self.usage = event.get("usage") or self.usage
        self.comb = event.get("comb") or self.comb

    def record(self, target: Target, phase: str, ask: Ask, due: float, sent: float, now: float) -> Record:
        """What is known when the stream has ended; an answer that isn't whole or over other documents is an error."""
        documents = (self.comb or {}).get("documents", [])
        states = [document["state"] for document in documents]
        tokens = int(self.usage.get("completion_tokens", 0))
        details = self.usage.get("prompt_tokens_details") or {}
        return Record(
            target.name, phase, ask.number, due, late_s=sent - due,
            ttft_s=(now if self.first is None else self.first) - due, total_s=now - due, tokens=tokens,
            prompt_tokens=int(self.usage.get("prompt_tokens", 0)), cached_tokens=int(details.get("cached_tokens") or 0),
            hits=states.count("hit"), encoded=states.count("encoded"),
            document_tokens=sum(document["tokens"] for document in documents),
            error=self.error or self._fault(target, ask, tokens),
        )  # fmt: skip

    def _fault(self, target: Target, ask: Ask, tokens: int) -> str:
        if not self.done or self.first is None:
            return "the stream broke off"
        if tokens != target.tokens:
            return f"{tokens} tokens instead of {target.tokens}"
        if not target.linked:
            return ""
        named = [document["id"] for document in (self.comb or {}).get("documents", [])]
        wanted = [document.id for document in ask.documents]
        return "" if named == wanted else f"its report names the documents {named} instead of {wanted}"
