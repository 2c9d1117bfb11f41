"""What clients have registered under /v1/documents, in an actor of its own that outlives ingress and replicas."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

Key = tuple[str, str]  # the sender (`sender_of`), and the document's id


class Registrations:
    """By sender and id. Every change has a number, so that replicas can ask for what they have missed."""

    def __init__(self) -> None:
        self._known: dict[Key, tuple[int, dict[str, Any], float | None]] = {}
        self._changes = 0

    def put(self, key: Key, fields: Mapping[str, Any] | None) -> None:
        """Remembers the body of a POST /v1/documents, or forgets it (None)."""
        self._changes += 1
        self._known.pop(key, None)
        if fields is not None:
            ttl = fields.get("ttl_s")
            expires_at = None if ttl is None else time.time() + ttl  # since the epoch: the same on every machine
            self._known[key] = self._changes, dict(fields), expires_at

    def missing(self, told: Mapping[Key, int]) -> tuple[dict[Key, tuple[int, bytes]], list[Key]]:
        """What a replica must be told.

        Args:
            told: by key, the number of the change that the replica has heard of.

        Returns:
            Documents to register, with the numbers of their changes and the time to live that is left; and documents
            to delete.
        """
        now = time.time()
        self._known = {key: one for key, one in self._known.items() if one[2] is None or one[2] > now}
        new = {}
        for key, (number, fields, expires_at) in self._known.items():
            if told.get(key) != number:
                left = {} if expires_at is None else {"ttl_s": expires_at - now}
                new[key] = number, json.dumps({**fields, **left}).encode()
        return new, [key for key in told if key not in self._known]


def registrations_of(application: str) -> Any:
    """The actor of a Ray Serve application, made at first use; it stays until Ray ends or somebody kills it."""
    import ray

    options = {"name": f"comb-registrations-{application}", "namespace": "comb", "lifetime": "detached"}
    return ray.remote(Registrations).options(num_cpus=0, get_if_exists=True, **options).remote()
