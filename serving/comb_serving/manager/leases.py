"""What a request holds of the pool, how it waits for that, and the errors for what it can't have."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from comb_serving.encoding.protocol import MADE
from comb_serving.pool.capability import PoolHandle

Result = TypeVar("Result")


class PoolFullError(RuntimeError):
    """No room: what is in the pool is in use or pinned. Worth trying again once requests have ended."""


class PoolPinnedError(RuntimeError):
    """No room, and no request that ends will give any: pinned documents are in the way."""


class TenantQuotaError(RuntimeError):
    """More of the pool than one tenant may hold; nobody else is affected."""


class DocumentsTooLargeError(ValueError):
    """Documents of one request that the encoder or the whole pool can't take; trying again won't help."""


@dataclass(eq=False)
class _Waiter:
    since: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class WaitQueue:
    """Requests that wait for room in the pool, first come, first served.

    Only the first in line tries, whenever something has changed (`wake`), so large ones aren't overtaken. Who waits
    holds nothing but its place, so two who wait never wait for each other.
    """

    def __init__(self) -> None:
        self._waiters: deque[_Waiter] = deque()

    def __len__(self) -> int:
        return len(self._waiters)

    @property
    def longest_wait(self) -> float:
        """Seconds that the first one has waited; 0 if nobody does."""
        return asyncio.get_running_loop().time() - self._waiters[0].since if self._waiters else 0.0

    def wake(self) -> None:
        """Something may have been given back."""
        if self._waiters:
            self._waiters[0].woken.set()

    async def wait(self, attempt: Callable[[], Result]) -> Result:
        """The result of `attempt`, made when it is this one's turn, until it no longer raises PoolFullError.

        Cancelled or failed, it leaves the line to the next.
        """
        turn = _Waiter(asyncio.get_running_loop().time())
        self._waiters.append(turn)
        try:
            while True:
                if self._waiters[0] is turn:
                    with contextlib.suppress(PoolFullError):
                        return attempt()
                turn.woken.clear()  # what the attempt itself has given back has been tried
                await turn.woken.wait()
        finally:
            self._waiters.remove(turn)
            self.wake()


@dataclass(frozen=True)
class WantedDocument:
    """A document of a request: its key (`PICManager.keys`), its token ids, who asks, and the LoRA it is compiled with.

    Under another LoRA it has another key, and so has what is `exact`: a prompt's beginning, behind nothing.
    """

    key: str
    token_ids: tuple[int, ...]
    tenant: str = ""
    lora: str = ""
    exact: bool = False


@dataclass(frozen=True)
class LeasedDocument:
    key: str
    handle: PoolHandle
    tier: str  # "pool" (it was there, or on its way there for someone else), "host", "disk", or one of `MADE`

    @property
    def state(self) -> str:
        """What became of it, in answers: what came from a lower tier was computed for an earlier request."""
        return self.tier if self.tier in MADE else "hit"


@dataclass(eq=False)
class Lease:
    """The documents of one request, in order, which stay in the pool until `release`. Release it in `finally`."""

    documents: tuple[LeasedDocument, ...]
    give_back: list[Callable[[], None]]  # what drops the references
    room_seconds: float = 0.0  # that it waited for room in the pool
    encode_seconds: float = 0.0  # and for encoders
    snapshot: PoolHandle | None = None  # where the prompt's beginning is in the pool; None where that is computed

    @property
    def handles(self) -> list[PoolHandle]:
        """What the worker needs."""
        return [document.handle for document in self.documents]

    def release(self) -> None:
        """Drops the references; a second call does nothing."""
        while self.give_back:
            self.give_back.pop()()
