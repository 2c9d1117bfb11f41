"""What a server prints, passed on; while it starts, a traceback is its last line alone, as is a page of usage.

vLLM's processes each print theirs when one of them fails, hundreds of lines in which the cause is somewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import threading
from collections.abc import Callable
from typing import IO

_PREFIX = re.compile(r"^(?P<process>\([^)]*pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")
_CAUSE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b(?:: .*)?$")
_MISUSE = re.compile(r"^\S+: error: (.+)$")  # argparse's line, behind its usage
_CONSEQUENCE = re.compile(r"See root cause above|Engine core initialization failed|EngineDeadError")


class StartLog:
    """Follows both streams of a process.

    Args:
        ready: whether the server has started: all is passed on as it is from then on.
    """

    def __init__(self, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        self.cause = ""
        """The last exception that was shown, consequences of others left out."""
        self._of: str | None = None  # the process whose cause may go on in the next line
        self._ready = ready
        self._whole = os.environ.get("COMB_DEBUG") == "1"
        streams = [(process.stdout, 1), (process.stderr, 2)]
        self._threads = [threading.Thread(target=self._follow, args=each, daemon=True) for each in streams]
        for thread in self._threads:
            thread.start()

    def close(self, seconds: float = 1.0) -> None:
        """Waits for what is still to be passed on."""
        for thread in self._threads:
            thread.join(seconds)

    def _follow(self, stream: IO[bytes], descriptor: int) -> None:
        inside: set[str] = set()  # processes in the middle of a traceback
        started = False
        for line in iter(stream.readline, b""):
            started = started or self._ready()
            if started or self._shown(line.decode(errors="replace"), inside) or self._whole:
                os.write(descriptor, line)

    def _shown(self, line: str, inside: set[str]) -> bool:
        found = _PREFIX.match(line)
        assert found is not None
        process, body = found["process"] or "", line[found.end() :].rstrip()
        if body.startswith("Traceback (most recent call last)"):
            inside.add(process)
            return False
        if body.startswith("usage: "):
            inside.add("usage")
            return False
        if "usage" in inside:
            if body.startswith(" "):
                return False
            inside.discard("usage")
            if misuse := _MISUSE.match(body):
                self.cause = misuse[1]
                return False
        if process not in inside:
            if body.startswith("  ") and process == self._of:  # pydantic's are of several lines
                self.cause += f" {body.strip()}"
            else:
                self._of = None
            return True
        if _CAUSE.match(body):
            inside.discard(process)
            if not _CONSEQUENCE.search(body):
                self.cause, self._of = body, process
            return True
        # frames, and what stands between the tracebacks of causes and consequences
        return not (body.startswith(("  ", "During handling", "The above exception")) or not body)
