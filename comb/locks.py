"""A lock that belongs to an object others share: a model, a tokenizer."""

from __future__ import annotations

import threading
from typing import Any


class _Lock:
    """Copies of the object that it lies on get their own, and it is left out of pickles."""

    def __init__(self) -> None:
        self.lock = threading.RLock()

    def __deepcopy__(self, memo: dict[int, Any]) -> _Lock:
        return _Lock()

    def __reduce__(self) -> tuple[type[_Lock], tuple[()]]:
        return (_Lock, ())


_creating = threading.Lock()


def lock_of(shared: Any) -> threading.RLock:
    """The lock of `shared`, the same for everybody who asks; made at the first call."""
    with _creating:
        holder = shared.__dict__.get("_comb_lock")
        if holder is None:
            holder = shared.__dict__["_comb_lock"] = _Lock()
    lock: threading.RLock = holder.lock
    return lock
