"""A lock that belongs to an object others share: a model, a tokenizer."""

from __future__ import annotations

import threading
from contextvars import ContextVar
from typing import Any
from weakref import WeakKeyDictionary

_creating = threading.Lock()
_locks: WeakKeyDictionary[Any, threading.RLock] = WeakKeyDictionary()  # beside the objects: a copy has its own

held_here: ContextVar[tuple[Any, ...]] = ContextVar("objects whose lock the code around keeps", default=())


def lock_of(shared: Any) -> threading.RLock:
    """The lock of `shared`, the same for everybody who asks; made at the first call."""
    with _creating:
        return _locks.setdefault(shared, threading.RLock())
