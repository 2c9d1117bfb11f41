"""Whether a process has ended, for tests."""

from __future__ import annotations

import time
from pathlib import Path


def gone(pid: int) -> bool:
    """True of a process that doesn't exist, or that has ended and not been waited for."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except OSError:
        return True


def wait_until_gone(pid: int, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not gone(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)
