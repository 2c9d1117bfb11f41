"""What clients have registered under /v1/documents, remembered so that a replica that starts again gets it, too."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, str]  # the sender's Authorization header, and the document's id


@dataclass(frozen=True, eq=False)
class Registration:
    """A body of POST /v1/documents that replicas have taken, and when it expires."""

    fields: dict[str, Any]
    expires_at: float | None

    def body(self, now: float) -> bytes:
        """The body for another replica, with the time to live that is left."""
        left = {} if self.expires_at is None else {"ttl_s": max(self.expires_at - now, 1e-3)}
        return json.dumps({**self.fields, **left}).encode()


@dataclass
class Registrations:
    """By sender and id; in memory, so a router that starts again knows none."""

    clock: Callable[[], float] = time.monotonic
    _known: dict[Key, Registration] = field(default_factory=dict)

    def made(self, authorization: str, body: bytes, answer: bytes) -> tuple[Key, Registration]:
        """What a replica has taken; its answer says the id."""
        given, name = json.loads(body), str(json.loads(answer)["id"])
        ttl = given.get("ttl_s")
        expires = None if ttl is None else self.clock() + ttl
        return (authorization, name), Registration({**given, "id": name}, expires)

    def put(self, key: Key, one: Registration | None) -> None:
        """Remembers one, or forgets it (None)."""
        self._known.pop(key, None)
        if one is not None:
            self._known[key] = one

    def current(self) -> dict[Key, Registration]:
        """All that haven't expired."""
        now = self.clock()
        self._known = {k: one for k, one in self._known.items() if one.expires_at is None or one.expires_at > now}
        return dict(self._known)
