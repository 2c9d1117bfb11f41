"""Servers as child processes: started on a free port, awaited, watched, ended with all below, and what they print."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

COMMAND = (sys.executable, "-c", "from comb.cli.main import main; main()", "serve")
_LOG_TAIL = 3000  # characters of a log that an error shows

_PREFIX = re.compile(r"^(?P<process>\([^)]*pid=\d+\) )?(?:[A-Z]+ [\d-]+ [\d:]+ \[[^\]]*\] )?")
_CAUSE = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Z]\w*(?:Error|Exception|Exit|Interrupt|Warning)\b(?:: .*)?$")
_MISUSE = re.compile(r"^\S+: error: (.+)$")  # argparse's line, behind its usage
_CONSEQUENCE = re.compile(
    r"See root cause above|Engine core initialization failed|EngineDeadError|failed to be inspected"
)


def end_with_parent() -> None:
    """In a new process: SIGTERM to it when its parent dies, even by SIGKILL (Linux)."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """Starts a server; `wait_until_healthy` is next. Raises OSError if there is no such program.

    The kernel ends it when the *thread* that calls this ends (`end_with_parent`), so call it from one that stays.

    Args:
        command: of the server; --host and --port are added.
        environment: added to this process's.
        log: takes what it prints; by default that goes where this process prints.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        log: Path | None = None,
    ) -> None:
        port = free_port(host)
        self.url, self.log = f"http://{host}:{port}", log
        self.started = time.monotonic()
        output = None if log is None else log.open("wb")
        try:
            self._process = subprocess.Popen(
                [*command, "--host", host, "--port", str(port)],
                env={**os.environ, **(environment or {})},
                stdin=subprocess.DEVNULL, stdout=output, stderr=output and subprocess.STDOUT, start_new_session=True,
                preexec_fn=end_with_parent,
            )  # fmt: skip
        finally:
            if output is not None:
                output.close()

    @property
    def pid(self) -> int:
        """Of the process that was started."""
        return self._process.pid

    def wait_until_healthy(self, seconds: float) -> None:
        """Returns when /health answers 200. Raises RuntimeError if it ends or takes longer; then it is ended."""
        try:
            while True:
                with suppress(urllib.error.URLError, OSError):
                    self.get("/health", timeout=5)
                    return
                self.check()
                if time.monotonic() - self.started > seconds:
                    raise RuntimeError(f"{self.url} was not healthy within {seconds:.0f} s; {self._log_tail()}")
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def get(self, path: str, *, timeout: float = 20) -> str:
        """The text of a page. Raises URLError where there is none."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=timeout) as answer:
            text: str = answer.read().decode()
            return text

    def check(self) -> None:
        """Raises RuntimeError if the server has ended."""
        if self._process.poll() is not None:
            status = self._process.returncode
            raise RuntimeError(f"the server at {self.url} has ended with status {status}; {self._log_tail()}")

    def _log_tail(self) -> str:
        if self.log is None:
            return "see its log"
        return f"its log {self.log} ends with:\n{self.log.read_text(errors='replace')[-_LOG_TAIL:]}"

    def tree(self) -> list[Any]:
        """Its processes, as psutil's; empty when it has ended."""
        import psutil

        with suppress(psutil.NoSuchProcess):
            root = psutil.Process(self.pid)
            return [root, *root.children(recursive=True)]
        return []

    def stop(self, seconds: float = 90.0) -> None:
        """SIGTERM, and after `seconds` SIGKILL to each of its processes that is left; they are gone afterwards."""
        import psutil

        tree = self.tree()
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)
        for left in tree:
            with suppress(psutil.NoSuchProcess):
                left.kill()  # psutil knows by the start time that it is still the same process
        self._process.wait()
        psutil.wait_procs(tree, timeout=seconds)


class StartLog:
    """What a server prints, passed on; until it is `ready`, a traceback is its last line alone, as is a page of usage.

    vLLM's processes each print theirs when one of them fails, hundreds of lines in which the cause is somewhere.
    """

    def __init__(self, process: subprocess.Popen[bytes], ready: Callable[[], bool]) -> None:
        self.cause = self._before = ""  # the last exception that was shown, consequences of others left out
        self._of: str | None = None  # the process whose cause may go on in the next line
        self._ready = ready
        self._whole = os.environ.get("COMB_DEBUG") == "1"
        streams = [(process.stdout, 1), (process.stderr, 2)]
        self._threads = [threading.Thread(target=self._follow, args=each, daemon=True) for each in streams]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Waits for what is still to be passed on."""
        for thread in self._threads:
            thread.join(1.0)  # a process that outlives the server may hold its streams open

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
                if _CONSEQUENCE.search(body):
                    self.cause, self._of = self._before, None
            else:
                self._of = None
            return True
        if _CAUSE.match(body):
            inside.discard(process)
            if not _CONSEQUENCE.search(body):
                self._before, self.cause, self._of = self.cause, body, process
            return True
        # frames, and what stands between the tracebacks of causes and consequences
        return not (body.startswith(("  ", "During handling", "The above exception")) or not body)
