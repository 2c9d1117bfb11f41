"""What a request holds of the pool, and the errors for what it can't have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from comb_serving.encoding.protocol import MADE
from comb_serving.manager.wait_queue import NotYetError
from comb_serving.pool.capability import PoolHandle


class PoolFullError(NotYetError):
    """No room: what is in the pool is in use or pinned. Worth trying again once requests have ended."""


class PoolPinnedError(RuntimeError):
    """No room, and no request that ends will give any: pinned documents are in the way."""


class TenantQuotaError(RuntimeError):
    """More of the pool than one tenant may hold; nobody else is affected."""


class DocumentsTooLargeError(ValueError):
    """Documents of one request that the encoder or the whole pool can't take; trying again won't help."""


@dataclass(frozen=True)
class WantedDocument:
    """A document of a request: its key (`PICManager.keys`), its token ids, and who asks."""

    key: str
    token_ids: tuple[int, ...]
    tenant: str = ""


@dataclass(frozen=True)
class LeasedDocument:
    """A document of a lease.

    Args:
        tier: where it came from: "pool" (it was there, or on its way there for someone else), "host", "disk", or
            one of `MADE`.
    """

    key: str
    handle: PoolHandle
    tier: str

    @property
    def state(self) -> str:
        """What became of it, in answers: what came from a lower tier was computed for an earlier request."""
        return self.tier if self.tier in MADE else "hit"


class Lease:
    """The documents of one request, in order, which stay in the pool until `release`. Release it in `finally`.

    Args:
        give_back: drops the references.
        room_seconds, encode_seconds: how long it waited for room in the pool, and for encoders.
    """

    def __init__(
        self,
        documents: Sequence[LeasedDocument],
        give_back: Callable[[], None],
        *,
        room_seconds: float,
        encode_seconds: float,
    ) -> None:
        self.documents = tuple(documents)
        self.room_seconds, self.encode_seconds = room_seconds, encode_seconds
        self._give_back: Callable[[], None] | None = give_back

    @property
    def handles(self) -> list[PoolHandle]:
        """What the worker needs."""
        return [document.handle for document in self.documents]

    def release(self) -> None:
        """Drops the references; a second call does nothing."""
        give_back, self._give_back = self._give_back, None
        if give_back is not None:
            give_back()
