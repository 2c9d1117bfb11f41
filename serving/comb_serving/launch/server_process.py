"""A server as a child process: started on a free port, awaited, watched, and ended with everything below it."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from comb_serving.launch.launcher import end_with_parent

COMMAND = (sys.executable, "-c", "from comb.cli.main import main; main()", "serve")
_LOG_TAIL = 3000  # characters of a log that an error shows


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


class ServerProcess:
    """Starts a server; `wait_until_healthy` is next.

    The kernel ends it when the *thread* that calls this ends (`end_with_parent`), so call it from one that stays.

    Args:
        command: of the server; --host and --port are added.
        environment: added to this process's.
        log: takes what it prints; by default that goes where this process prints.

    Raises:
        OSError: if there is no such program.
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
            while not self._is_healthy():
                self.check()
                if time.monotonic() - self.started > seconds:
                    raise RuntimeError(f"{self.url} was not healthy within {seconds:.0f} s; {self._log_tail()}")
                time.sleep(0.2)
        except BaseException:
            self.stop()
            raise

    def _is_healthy(self) -> bool:
        with suppress(urllib.error.URLError, OSError):
            self.get("/health", timeout=5)
            return True
        return False

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
