"""Whether a process has ended, and waiting for what another one does, for tests."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def gone(pid: int) -> bool:
    """True of a process that doesn't exist, or that has ended and not been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_for(condition: Callable[[], Any], seconds: float = 60, step: float = 0.05) -> Any:
    """The condition's value, once it is true."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it doesn't come to pass"
        time.sleep(step)
    return found


def wait_until_gone(pid: int, seconds: float = 20) -> None:
    wait_for(lambda: gone(pid), seconds)
