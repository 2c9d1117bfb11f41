"""One log line per request with documents: never a document's text, never a key."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from comb_serving.api.body import Scope, header
from comb_serving.api.preprocessor import PreprocessedRequest
from comb_serving.api.response import report
from comb_serving.linking.reports import LinkReport
from comb_serving.manager.leases import Lease

logger = logging.getLogger(__name__)

LEFT = 499  # as other servers write for a client that left before its answer was whole
HEADER = "x-request-id"


@dataclass
class RequestLogEntry:
    """What is known of a request by its end.

    Args:
        id: from the header X-Request-Id, else a new one; vLLM's own id of the request ends with it.
    """

    path: str
    id: str = field(default_factory=lambda: uuid.uuid4().hex)
    tenant: str = ""
    documents: bool = False
    prepared: PreprocessedRequest | None = None
    lease: Lease | None = None
    link: LinkReport | None = None
    status: int | None = None
    error: str | None = None
    started: float = field(default_factory=time.monotonic)

    def name(self, scope: Scope) -> None:
        """Takes the client's name for the request, if it has one. Raises RequestError (400) for two of them."""
        self.id = (header(scope, HEADER) or self.id)[:128]

    def fields(self) -> dict[str, Any]:
        """The line as values; seconds are from reading the body to the last byte of the answer."""
        states: Counter[str] = Counter()
        tokens = 0
        if self.prepared is not None and (self.lease is not None or not self.prepared.linked):
            for document in report(self.prepared, self.lease)["documents"]:
                states[document["state"]] += 1
                tokens += document["tokens"]
        waited = (0.0, 0.0) if self.lease is None else (self.lease.room_seconds, self.lease.encode_seconds)
        return {
            "request_id": self.id,
            "path": self.path,
            "tenant": self.tenant[:8] or None,
            "status": self.status,
            "error": self.error,
            **({} if self.prepared is None else self.prepared.about),
            **({} if self.link is None else asdict(self.link)),
            "documents": dict(sorted(states.items())),
            "document_tokens": tokens,
            "room_seconds": round(waited[0], 6),
            "encode_seconds": round(waited[1], 6),
            "seconds": round(time.monotonic() - self.started, 6),
        }

    def log(self) -> None:
        """Writes the line, if the request had documents."""
        if self.documents or (self.prepared is not None and self.prepared.segments):
            fields = self.fields()
            logger.info(
                "request %s",
                " ".join(f"{name}={_text(value)}" for name, value in fields.items()),
                extra={"comb": fields},
            )


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ",".join(f"{name}:{count}" for name, count in value.items()) or "-"
    # a header's value is the client's: quoted, so that it can't look like another field
    return "-" if value is None else json.dumps(value) if isinstance(value, str) else str(value)
