"""What clients have registered under /v1/documents, in an actor of its own that outlives router and replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Key = tuple[str, str]  # the sender's Authorization header, and the document's id


@dataclass(frozen=True)
class Registration:
    """A body of POST /v1/documents that a replica has taken.

    Args:
        expires_at: in seconds since the epoch, the same on every machine; None: never.
    """

    fields: dict[str, Any]
    expires_at: float | None

    @classmethod
    def of(cls, body: bytes, answer: bytes) -> tuple[str, Registration]:
        """Id and registration, from a replica's answer to a request."""
        given, name = json.loads(body), str(json.loads(answer)["id"])
        ttl = given.get("ttl_s")
        return name, cls({**given, "id": name}, None if ttl is None else time.time() + ttl)

    def body(self) -> bytes:
        """The body for another replica, with the time to live that is left."""
        left = {} if self.expires_at is None else {"ttl_s": max(self.expires_at - time.time(), 1e-3)}
        return json.dumps({**self.fields, **left}).encode()


@dataclass
class Registrations:
    """By sender and id. Every change has a number, so that replicas can ask for what they have missed."""

    _known: dict[Key, tuple[int, Registration]] = field(default_factory=dict)
    _changes: int = 0

    def put(self, key: Key, one: Registration | None) -> Registration | None:
        """Remembers one, or forgets it (None); returns what was there before."""
        self._changes += 1
        _, before = self._known.pop(key, (0, None))
        if one is not None:
            self._known[key] = self._changes, one
        return before

    def changes(self) -> int:
        """How many there have been."""
        return self._changes

    def missing(self, told: Mapping[Key, int]) -> tuple[int, dict[Key, tuple[int, bytes]], list[Key]]:
        """What a replica must be told.

        Args:
            told: by key, the number of the change that the replica has heard of.

        Returns:
            How many changes there have been; documents to register, with their numbers; and documents to delete.
        """
        now = time.time()
        for key, (_, one) in list(self._known.items()):
            if one.expires_at is not None and one.expires_at <= now:
                del self._known[key]  # servers count the time themselves
        new = {key: (number, one.body()) for key, (number, one) in self._known.items() if told.get(key) != number}
        return self._changes, new, [key for key in told if key not in self._known]


def registrations_of(application: str) -> Any:
    """The actor of a Ray Serve application, made at first use; it stays until Ray ends or somebody kills it."""
    import ray

    options = {"name": f"comb-registrations-{application}", "namespace": "comb", "lifetime": "detached"}
    return ray.remote(Registrations).options(num_cpus=0, get_if_exists=True, **options).remote()
