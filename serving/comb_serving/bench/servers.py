"""The two servers as processes: started, timed, watched, and ended with everything below them."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from comb_serving.bench.models import Models
from comb_serving.launch.launcher import SERVER, end_with_parent
from comb_serving.replicas.process import COMMAND, free_port

PLAIN, COMB = "plain vLLM", "comb"
MODEL = "bench"  # the name under which both serve
END_S = 30.0  # for a server to end by itself
_TAIL = 3000


@dataclass(frozen=True)
class ServerPlan:
    """How a server is started.

    Args:
        kv_bytes: of vLLM's own cache; pool_bytes: of documents; together the same for both servers.
        environment: beside this process's.
    """

    name: str
    command: tuple[str, ...]
    kv_bytes: int
    pool_bytes: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


def plans(
    models: Models, *, cache_bytes: int, pool_bytes: int, max_len: int, options: Sequence[str]
) -> list[ServerPlan]:
    """Plain vLLM with its prefix cache, and `comb serve`; both may keep `cache_bytes` of keys and values.

    Args:
        pool_bytes: the part of them that comb gives to documents.
        max_len: longest prompt and answer. options: of vLLM, for both.

    Raises:
        ValueError: if the pool leaves nothing for the decoder.
    """
    if not 0 < pool_bytes < cache_bytes:
        raise ValueError(f"--pool-bytes is a part of --cache-bytes, {cache_bytes}: not {pool_bytes}")
    common = [
        "--served-model-name", MODEL, "--max-model-len", str(max_len), "--host", "127.0.0.1",
        "--enable-prompt-tokens-details", "--enable-prefix-caching", *options,
    ]  # fmt: skip
    adapter = [*COMMAND, models.adapter, "--comb-pool-bytes", str(pool_bytes)]
    # an empty list of plug-ins: nothing of comb is loaded there
    return [
        ServerPlan(PLAIN, (*SERVER, "--model", models.backbone, *common), cache_bytes, 0, {"VLLM_PLUGINS": ""}),
        ServerPlan(COMB, (*adapter, *common), cache_bytes - pool_bytes, pool_bytes),
    ]


class Server:
    """A running server; use it as a context manager, so that it always ends.

    Attributes:
        ready_s: from its start to the first healthy answer.
    """

    def __init__(self, plan: ServerPlan, log: Path, *, timeout_s: float = 900.0) -> None:
        self.plan, self.log, self.timeout_s = plan, log, timeout_s
        self.port = free_port()
        self.ready_s = 0.0
        self.started = 0.0
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Server:
        """Starts it and waits until it is healthy. Raises RuntimeError if it isn't in time, with the log's end."""
        command = [*self.plan.command, "--port", str(self.port), "--kv-cache-memory-bytes", str(self.plan.kv_bytes)]
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, start_new_session=True,
                env={**os.environ, **self.plan.environment}, preexec_fn=end_with_parent,
            )  # fmt: skip
        try:
            self._wait_until_healthy()
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _wait_until_healthy(self) -> None:
        assert self._process is not None
        while True:
            waited = time.monotonic() - self.started
            if self._process.poll() is not None or waited > self.timeout_s:
                state = f"ended with status {self._process.returncode}" if self._process.returncode is not None else (
                    f"was not ready within {self.timeout_s:.0f} s"
                )  # fmt: skip
                tail = self.log.read_text(errors="replace")[-_TAIL:]
                raise RuntimeError(f"the server of {self.plan.name} {state}; its log {self.log} ends with:\n{tail}")
            with contextlib.suppress(OSError, urllib.error.URLError):
                self.get("/health")
                self.ready_s = time.monotonic() - self.started
                return
            time.sleep(0.2)

    def get(self, path: str) -> str:
        """The text of a page. Raises URLError where there is none."""
        with urllib.request.urlopen(f"{self.url}{path}", timeout=20) as answer:
            text: str = answer.read().decode()
            return text

    def metrics(self) -> Metrics:
        """What it counts now."""
        return Metrics(self.get("/metrics"))

    def tree(self) -> list[Any]:
        """Its processes, as psutil's; empty when it has ended."""
        import psutil

        if self._process is None:
            return []
        try:
            root = psutil.Process(self._process.pid)
            return [root, *root.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _end(self) -> None:
        """SIGTERM, and after `END_S` SIGKILL to each of its processes that is left."""
        import psutil

        process, tree = self._process, self.tree()
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(END_S)
        for left in tree:
            with contextlib.suppress(psutil.NoSuchProcess):
                left.kill()  # psutil knows by the start time that it is still the same process
        process.wait()
        psutil.wait_procs(tree, timeout=END_S)
        self._process = None


class Metrics:
    """A page in the Prometheus text format."""

    def __init__(self, text: str) -> None:
        self.text = text

    def ours(self, name: str) -> float:
        """The sum of comb's series with `name` in theirs; 0 where there is none."""
        found = re.findall(rf"^comb\w*[:_]\w*{re.escape(name)}\w*(?:\{{.*\}})? (\S+)$", self.text, re.MULTILINE)
        return sum(map(float, found))

    def label(self, name: str, label: str) -> str | None:
        """A label of the first sample of a series."""
        found = re.search(rf'^{re.escape(name)}\{{(?:.*,)?{re.escape(label)}="([^"]*)"', self.text, re.MULTILINE)
        return found[1] if found else None
