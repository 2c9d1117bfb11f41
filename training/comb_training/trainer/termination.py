"""SIGTERM (a scheduler's warning) ends a run after the step under way, with a checkpoint."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from comb_training.trainer import distributed


@contextmanager
def sigterm_asked() -> Iterator[Callable[[], bool]]:
    """Yields a function that says whether the signal came, on any rank: all agree on the step. It is collective."""
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():  # Python allows handlers nowhere else
        yield lambda: distributed.any_true(False)
        return
    before = signal.signal(signal.SIGTERM, lambda *_: asked.set())
    try:
        yield lambda: distributed.any_true(asked.is_set())
    finally:
        signal.signal(signal.SIGTERM, before)
