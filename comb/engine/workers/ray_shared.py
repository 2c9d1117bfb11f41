"""PICaches that any engine of a Ray cluster has had compiled, for all others: fetched, not compiled again.

An index in a named actor says which object of Ray's store holds a document's PICache; the bytes stay on the node where
they were made, and go from there to the node that asks. An object ends with the process that asked for it first: who
then finds nothing compiles, and nobody fails.

Source: HYPIC sec. 4.4 and 5 (segments' states are pulled from the instance that has them).
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from comb.engine.workers.executor import SharedReplies
from comb.engine.workers.worker import Reply

logger = logging.getLogger(__name__)


class ReplyIndex:
    """What runs in the named actor: references by key, the least recently used out first beyond `most_bytes`."""

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._kept: OrderedDict[str, tuple[list[Any], int]] = OrderedDict()

    def find(self, keys: Sequence[str]) -> list[list[Any]]:
        """A list per key, with the reference or empty: bare references would be fetched for the caller."""
        for key in keys:
            if key in self._kept:
                self._kept.move_to_end(key)
        return [self._kept[key][0] if key in self._kept else [] for key in keys]

    def add(self, key: str, reference: list[Any], nbytes: int) -> None:
        """Keeps a reference; what it stands for stays in Ray's store as long."""
        self._kept[key] = reference, nbytes
        while sum(size for _, size in self._kept.values()) > self._most_bytes:
            self._kept.popitem(last=False)

    def drop(self, keys: Sequence[str]) -> None:
        """Forgets what couldn't be fetched."""
        for key in keys:
            self._kept.pop(key, None)


class RayShared(SharedReplies):
    """The index called `name`, made by whoever comes first; it outlives them.

    Args:
        most_bytes: of PICaches that the index keeps in Ray's object stores.
        timeout_s: within which the index must answer and all fetches be done; what is late is compiled.
    """

    def __init__(self, ray: Any, name: str, most_bytes: int, timeout_s: float = 30.0) -> None:
        self._ray, self._timeout_s = ray, timeout_s
        options = {"name": name, "namespace": "comb", "lifetime": "detached", "get_if_exists": True, "num_cpus": 0}
        self._index: Any = ray.remote(ReplyIndex).options(**options).remote(most_bytes)

    def find(self, keys: Sequence[str]) -> Mapping[str, Reply]:
        """What is there of `keys`; whatever is lost on the way isn't."""
        try:
            held = self._ray.get(self._index.find.remote(keys), timeout=self._timeout_s)
        except self._ray.exceptions.RayError as error:
            logger.warning("the index of shared PICaches doesn't answer (%s): compiling", type(error).__name__)
            return {}
        there = {key: references[0] for key, references in zip(keys, held, strict=True) if references}
        if not there:
            return {}
        fetched = list(set(there.values()))
        self._ray.wait(fetched, num_returns=len(fetched), timeout=self._timeout_s)
        found: dict[str, Reply] = {}
        for key, reference in there.items():
            try:
                found[key] = self._ray.get(reference, timeout=1.0)
            except self._ray.exceptions.RayError as error:  # its owner or its node is gone, or late
                logger.warning("a shared PICache is lost (%s): compiling it", type(error).__name__)
        if lost := [key for key in there if key not in found]:
            self._index.drop.remote(lost)
        return found

    def add(self, key: str, reference: Any, nbytes: int) -> None:
        """Says where a PICache is, without waiting; an index that is gone hears nothing."""
        self._index.add.remote(key, [reference], nbytes)
