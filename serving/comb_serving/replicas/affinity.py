"""Which replica a request should go to, from its documents alone: rendezvous hashing, with a bound on load.

Every replica ranks itself for a document by a hash of both (highest random weight; Thaler and Ravishankar 1998), and
the highest is its home: when a replica joins or leaves, one document in n moves. The bound is that of consistent
hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class RoutedDocument:
    """A document of a request: a name for its content, and its size in bytes."""

    key: str
    size: int


def documents_of(body: Any, sender: str) -> list[RoutedDocument]:
    """The documents of a request's body: listed ones, and those that messages name by id. Two senders share none."""
    if not isinstance(body, Mapping):
        return []
    found = list(_list(body.get("documents")))
    for message in [*_list(body.get("messages")), *_list(body.get("input"))]:
        parts = _list(message.get("content")) if isinstance(message, Mapping) else []
        found += [part for part in parts if isinstance(part, Mapping) and part.get("type") == "document"]
    documents = []
    for item in found:
        content = {"text": item} if isinstance(item, str) else item
        if isinstance(content, Mapping):
            # what it is called plays no part, unless that is all there is: a registered one, wherever it is named
            named = {name: value for name, value in content.items() if name not in ("id", "type")}
            content = named or [content.get("id")]
        data = json.dumps([sender, content], sort_keys=True).encode()
        documents.append(RoutedDocument(hashlib.sha256(data).hexdigest(), len(data)))
    return documents


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def weight(key: str, replica: str) -> int:
    """How much a replica wants a document, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest())


def home(key: str, replicas: Collection[str]) -> str:
    """The replica that wants a document most. Raises ValueError without any."""
    return max(replicas, key=lambda replica: (weight(key, replica), replica))


def preferred(documents: Sequence[RoutedDocument], replicas: Collection[str]) -> str | None:
    """The replica at which most of a request's document bytes are at home, in whatever order; None without documents.

    Most bytes, since what is missing at a replica has to be encoded there and that costs by length.
    """
    if not documents or not replicas:
        return None
    unique = {document.key: document for document in documents}
    held = dict.fromkeys(replicas, 0)
    for document in unique.values():
        held[home(document.key, replicas)] += document.size
    whole = "".join(sorted(unique))
    return max(replicas, key=lambda replica: (held[replica], weight(whole, replica), replica))


def limit(loads: Mapping[str, int], factor: float, floor: int) -> int:
    """Requests that a preferred replica may have, the new one included, before others get some of its own."""
    # never less than what a batching server takes without anybody waiting
    return max(floor, math.ceil(factor * (sum(loads.values()) + 1) / len(loads)))


def ranked(
    documents: Sequence[RoutedDocument], loads: Mapping[str, int], *, factor: float = 1.25, floor: int = 8
) -> list[str]:
    """All replicas, with `loads` of requests under way: the one for a request with these documents first.

    That is the preferred one as long as `limit` allows it, otherwise the least loaded; among equals the one that wants
    the documents most, so that what spills together spills to one place.
    """
    wanted = preferred(documents, loads)
    free = wanted is not None and loads[wanted] < limit(loads, factor, floor)
    whole = "".join(sorted(document.key for document in documents))
    return sorted(loads, key=lambda name: (not (free and name == wanted), loads[name], -weight(whole, name), name))
