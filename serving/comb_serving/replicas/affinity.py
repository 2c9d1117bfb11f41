"""Which replica a request should go to, from its documents alone: rendezvous hashing, with a bound on load.

Every replica ranks itself for a document by a hash of both (highest random weight; Thaler and Ravishankar 1998). The
document's home is the highest. When a replica joins or leaves, only documents that it wins or has won move, one in n.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Part:
    """A document of a request: a name for its content, and its size in bytes of text or ids."""

    key: str
    size: int


def parts_of(body: Any, tenant: str) -> list[Part]:
    """The documents of a request's body: listed ones, and those that messages name by id.

    What isn't a document is left out: the replica that gets the request says what is wrong with it.

    Args:
        tenant: the sender; two tenants share no document, so theirs needn't be in the same place.
    """
    if not isinstance(body, Mapping):
        return []
    listed, messages = body.get("documents"), body.get("messages")
    found = [_part(item, tenant) for item in _list(listed)]
    for message in _list(messages):
        content = message.get("content") if isinstance(message, Mapping) else None
        named = [item for item in _list(content) if isinstance(item, Mapping)]
        found += [_part({"id": item.get("id")}, tenant) for item in named if item.get("type") == "document"]
    return [part for part in found if part is not None]


def _part(item: Any, tenant: str) -> Part | None:
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
        data = json.dumps([tenant, content]).encode()
    except (TypeError, ValueError, RecursionError):
        return None
    return Part(hashlib.sha256(data).hexdigest(), size)


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def weight(key: str, replica: str) -> int:
    """How much a replica wants a document, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{key}\0{replica}".encode(), digest_size=8).digest())


def home(key: str, replicas: Sequence[str]) -> str:
    """The replica that wants a document most. Raises ValueError without any."""
    return max(replicas, key=lambda replica: (weight(key, replica), replica))


def preferred(parts: Sequence[Part], replicas: Sequence[str]) -> str | None:
    """The replica at which most of a request's document bytes are at home; None without documents.

    Most bytes, since what is missing at a replica has to be encoded there and that costs by length. Order doesn't
    matter: a request for the same documents in another order goes to the same place.
    """
    if not parts or not replicas:
        return None
    unique = {part.key: part for part in parts}
    held = dict.fromkeys(replicas, 0)
    for part in unique.values():
        held[home(part.key, replicas)] += part.size
    whole = "".join(sorted(unique))
    return max(replicas, key=lambda replica: (held[replica], weight(whole, replica), replica))


@dataclass(frozen=True)
class Bound:
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


def choose(parts: Sequence[Part], loads: Mapping[str, int], bound: Bound) -> tuple[str, bool]:
    """The replica for a request, and whether it isn't the one that its documents ask for (spilled).

    Args:
        loads: requests under way, of every replica that is up.

    Raises:
        ValueError: if no replica is up.
    """
    if not loads:
        raise ValueError("no replica is up")
    wanted = preferred(parts, sorted(loads))
    if wanted is not None and loads[wanted] < bound.limit(loads):
        return wanted, False
    whole = "".join(sorted(part.key for part in parts))
    # among the least loaded the one that wants it most, so that what spills together spills to one place
    least = min(loads, key=lambda replica: (loads[replica], -weight(whole, replica), replica))
    return least, wanted is not None and least != wanted
