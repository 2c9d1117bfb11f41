"""What `comb serve` was asked for, as one value that reaches the API server's process through its environment."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from comb_serving.config.sizes import parse_pool_size

INSTANCE_DIR = "COMB_INSTANCE_DIR"
POOL_BYTES, POOL_BLOCK, POOL_DTYPE = "COMB_POOL_BYTES", "COMB_POOL_BLOCK", "COMB_POOL_DTYPE"
POOL_DTYPES = ("auto", "fp8")
HOST_BYTES, DISK_PATH, DISK_BYTES = "COMB_HOST_BYTES", "COMB_DISK_PATH", "COMB_DISK_BYTES"  # of a plain model's pool
POOL_MEMORY = "COMB_POOL_MEMORY"
POOL = {POOL_BYTES, POOL_BLOCK, POOL_DTYPE}
OPTIONS = "COMB_SERVE_OPTIONS"
ADMIN_KEY = "COMB_ADMIN_KEY"
MAX_BODY_BYTES = 16 * 2**20


@dataclass(frozen=True)
class ServeOptions:
    """Options of the front, from `comb serve` to encoder processes and middleware.

    Args:
        checkpoint: adapter or plain model: folder or Hub id, of a model also a registered name or GGUF file.
        method: that a plain model links documents with, such as ``legolink:16``, or ``linktokens``; None for an
            adapter with an encoder.
        backbone: where an adapter's backbone is, if not where the checkpoint says; always, of link tokens.
        encoder: False answers every request from the plain backbone, documents inlined in the prompt.
        encoders: encoder processes.
        encoder_device: where they compute: auto, cpu, cuda, ...
        ranks: tensor-parallel size of the decoder, one pool each.
        pool_bytes: of all pools together, such as ``8GiB``; or a share such as ``25%`` of the memory they are made in.
        pool_block: tokens per block.
        pool_dtype: in which documents are kept.
        host_bytes: per encoder process (of a plain model: of all ranks together), of PICaches kept in memory for
            documents that have left the pool.
        disk_path: folder where they are kept beyond restarts; None: no such tier.
        disk_bytes: of that folder; None: unbounded.
        key_hashes: sha256 hex of the API keys; empty: no authentication.
        admin_hash: the same of the key that may switch encoder or method; None: nobody may.
        max_body_bytes: longest request body.
        max_documents: documents that one tenant may register.
        tenant_share: of the pool that one tenant's documents in use and pinned ones may take.
        tenant_pinned_share: of the pool that one tenant may pin; None: its part of the pool, by the number of keys.
        log_format: text or json.
        audit: share of a plain model's requests with documents that are also answered by full recompute.
        wait_seconds: longest wait of a request for room in the pool.
        chat_template_kwargs: what chats are rendered with where a request doesn't say otherwise.
        drain_seconds: that open requests have to come to their end when the server is to end.
    """

    checkpoint: str
    method: str | None = None
    backbone: str | None = None
    encoder: bool = True
    encoders: int = 1
    encoder_device: str = "auto"
    ranks: int = 1
    pool_bytes: str = "1GiB"
    pool_block: int = 16
    pool_dtype: str = "auto"
    host_bytes: int = 0
    disk_path: str | None = None
    disk_bytes: int | None = None
    key_hashes: tuple[str, ...] = ()
    admin_hash: str | None = None
    max_body_bytes: int = MAX_BODY_BYTES
    max_documents: int = 10_000
    tenant_share: float = 1.0
    tenant_pinned_share: float | None = None
    log_format: str = "text"
    audit: float = 0.0
    wait_seconds: float = 10.0
    drain_seconds: float = 20.0
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("encoders", "ranks", "max_body_bytes", "max_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        for name in ("tenant_share", "tenant_pinned_share"):
            if not 0 < (getattr(self, name) or 1.0) <= 1:
                raise ValueError(f"{name} is a share of the pool, above 0 and at most 1, not {getattr(self, name)}")
        if not 0 <= self.audit <= 1:
            raise ValueError(f"audit is a share of requests, 0 to 1, not {self.audit}")
        for name, known in (("log_format", ("text", "json")), ("pool_dtype", POOL_DTYPES)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name} is {' or '.join(known)}, not {getattr(self, name)!r}")
        parse_pool_size(self.pool_bytes)
        for name in ("wait_seconds", "drain_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a number of seconds, >= 0, not {getattr(self, name)}")
        if self.host_bytes < 0 or (self.disk_bytes or 0) < 0:
            raise ValueError(f"sizes are in bytes, >= 0, not {self.host_bytes} and {self.disk_bytes}")

    @property
    def model(self) -> str:
        """What vLLM loads: an adapter with its encoder is one model to it, link tokens are none of its."""
        return self.checkpoint if self.method is None or self.backbone is None else self.backbone

    @property
    def has_pool(self) -> bool:
        """Whether documents are kept at all."""
        return self.encoder and self.method != "full"

    @property
    def pinned_share(self) -> float:
        """Of the pool that one tenant may pin: by default nobody can leave the others without room."""
        return self.tenant_pinned_share or 1 / max(1, len(self.key_hashes))

    @property
    def has_tiers(self) -> bool:
        """Whether documents are kept beyond the pool."""
        return self.host_bytes > 0 or self.disk_path is not None

    def pool_environment(self, folder: Path) -> dict[str, str]:
        """What vLLM's workers look for: where to make which pool, and what a plain model keeps beyond it."""
        found = {INSTANCE_DIR: str(folder)}
        if not self.has_pool:
            return found
        found |= {POOL_BYTES: parse_pool_size(self.pool_bytes), POOL_BLOCK: str(self.pool_block)}
        found[POOL_DTYPE] = self.pool_dtype
        if self.method is not None:
            tiers = {HOST_BYTES: self.host_bytes or None, DISK_PATH: self.disk_path, DISK_BYTES: self.disk_bytes}
            found |= {name: str(value) for name, value in tiers.items() if value is not None}
        return found

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServeOptions:
        """The options that `comb serve` has put into the environment. Raises ValueError outside of one."""
        if OPTIONS not in environment:
            raise ValueError(f"{OPTIONS} is not set: encoders and middleware are started by `comb serve`")
        values = json.loads(environment[OPTIONS])
        return cls(**{**values, "key_hashes": tuple(values["key_hashes"])})


def instance_dir() -> Path:
    """The folder of this instance's pools."""
    return Path(os.environ[INSTANCE_DIR])


def pool_path(folder: Path, rank: int) -> Path:
    """The pool of a tensor-parallel rank."""
    return folder / f"pool-{rank}"
