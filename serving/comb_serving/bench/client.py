"""The client: OpenAI's own, sending requests when they are due, and saying what came when.

Open loop: a request is sent at its arrival whether or not earlier ones have been answered, and its times count from
the arrival, so a slow server can't slow down what it is measured with (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from comb_serving.bench.trace import TraceAsk
from comb_serving.bench.workload import MODEL, Ask

Asked: TypeAlias = Ask | TraceAsk

GIVE_UP = 5  # failed requests in a row after which a phase ends


@dataclass(frozen=True)
class RequestRecord:
    """What became of one request; times in seconds."""

    server: str
    phase: str
    number: int
    due_s: float  # its arrival, from the start of its phase
    late_s: float = 0.0  # by which it was sent later than that
    ttft_s: float = 0.0  # from arrival to the first token
    total_s: float = 0.0  # to the end of the stream
    tokens: int = 0  # of the answer
    hits: int = 0  # documents, by the answer's report; 0 for a server without documents
    encoded: int = 0
    document_tokens: int = 0  # of both
    error: str = ""  # why it counts as failed; "" for a good answer
    prompt_tokens: int = 0  # by the server's usage
    computed: int = 0  # those of them that it hadn't cached
    text: str = ""  # of the answer
    first: dict[str, float] = field(default_factory=dict)  # its first token's likeliest, where they were asked for


@dataclass(frozen=True)
class Target:
    """A server and how it is asked."""

    name: str
    url: str
    linked: bool  # it takes `documents`, and answers name them; otherwise they stand in the message
    tokens: int = 16  # of every answer, exactly
    timeout_s: float = 300.0
    on_record: Callable[[RequestRecord], Any] = lambda _: None  # takes every record at once

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
        began: float | None = None
        usage: Any = None
        documents: list[dict[str, Any]] = []
        text, first = "", dict[str, float]()
        for chunk, at in chunks:
            usage = usage or chunk.usage
            if not documents and (report := getattr(chunk, "comb", None)):
                documents = report["documents"]
            for choice in chunk.choices:
                # the chunk with the role only comes with the first token too, but the token is what counts
                if began is None and choice.delta.role is None:
                    began = at
                text += getattr(choice.delta, "content", None) or ""
                if not first and (logprobs := getattr(choice, "logprobs", None)) is not None and logprobs.content:
                    first = {each.token: each.logprob for each in logprobs.content[0].top_logprobs}
        tokens, prompt = (0, 0) if usage is None else (usage.completion_tokens, getattr(usage, "prompt_tokens", 0) or 0)
        cached = getattr(getattr(usage, "prompt_tokens_details", None), "cached_tokens", 0) or 0
        named, wanted = [each["id"] for each in documents], [document.id for document in ask.documents]
        if began is None or tokens != self.tokens:
            error = error or f"{tokens} tokens instead of {self.tokens}: the stream broke off, or ended early"
        elif self.linked and named != wanted:
            error = error or f"its report names the documents {named} instead of {wanted}"
        states = [each["state"] for each in documents]
        new = states.count("encoded") + states.count("compiled")  # by an adapter's encoder, or by a plain model
        return RequestRecord(
            self.name, phase, ask.number, due, late_s=sent - due, ttft_s=(now if began is None else began) - due,
            total_s=now - due, tokens=tokens, hits=states.count("hit"), encoded=new,
            document_tokens=sum(each["tokens"] for each in documents), error=error, prompt_tokens=prompt,
            computed=prompt - cached, text=text, first=first,
        )  # fmt: skip

    def run_closed(self, phase: str, asks: Iterable[Asked], clients: int, *, pause: float = 0.0) -> list[RequestRecord]:
        """`clients` at once, each sends its next request `pause` seconds after its last answer; ready when all are."""
        shared = ((ask, None) for ask in asks)  # who is free takes the next one
        return asyncio.run(self._run(phase, [shared] * clients, pause))

    def run_open(self, phase: str, asks: Iterable[Asked], arrivals: Sequence[float]) -> list[RequestRecord]:
        """Each request at its arrival, in seconds from now, however many are unanswered."""
        return asyncio.run(self._run(phase, [iter([each]) for each in zip(asks, arrivals, strict=True)]))

    async def _run(
        self, phase: str, clients: Sequence[Iterator[tuple[Asked, float | None]]], pause: float = 0.0
    ) -> list[RequestRecord]:
        """The records of all clients, each with its requests and when they are due (None: at once).

        Raises RuntimeError when `GIVE_UP` requests in a row have failed; the others are cancelled.
        """
        import httpx
        from openai import AsyncOpenAI, OpenAIError

        records: list[RequestRecord] = []
        start = time.perf_counter()

        async def client(openai: AsyncOpenAI, asks: Iterator[tuple[Asked, float | None]]) -> None:
            for ask, arrival in asks:
                due = time.perf_counter() - start if arrival is None else arrival
                await asyncio.sleep(max(0.0, due - (time.perf_counter() - start)))
                sent, error, chunks = time.perf_counter() - start, "", list[tuple[Any, float]]()
                try:
                    async with asyncio.timeout(self.timeout_s):
                        async for chunk in await openai.chat.completions.create(**self.body(ask)):
                            chunks.append((chunk, time.perf_counter() - start))
                except TimeoutError:
                    error = f"no whole answer within {self.timeout_s:g} s"
                except (OpenAIError, httpx.HTTPError, ValueError) as failure:
                    error = f"{type(failure).__name__}: {str(failure)[:300]}"
                records.append(self.record(phase, ask, chunks, due, sent, time.perf_counter() - start, error))
                self.on_record(records[-1])
                last = records[-GIVE_UP:]
                if len(last) == GIVE_UP and all(record.error for record in last):
                    raise RuntimeError(f"{GIVE_UP} requests in a row have failed, the last with: {last[-1].error}")
                await asyncio.sleep(pause)

        # no limit of connections: it would be a queue in front of the server, out of the server's sight
        # nor a time-out: the target has one
        http = httpx.AsyncClient(limits=httpx.Limits(), timeout=None)
        address = f"{self.url}/v1"
        async with AsyncOpenAI(base_url=address, api_key="none", max_retries=0, http_client=http) as openai:
            try:
                async with asyncio.TaskGroup() as group:
                    for asks in clients:
                        group.create_task(client(openai, asks))
            except ExceptionGroup as failures:
                raise failures.exceptions[0] from None
        return records
