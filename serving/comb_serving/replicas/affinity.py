"""Which replica a request should go to, from its documents alone: rendezvous hashing, with a bound on load.

Every replica ranks itself for a document by a hash of both (highest random weight; Thaler and Ravishankar 1998). The
document's home is the highest. When a replica joins or leaves, only documents that it wins or has won move, one in n.
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
    """A document of a request: a name for its content, and its size in bytes of text or ids."""

    key: str
    size: int


def documents_of(body: Any, sender: str) -> list[RoutedDocument]:
    """The documents of a request's body: listed ones, and those that messages name by id.

    What isn't a document is left out: the replica that gets the request says what is wrong with it.

    Args:
        sender: two senders share no document, so theirs needn't be in the same place.
    """
    if not isinstance(body, Mapping):
        return []
    found = [_document(item, sender) for item in _list(body.get("documents"))]
    for message in _list(body.get("messages")):
        content = message.get("content") if isinstance(message, Mapping) else None
        named = [item for item in _list(content) if isinstance(item, Mapping)]
        found += [_document({"id": item.get("id")}, sender) for item in named if item.get("type") == "document"]
    return [document for document in found if document is not None]


def _document(item: Any, sender: str) -> RoutedDocument | None:
    if isinstance(item, str):
        item = {"text": item}
    if not isinstance(item, Mapping):
        return None
    title, text, ids = (item.get(name) for name in ("title", "text", "token_ids"))
    if text is None and ids is None:
        # a registered one: its content is not known here, but the same name is the same document
        content, size = ["registered", item.get("id")], 1
    else:
        content, size = [title, text, ids], len(text) if isinstance(text, str) else 4 * len(_list(ids))
    try:
        data = json.dumps([sender, content]).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return RoutedDocument(hashlib.sha256(data).hexdigest(), size)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def weight(key: str, replica: str) -> int:
    """How much a replica wants a document, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest())


def home(key: str, replicas: Collection[str]) -> str:
    """The replica that wants a document most. Raises ValueError without any."""
    return max(replicas, key=lambda replica: (weight(key, replica), replica))


def preferred(documents: Sequence[RoutedDocument], replicas: Collection[str]) -> str | None:
    """The replica at which most of a request's document bytes are at home; None without documents.

    Most bytes, since what is missing at a replica has to be encoded there and that costs by length. Order doesn't
    matter: a request for the same documents in another order goes to the same place.
    """
    if not documents or not replicas:
        return None
    unique = {document.key: document for document in documents}
    held = dict.fromkeys(replicas, 0)
    for document in unique.values():
        held[home(document.key, replicas)] += document.size
    whole = "".join(sorted(unique))
    return max(replicas, key=lambda replica: (held[replica], weight(whole, replica), replica))


@dataclass(frozen=True)
class LoadBound:
    """How many requests a preferred replica may have under way before others get some of its own.

    Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): `factor` times the mean, but never
    less than `floor`, which a batching server takes without anybody waiting.
    """

    factor: float = 1.25
    floor: int = 8

    def __post_init__(self) -> None:
        if self.factor < 1 or self.floor < 1:
            raise ValueError(f"a bound has a factor >= 1 and a floor >= 1, not {self.factor} and {self.floor}")

    def limit(self, loads: Mapping[str, int]) -> int:
        """Requests that one replica may have, the new one included."""
        return max(self.floor, math.ceil(self.factor * (sum(loads.values()) + 1) / len(loads)))


def ranked(documents: Sequence[RoutedDocument], loads: Mapping[str, int], bound: LoadBound) -> list[str]:
    """All replicas, the one for a request with these documents first.

    That is the preferred one as long as the bound allows it, otherwise the least loaded; among equals the one that
    wants the documents most, so that what spills together spills to one place.

    Args:
        loads: requests under way, of every replica that is up.
    """
    wanted = preferred(documents, loads)
    free = wanted is not None and loads[wanted] < bound.limit(loads)
    whole = "".join(sorted(document.key for document in documents))
    return sorted(
        loads, key=lambda replica: (not (free and replica == wanted), loads[replica], -weight(whole, replica), replica)
    )
