"""The asyncio client: sends requests when they are due, reads streams, and says what came when.

Open loop: a request is sent at its arrival whether or not earlier ones have been answered, and its times count from
the arrival, so a slow server can't slow down what it is measured with (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from comb_serving.bench.servers import MODEL
from comb_serving.bench.workload import Ask

GIVE_UP = 5  # failed requests in a row after which a phase ends


@dataclass(frozen=True)
class RequestRecord:
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


@dataclass(frozen=True)
class Target:
    """A server and how it is asked.

    Args:
        linked: it takes `documents`; otherwise they stand in the message.
        tokens: of every answer, exactly.
        on_record: takes every record at once.
    """

    name: str
    url: str
    linked: bool
    tokens: int = 16
    timeout_s: float = 300.0
    on_record: Callable[[RequestRecord], Any] = lambda _: None

    def body(self, ask: Ask) -> dict[str, Any]:
        """Of a request to ``/v1/chat/completions``; both servers' prompts have the documents in the same order."""
        query, texts = ask.query, [str(document.text) for document in ask.documents]
        listed = [{"id": document.id, "text": text} for document, text in zip(ask.documents, texts, strict=True)]
        content = query if self.linked else "\n".join([*texts, query])
        return {
            "model": MODEL, "max_tokens": self.tokens, "ignore_eos": True, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, "messages": [{"role": "user", "content": content}],
            **({"documents": listed} if self.linked else {}),
        }  # fmt: skip

    def run_closed(self, phase: str, asks: Iterable[Ask], clients: int) -> list[RequestRecord]:
        """`clients` at once, each sends its next request when its last one is answered; ready when all are."""
        waiting = iter(asks)

        async def client(session: _Session) -> None:
            for ask in waiting:
                await session.send(ask, session.seconds())

        return asyncio.run(_Session(self, phase).run([client] * clients))

    def run_open(self, phase: str, asks: Sequence[Ask], arrivals: Sequence[float]) -> list[RequestRecord]:
        """Each request at its arrival, in seconds from now, however many are unanswered."""

        async def one(ask: Ask, due: float, session: _Session) -> None:
            await asyncio.sleep(max(0.0, due - session.seconds()))
            await session.send(ask, due)

        work = [partial(one, ask, due) for ask, due in zip(asks, arrivals, strict=True)]
        return asyncio.run(_Session(self, phase).run(work))


class _Session:
    """The requests of one phase to one server."""

    def __init__(self, target: Target, phase: str) -> None:
        self.target, self.phase, self.records = target, phase, list[RequestRecord]()
        self._start = time.perf_counter()
        self._http: Any = None

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    async def run(self, work: Sequence[Callable[[_Session], Coroutine[Any, Any, None]]]) -> list[RequestRecord]:
        """Runs everything at once; the first failure cancels the rest and is raised."""
        import aiohttp

        # no limit of connections: it would be a queue in front of the server, out of the server's sight
        # nor a time-out: the target has one
        unlimited = {"connector": aiohttp.TCPConnector(limit=0), "timeout": aiohttp.ClientTimeout(total=None)}
        async with aiohttp.ClientSession(**unlimited) as self._http:
            try:
                async with asyncio.TaskGroup() as group:
                    for each in work:
                        group.create_task(each(self))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return self.records

    async def send(self, ask: Ask, due: float) -> None:
        """Sends one request and keeps its record. Raises RuntimeError when `GIVE_UP` in a row have failed."""
        import aiohttp

        target, reading, sent = self.target, StreamReading(), self.seconds()
        try:
            async with (
                asyncio.timeout(target.timeout_s),
                self._http.post(f"{target.url}/v1/chat/completions", json=target.body(ask)) as answer,
            ):
                if answer.status != 200:
                    reading.error = f"status {answer.status}: {(await answer.text())[:300]}"
                else:
                    async for line in answer.content:
                        reading.line(line, self.seconds())
        except TimeoutError:
            reading.error = f"no whole answer within {target.timeout_s:g} s"
        except (aiohttp.ClientError, OSError, ValueError) as error:
            reading.error = f"{type(error).__name__}: {error}"
        self.records.append(reading.record(target, self.phase, ask, due, sent, self.seconds()))
        target.on_record(self.records[-1])
        last = self.records[-GIVE_UP:]
        if len(last) == GIVE_UP and all(record.error for record in last):
            raise RuntimeError(f"{GIVE_UP} requests in a row have failed, the last with: {last[-1].error}")


@dataclass
class StreamReading:
    """The lines of a stream, as they come."""

    first: float | None = None
    done: bool = False
    usage: dict[str, Any] = field(default_factory=dict)
    documents: list[dict[str, Any]] = field(default_factory=list)
    error: str = ""

    def line(self, line: bytes, now: float) -> None:
        """Takes in one line. Raises ValueError for data that isn't JSON."""
        data = line.removeprefix(b"data: ").strip()
        if data == b"[DONE]":
            self.done = True
        elif line.startswith(b"data: "):
            event = json.loads(data)
            if "error" in event:
                self.error = f"in the stream: {str(event['error'])[:300]}"
            # the chunk with the role only comes with the first token too, but the token is what counts
            if any("role" not in (choice.get("delta") or {}) for choice in event.get("choices", ())):
                self.first = now if self.first is None else self.first
            self.usage = event.get("usage") or self.usage
            self.documents = (event.get("comb") or {}).get("documents", self.documents)

    def record(self, target: Target, phase: str, ask: Ask, due: float, sent: float, now: float) -> RequestRecord:
        """What is known when the stream has ended; an answer that isn't whole or over other documents is an error."""
        states = [document["state"] for document in self.documents]
        tokens = int(self.usage.get("completion_tokens", 0))
        details = self.usage.get("prompt_tokens_details") or {}
        return RequestRecord(
            target.name, phase, ask.number, due, late_s=sent - due,
            ttft_s=(now if self.first is None else self.first) - due, total_s=now - due, tokens=tokens,
            prompt_tokens=int(self.usage.get("prompt_tokens", 0)), cached_tokens=int(details.get("cached_tokens") or 0),
            hits=states.count("hit"), encoded=states.count("encoded"),
            document_tokens=sum(document["tokens"] for document in self.documents),
            error=self.error or self._fault(target, ask, tokens),
        )  # fmt: skip

    def _fault(self, target: Target, ask: Ask, tokens: int) -> str:
        if not self.done or self.first is None:
            return "the stream broke off"
        if tokens != target.tokens:
            return f"{tokens} tokens instead of {target.tokens}"
        named, wanted = [document["id"] for document in self.documents], [document.id for document in ask.documents]
        return "" if named == wanted or not target.linked else (
            f"its report names the documents {named} instead of {wanted}"
        )  # fmt: skip
