"""Requests that wait for something that others give back: first come, first served."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

Result = TypeVar("Result")


class NotYetError(RuntimeError):
    """What an attempt raises when it may succeed later; nothing has changed then."""


@dataclass(eq=False)
class _Waiter:
    since: float
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class WaitQueue:
    """Only the first in line tries, whenever something has changed (`wake`), so large ones aren't overtaken.

    Who waits holds nothing but its place, so two who wait never wait for each other.
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
        """The result of `attempt`, made when it is this one's turn, until it no longer raises NotYetError.

        Cancelled or failed, it leaves the line to the next.
        """
        turn = _Waiter(asyncio.get_running_loop().time())
        self._waiters.append(turn)
        try:
            while True:
                if self._waiters[0] is turn:
                    with contextlib.suppress(NotYetError):
                        return attempt()
                turn.woken.clear()  # what the attempt itself has given back has been tried
                await turn.woken.wait()
        finally:
            self._waiters.remove(turn)
            self.wake()
