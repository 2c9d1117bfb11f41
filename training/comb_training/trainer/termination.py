"""SIGTERM (a scheduler's warning) and Ctrl-C end a run after the step under way, with a checkpoint and a last score."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from comb_training.trainer import distributed

_ASKED = b"\nCtrl-C: ending after this step, with a checkpoint; Ctrl-C again ends at once, without\n"


@contextmanager
def asked_to_stop() -> Iterator[Callable[[], str]]:
    """Yields a function that names the signal that came, on any rank, or "": all agree on the step. It is collective.

    A second SIGINT does what it does elsewhere.
    """
    came = 0

    def ask(number: int, _: FrameType | None) -> None:
        nonlocal came
        came = number
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, before[signal.SIGINT])
            if distributed.is_main():
                os.write(2, _ASKED)  # print may be in the middle of a line

    before = {}
    if threading.current_thread() is threading.main_thread():  # Python allows handlers nowhere else
        for each in (signal.SIGTERM, signal.SIGINT):
            if signal.getsignal(each) is not signal.SIG_IGN:  # as in a shell's background
                before[each] = signal.signal(each, ask)
    try:
        yield lambda: signal.Signals(number).name if (number := distributed.greatest(came)) else ""
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
