"""Adds to vLLM's answers what became of the documents: to the JSON object, or to the first chunk of a stream."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from comb_serving.api.body import Message, Send
from comb_serving.api.preprocessor import PreprocessedRequest
from comb_serving.api.request_error import RequestError
from comb_serving.api.routes import COHERE, MESSAGES, RESPONSES
from comb_serving.manager.leases import Lease


def report(prepared: PreprocessedRequest, lease: Lease | None) -> dict[str, Any]:
    """The `comb` object of an answer."""
    documents = []
    for place, segment in enumerate(prepared.segments):
        document: dict[str, Any] = {"id": segment.id, "state": "inlined", "tokens": len(segment.token_ids)}
        if lease is not None:
            held = lease.documents[place]
            document["state"] = held.state
            if held.state == "hit":
                document["tier"] = held.tier
        documents.append(document)
    return {**prepared.about, "documents": documents}


def error_events(path: str, error: RequestError) -> bytes:
    """The end of a stream that breaks off, as clients of each way to ask expect it; blank lines end what was begun."""
    if path in (MESSAGES, RESPONSES, COHERE):
        body = json.dumps({"type": "error", **json.loads(error.body)})
        return f"\n\nevent: error\ndata: {body}\n\n".encode()
    return b"\n\ndata: " + error.body + b"\n\ndata: [DONE]\n\n"


class ResponseWriter:
    """A `send` for vLLM that passes its answer on with the report in it.

    Args:
        comb: the report; asked for once, when vLLM answers.
        tokens: of documents, which count as prompt tokens; cached: those of them that were hits.
        counted: whether vLLM counts them already, as they stand in the prompt: there it takes all in front of the query
            for cached, and the report knows better.
    """

    def __init__(
        self, send: Send, comb: Callable[[], dict[str, Any]], tokens: int = 0, cached: int = 0, *, counted: bool = False
    ) -> None:
        self.send, self.comb, self.tokens, self.cached, self.counted = send, comb, tokens, cached, counted
        self.finished = False
        self._start: Message | None = None
        self._streams = self._passes = False
        self._body = bytearray()
        self._reported = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            headers = {name.lower(): value for name, value in message.get("headers", ())}
            kind = headers.get(b"content-type", b"")
            self._streams = kind.startswith(b"text/event-stream")
            self._passes = (
                message["status"] != 200
                or b"content-encoding" in headers
                or not (self._streams or kind.startswith(b"application/json"))
            )
            if self._passes or self._streams:
                await self.send(message)
            else:
                self._start = message
        elif self._passes or message["type"] != "http.response.body":
            self.finished |= message["type"] == "http.response.body" and not message.get("more_body", False)
            await self.send(message)
        elif self._streams:
            await self._stream(message)
        else:
            self._body += message.get("body", b"")
            if not message.get("more_body", False):
                self.finished = True
                await self._whole()

    async def _whole(self) -> None:
        assert self._start is not None
        body = bytes(self._body)
        try:
            payload = json.loads(body)
        except ValueError:
            payload = None
        if isinstance(payload, dict):
            self._amend_usage(payload)
            body = json.dumps({**payload, "comb": self.comb()}, ensure_ascii=False).encode("utf-8", "surrogatepass")
        headers = [(name, value) for name, value in self._start.get("headers", ()) if name.lower() != b"content-length"]
        await self.send({**self._start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
        await self.send({"type": "http.response.body", "body": body})

    async def _stream(self, message: Message) -> None:
        self._body += message.get("body", b"")
        more = message.get("more_body", False)
        *events, rest = bytes(self._body).split(b"\n\n")
        self._body = bytearray(rest)
        out = b"".join(self._event(event) + b"\n\n" for event in events)
        if not more:
            self.finished = True
            out += rest
            self._body.clear()
        if out or not more:
            await self.send({"type": "http.response.body", "body": out, "more_body": more})

    def _event(self, event: bytes) -> bytes:
        """The event with what is ours in it: the report in the first one, our tokens where there is a usage."""
        # some streams name their events in a line before it; what an answer says may hold the word, too
        name, found, data = (b"\n" + event).partition(b"\ndata:")
        if not found or b"\ndata:" in data or (self._reported and b'"usage"' not in data):
            return event
        try:
            payload = json.loads(data)
        except ValueError:  # [DONE]
            return event
        if not isinstance(payload, dict):
            return event
        self._amend_usage(payload)
        if not self._reported and "error" not in payload:
            self._reported, payload = True, {**payload, "comb": self.comb()}
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        return (name + b"\ndata: ").removeprefix(b"\n") + text.encode("utf-8", "surrogatepass")

    def _amend_usage(self, payload: dict[str, Any]) -> None:
        """Counts documents in a usage, which the Responses and Messages APIs may have one level deeper."""
        for holder in (payload, payload.get("response"), payload.get("message")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict) and self.tokens:
                self._amend(usage)

    def _amend(self, usage: dict[str, Any]) -> None:
        name = "prompt" if "prompt_tokens" in usage else "input"
        if not isinstance(usage.get(f"{name}_tokens"), int):
            return
        report = self.comb() if self.counted else {}
        known = report["head_tokens"] + report["linked_tokens"] if "linked_tokens" in report else None
        if "total_tokens" not in usage:  # the Messages API counts apart what was cached, and what is from now on
            read, new = usage.get("cache_read_input_tokens") or 0, self.tokens - self.cached
            if known is not None and read > known:
                usage["input_tokens"] += read - known
                read = known
            made = min(read, new) if self.counted else new
            usage["cache_read_input_tokens"] = read - made if self.counted else read + self.cached
            usage["cache_creation_input_tokens"] = (usage.get("cache_creation_input_tokens") or 0) + made
            return
        if self.counted:
            details = usage.get(f"{name}_tokens_details") or {}
            if known is not None and (details.get("cached_tokens") or 0) > known:
                usage[f"{name}_tokens_details"] = {**details, "cached_tokens": known}
            return
        usage[f"{name}_tokens"] += self.tokens
        if isinstance(usage["total_tokens"], int):
            usage["total_tokens"] += self.tokens
        details = usage.get(f"{name}_tokens_details") or {}
        cached = (details.get("cached_tokens") or 0) + self.cached
        usage[f"{name}_tokens_details"] = {**details, "cached_tokens": cached}
