"""What became of a request's documents: in the answer (a JSON object, or the first chunk of a stream) and the log."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from comb_serving.api.http import AnswerRewriter, RequestError, Send
from comb_serving.api.preprocessor import PreprocessedRequest
from comb_serving.api.routes import COHERE, MESSAGES, RESPONSES, error_body
from comb_serving.manager.leases import Lease
from comb_serving.pool.capability import LinkReport

logger = logging.getLogger(__name__)

LEFT = 499  # as other servers write for a client that left before its answer was whole


def report(prepared: PreprocessedRequest, lease: Lease | None, link: LinkReport | None = None) -> dict[str, Any]:
    """The `comb` object of an answer; `link` is what the engine has said of it."""
    documents = []
    for place, segment in enumerate(prepared.segments):
        document: dict[str, Any] = {"id": segment.id, "state": "inlined", "tokens": len(segment.token_ids)}
        if lease is not None:
            held = lease.documents[place]
            document["state"] = held.state
            if held.state == "hit":
                document["tier"] = held.tier
        documents.append(document)
    return {**prepared.about, "documents": documents, **({} if link is None else link.said)}


def error_events(path: str, error: RequestError) -> bytes:
    """The end of a stream that breaks off, as clients of each way to ask expect it; blank lines end what was begun."""
    if path in (MESSAGES, RESPONSES, COHERE):
        body = json.dumps({"type": "error", **json.loads(error_body(path, error))})
        return f"\n\nevent: error\ndata: {body}\n\n".encode()
    return b"\n\ndata: " + error_body(path, error) + b"\n\ndata: [DONE]\n\n"


def cached_and_made(link: LinkReport, lease: Lease) -> tuple[int, int]:
    """Prompt tokens that were there before the request, and those that were compiled for it and linked."""
    linked = zip(link.linked_of, lease.documents, strict=False)
    made = sum(tokens for tokens, document in linked if document.state != "hit")
    return link.prefix_tokens + link.linked_tokens - made, made


class ResponseWriter(AnswerRewriter):
    """A `send` for vLLM that passes its answer on with the report in it.

    Args:
        comb: the report, when vLLM answers.
        tokens: of documents, which count as prompt tokens; cached: those of them that were hits.
        prompts: that have them all.
        counted: where vLLM counts them already, as they stand in the prompt: there it takes all in front of the query
            for cached, or doesn't say, and this knows better (`cached_and_made`; None of several prompts).
    """

    def __init__(
        self, send: Send, comb: Callable[[], dict[str, Any]], tokens: int = 0, cached: int = 0, *, prompts: int = 1,
        counted: Callable[[], tuple[int, int] | None] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(send)
        self.comb, self.tokens, self.cached, self.prompts, self.counted = comb, tokens, cached, prompts, counted
        self._reported = False

    def whole(self, body: bytes) -> bytes:
        payload = self._amended(body)
        if payload is None:
            return body
        return json.dumps({**payload, "comb": self.comb()}, ensure_ascii=False).encode("utf-8", "surrogatepass")

    def event(self, event: bytes) -> bytes:
        """The report is in the first one, our tokens where there is a usage."""
        # some streams name their events in a line before it; what an answer says may hold the word, too
        name, found, data = (b"\n" + event).partition(b"\ndata:")
        if not found or b"\ndata:" in data or (self._reported and b'"usage"' not in data):
            return event + b"\n\n"
        payload = self._amended(data, streamed=True)
        if payload is None:  # [DONE]
            return event + b"\n\n"
        if not self._reported and "error" not in payload:
            self._reported, payload = True, {**payload, "comb": self.comb()}
        text = json.dumps(payload, ensure_ascii=False, separators=(",", ":"))
        return (name + b"\ndata: ").removeprefix(b"\n") + text.encode("utf-8", "surrogatepass") + b"\n\n"

    def _amended(self, data: bytes, *, streamed: bool = False) -> dict[str, Any] | None:
        """A JSON object with documents in its usage; None for anything else."""
        try:
            payload = json.loads(data)
        except ValueError:
            return None
        if not isinstance(payload, dict):
            return None
        # beside a piece of an answer it is of that answer's prompt alone
        prompts = 1 if streamed and payload.get("choices") else self.prompts
        # the Responses and Messages APIs may have it one level deeper
        for holder in (payload, payload.get("response"), payload.get("message")):
            usage = holder.get("usage") if isinstance(holder, dict) else None
            if isinstance(usage, dict) and self.tokens:
                self._amend(usage, prompts)
        return payload

    def _amend(self, usage: dict[str, Any], prompts: int) -> None:
        name = "prompt" if "prompt_tokens" in usage else "input"
        if not isinstance(usage.get(f"{name}_tokens"), int):
            return
        details = usage.get(f"{name}_tokens_details") or {}
        told = details.get("cached_tokens") or usage.get("cache_read_input_tokens") or 0
        read, made = told + prompts * self.cached, prompts * (self.tokens - self.cached)
        if self.counted:
            if (counted := self.counted()) is None:
                return
            read, made = counted
        if "total_tokens" not in usage:  # the Messages API counts apart what was cached, and what is from now on
            usage["cache_read_input_tokens"] = read
            usage["cache_creation_input_tokens"] = (usage.get("cache_creation_input_tokens") or 0) + made
            if self.counted:
                usage["input_tokens"] += told - read - made
            return
        usage[f"{name}_tokens_details"] = {**details, "cached_tokens": read}
        if not self.counted:
            usage[f"{name}_tokens"] += prompts * self.tokens
            if isinstance(usage["total_tokens"], int):
                usage["total_tokens"] += prompts * self.tokens


@dataclass
class RequestLogEntry:
    """What is known of a request by its end: one line for each with documents, never a document's text, never a key."""

    path: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)  # or the client's; vLLM's own id ends with it
    tenant: str = ""
    documents: bool = False
    prepared: PreprocessedRequest | None = None
    lease: Lease | None = None
    link: LinkReport | None = None
    status: int | None = None
    error: str | None = None
    started: float = field(default_factory=time.monotonic)

    def log(self) -> None:
        """Writes the line, if the request had documents; seconds are from its head to the last byte of the answer."""
        if not self.documents and (self.prepared is None or not self.prepared.segments):
            return
        states, tokens = Counter[str](), 0
        if self.prepared is not None and (self.lease is not None or not self.prepared.linked):
            for document in report(self.prepared, self.lease)["documents"]:
                states[document["state"]] += 1
                tokens += document["tokens"]
        fields = {
            "request_id": self.id,
            "path": self.path,
            "tenant": self.tenant[:8] or None,
            "status": self.status,
            "error": self.error,
            **({} if self.prepared is None else self.prepared.about),
            **({} if self.link is None else self.link.said),
            "documents": dict(sorted(states.items())),
            "document_tokens": tokens,
            "room_seconds": round(0.0 if self.lease is None else self.lease.room_seconds, 6),
            "encode_seconds": round(0.0 if self.lease is None else self.lease.encode_seconds, 6),
            "seconds": round(time.monotonic() - self.started, 6),
        }
        # a header's value is the client's: quoted, it can't look like another field
        logger.info("request %s", json.dumps(fields))
