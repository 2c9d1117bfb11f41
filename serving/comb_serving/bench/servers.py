"""The two servers as processes, with what they say of themselves."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from comb_serving.bench.models import Models
from comb_serving.launch.launcher import SERVER
from comb_serving.launch.server_process import COMMAND, ServerProcess

PLAIN, COMB = "plain vLLM", "comb"
MODEL = "bench"  # the name under which both serve
START_S, END_S = 900.0, 30.0  # for a server to start and to end by itself


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
        "--served-model-name", MODEL, "--max-model-len", str(max_len),
        "--enable-prompt-tokens-details", "--enable-prefix-caching", *options,
    ]  # fmt: skip
    adapter = [*COMMAND, models.adapter, "--comb-pool-bytes", str(pool_bytes)]
    # an empty list of plug-ins: nothing of comb is loaded there
    return [
        ServerPlan(PLAIN, (*SERVER, "--model", models.backbone, *common), cache_bytes, 0, {"VLLM_PLUGINS": ""}),
        ServerPlan(COMB, (*adapter, *common), cache_bytes - pool_bytes, pool_bytes),
    ]


class MeasuredServer(ServerProcess):
    """A running server; use it as a context manager, so that it always ends.

    Attributes:
        ready_s: from its start to the first healthy answer.
    """

    def __init__(self, plan: ServerPlan, log: Path) -> None:
        self.plan = plan
        command = [*plan.command, "--kv-cache-memory-bytes", str(plan.kv_bytes)]
        super().__init__(command, environment=plan.environment, log=log)
        self.wait_until_healthy(START_S)
        self.ready_s = time.monotonic() - self.started

    def __enter__(self) -> MeasuredServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop(END_S)

    def resident(self) -> dict[str, int]:
        """Proportional set size of each of its processes in bytes, by what it does: shared pages count once."""
        import psutil

        found: dict[str, int] = {}
        for process in self.tree():
            try:
                name, memory = _role(process.name(), process.cmdline()), process.memory_full_info()
            except psutil.Error:
                continue
            found[name] = found.get(name, 0) + getattr(memory, "pss", memory.rss)
        return found


def _role(name: str, command: Sequence[str]) -> str:
    if name.startswith("VLLM::"):
        return name.removeprefix("VLLM::").lower()
    roles = {"comb_serving.encoding.process": "encoder", "api_server": "API server", "comb.cli": "launcher"}
    return next((role for word, role in roles.items() if any(word in part for part in command)), "others")


def counted(page: str, name: str) -> float:
    """From a page of /metrics: the sum of comb's series with `name` in theirs; 0 where there is none."""
    found = re.findall(rf"^comb\w*[:_]\w*{re.escape(name)}\w*(?:\{{.*\}})? (\S+)$", page, re.MULTILINE)
    return sum(map(float, found))


def pool_token_bytes(before: str, after: str, tokens: int) -> float | None:
    """Bytes by which the pool has filled per document token, what blocks leave empty included; None if it evicted."""
    if counted(before, "evictions") != counted(after, "evictions") or not tokens:
        return None
    return (counted(after, "pool_used_bytes") - counted(before, "pool_used_bytes")) / tokens


def decoder_token_bytes(page: str, kv_bytes: int) -> float | None:
    """Bytes of keys and values per token in vLLM's own cache: its size over the tokens that fit; None if unsaid."""
    labels = [
        re.search(rf'^vllm:cache_config_info\{{(?:.*,)?{name}="([^"]*)"', page, re.MULTILINE)
        for name in ("num_gpu_blocks", "block_size")
    ]
    blocks, size = (label and int(label[1]) for label in labels)
    return kv_bytes / (blocks * size) if blocks and size else None
