"""The client: OpenAI's own, sending requests when they are due, and saying what came when.

Open loop: a request is sent at its arrival whether or not earlier ones have been answered, and its times count from
the arrival, so a slow server can't slow down what it is measured with (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from comb_serving.bench.servers import MODEL
from comb_serving.bench.trace import TraceAsk
from comb_serving.bench.workload import Ask

Asked: TypeAlias = Ask | TraceAsk

GIVE_UP = 5  # failed requests in a row after which a phase ends


@dataclass(frozen=True)
class RequestRecord:
    """What became of one request; times in seconds.

    Args:
        due_s: its arrival, from the start of its phase. late_s: by which it was sent later than that.
        ttft_s: from arrival to the first token. total_s: to the end of the stream.
        tokens: of the answer, text: what it says, first: its first token's likeliest ones where they were asked for.
        prompt_tokens: by the server's usage, computed: those of them that it hadn't cached.
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
    hits: int = 0
    encoded: int = 0
    document_tokens: int = 0
    error: str = ""
    prompt_tokens: int = 0
    computed: int = 0
    text: str = ""
    first: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Target:
    """A server and how it is asked.

    Args:
        linked: it takes `documents`, and answers name them; otherwise they stand in the message.
        tokens: of every answer, exactly.
        on_record: takes every record at once.
    """

    name: str
    url: str
    linked: bool
    tokens: int = 16
    timeout_s: float = 300.0
    on_record: Callable[[RequestRecord], Any] = lambda _: None

    def body(self, ask: Asked) -> dict[str, Any]:
        """Of a request to ``/v1/chat/completions``; both servers' prompts have the documents in the same order."""
        return {
            "model": MODEL, "max_tokens": self.tokens, "temperature": 0, "stream": True,
            "stream_options": {"include_usage": True}, **ask.body(linked=self.linked),
        }  # fmt: skip

    def record(
        self, phase: str, ask: Asked, chunks: Sequence[tuple[Any, float]], due: float, sent: float, now: float,
        error: str = "",
    ) -> RequestRecord:  # fmt: skip
        """What a stream's chunks say; an answer that isn't whole, or is over other documents, is an error."""
        # the chunk with the role only comes with the first token too, but the token is what counts
        tokens_at = (at for chunk, at in chunks if any(choice.delta.role is None for choice in chunk.choices))
        first, usage = next(tokens_at, None), next((chunk.usage for chunk, _ in chunks if chunk.usage), None)
        tokens, prompt = (0, 0) if usage is None else (usage.completion_tokens, getattr(usage, "prompt_tokens", 0) or 0)
        details = getattr(usage, "prompt_tokens_details", None)
        reports = (getattr(chunk, "comb", None) for chunk, _ in chunks)
        documents: list[dict[str, Any]] = next((report["documents"] for report in reports if report), [])
        named, wanted = [each["id"] for each in documents], [document.id for document in ask.documents]
        if first is None or tokens != self.tokens:
            error = error or f"{tokens} tokens instead of {self.tokens}: the stream broke off, or ended early"
        elif self.linked and named != wanted:
            error = error or f"its report names the documents {named} instead of {wanted}"
        states = [each["state"] for each in documents]
        new = states.count("encoded") + states.count("compiled")  # by an adapter's encoder, or by a plain model
        return RequestRecord(
            self.name, phase, ask.number, due, late_s=sent - due, ttft_s=(now if first is None else first) - due,
            total_s=now - due, tokens=tokens, hits=states.count("hit"), encoded=new,
            document_tokens=sum(each["tokens"] for each in documents), error=error, prompt_tokens=prompt,
            computed=prompt - (getattr(details, "cached_tokens", 0) or 0), **_said(chunk for chunk, _ in chunks),
        )  # fmt: skip

    def run_closed(self, phase: str, asks: Iterable[Asked], clients: int, *, pause: float = 0.0) -> list[RequestRecord]:
        """`clients` at once, each sends its next request `pause` seconds after its last answer; ready when all are."""
        waiting = iter(asks)

        async def client(session: _Session) -> None:
            for ask in waiting:
                await session.send(ask, session.seconds())
                await asyncio.sleep(pause)

        return asyncio.run(_Session(self, phase).run([client] * clients))

    def run_open(self, phase: str, asks: Iterable[Asked], arrivals: Sequence[float]) -> list[RequestRecord]:
        """Each request at its arrival, in seconds from now, however many are unanswered."""

        async def one(ask: Asked, due: float, session: _Session) -> None:
            await asyncio.sleep(max(0.0, due - session.seconds()))
            await session.send(ask, due)

        return asyncio.run(
            _Session(self, phase).run([partial(one, *each) for each in zip(asks, arrivals, strict=True)])
        )


def _said(chunks: Iterable[Any]) -> dict[str, Any]:
    """A stream's text, and the likeliest first tokens with their log-probabilities."""
    text, first = "", dict[str, float]()
    for choice in (choice for chunk in chunks for choice in chunk.choices):
        text += getattr(choice.delta, "content", None) or ""
        if not first and (logprobs := getattr(choice, "logprobs", None)) is not None and logprobs.content:
            first = {each.token: each.logprob for each in logprobs.content[0].top_logprobs}
    return {"text": text, "first": first}


class _Session:
    """The requests of one phase to one server."""

    def __init__(self, target: Target, phase: str) -> None:
        self.target, self.phase, self.records = target, phase, list[RequestRecord]()
        self._start = time.perf_counter()
        self._client: Any = None

    def seconds(self) -> float:
        return time.perf_counter() - self._start

    async def run(self, work: Sequence[Callable[[_Session], Coroutine[Any, Any, None]]]) -> list[RequestRecord]:
        """Runs everything at once; the first failure cancels the rest and is raised."""
        import httpx
        from openai import AsyncOpenAI

        # no limit of connections: it would be a queue in front of the server, out of the server's sight
        # nor a time-out: the target has one
        http = httpx.AsyncClient(limits=httpx.Limits(), timeout=None)
        address = f"{self.target.url}/v1"
        async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, http_client=http) as self._client:
            try:
                async with asyncio.TaskGroup() as group:
                    for each in work:
                        group.create_task(each(self))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return self.records

    async def send(self, ask: Asked, due: float) -> None:
        """Sends one request and keeps its record. Raises RuntimeError when `GIVE_UP` in a row have failed."""
        import httpx
        from openai import OpenAIError

        target, sent, error, chunks = self.target, self.seconds(), "", list[tuple[Any, float]]()
        try:
            async with asyncio.timeout(target.timeout_s):
                async for chunk in await self._client.chat.completions.create(**target.body(ask)):
                    chunks.append((chunk, self.seconds()))
        except TimeoutError:
            error = f"no whole answer within {target.timeout_s:g} s"
        except (OpenAIError, httpx.HTTPError, ValueError) as failure:
            error = f"{type(failure).__name__}: {str(failure)[:300]}"
        self.records.append(target.record(self.phase, ask, chunks, due, sent, self.seconds(), error))
        target.on_record(self.records[-1])
        last = self.records[-GIVE_UP:]
        if len(last) == GIVE_UP and all(record.error for record in last):
            raise RuntimeError(f"{GIVE_UP} requests in a row have failed, the last with: {last[-1].error}")
