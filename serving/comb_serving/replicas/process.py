"""One `comb serve` with everything below it, owned by the process that has made it."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress

from comb_serving.launch.launcher import end_with_parent

logger = logging.getLogger(__name__)

COMMAND = (sys.executable, "-c", "from comb.cli.main import main; main()", "serve")
END_SECONDS = 90.0


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on now."""
    with socket.socket() as free:
        free.bind((host, 0))
        return int(free.getsockname()[1])


class ServeProcess:
    """Starts a server on a free port and waits until it is healthy.

    Args:
        command: `COMMAND`, the checkpoint, and options; --host and --port are added.
        host: where it listens, and where the router finds it.
        environment: added to this process's.

    Raises:
        RuntimeError: it ended at its start, or wasn't healthy within `start_seconds`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        host: str = "127.0.0.1",
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 900.0,
    ) -> None:
        port = free_port(host)
        self.address = f"http://{host}:{port}"
        given = [*command, "--host", host, "--port", str(port)]
        self._started = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()
        # the kernel ends the server when the *thread* that has started it ends: this one lives as long as the server
        threading.Thread(target=self._run, args=(given, {**os.environ, **(environment or {})}), daemon=True).start()
        self._started.wait()
        try:
            self._wait_until_healthy(start_seconds)
        except BaseException:
            self.stop()
            raise

    def _run(self, command: list[str], environment: dict[str, str]) -> None:
        try:
            self._process = subprocess.Popen(command, env=environment, preexec_fn=end_with_parent)
        except OSError:
            logger.exception("could not start %s", command[0])
        finally:
            self._started.set()
        if self._process is not None:
            self._process.wait()
        self._ended.set()

    def _wait_until_healthy(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not self._healthy():
            self.check()
            if time.monotonic() > deadline:
                raise RuntimeError(f"{self.address} was not healthy within {seconds:.0f} s; see its log")
            time.sleep(0.2)

    def _healthy(self) -> bool:
        with suppress(urllib.error.URLError, OSError), urllib.request.urlopen(f"{self.address}/health", timeout=5) as a:
            return bool(a.status == 200)
        return False

    @property
    def pid(self) -> int | None:
        """Of `comb serve`."""
        return None if self._process is None else self._process.pid

    def check(self) -> None:
        """Raises RuntimeError if the server has ended."""
        if self._ended.is_set():
            status = None if self._process is None else self._process.returncode
            raise RuntimeError(f"comb serve at {self.address} has ended with status {status}; see its log")

    def stop(self) -> None:
        """Ends the server and waits until it is gone."""
        if self._process is None:
            return
        with suppress(ProcessLookupError):
            self._process.send_signal(signal.SIGTERM)
        if not self._ended.wait(END_SECONDS):
            with suppress(ProcessLookupError):
                self._process.kill()
            self._ended.wait()
