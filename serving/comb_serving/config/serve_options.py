"""What `comb serve` was asked for: its command line, its processes' environment and the docs' table come from here."""

from __future__ import annotations

import hashlib
import inspect
import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import Field, asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

INSTANCE_DIR, OPTIONS, ADMIN_KEY = "COMB_INSTANCE_DIR", "COMB_SERVE_OPTIONS", "COMB_ADMIN_KEY"

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


def parse_bytes(text: str) -> int:
    """A size such as ``512MiB``, ``8GB`` or ``1073741824``. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?)b?\s*", text.lower())
    if found is None or found[2] not in _UNITS:
        raise ValueError(f"a size is a number of bytes, or like 512MiB or 8GB, not {text!r}")
    return int(float(found[1]) * _UNITS[found[2]])


def parse_share(text: str) -> float:
    """A share such as ``25%``, as a number above 0 and at most 1. Raises ValueError for anything else."""
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%\s*", text)
    if found is None or not 0 < float(found[1]) <= 100:
        raise ValueError(f"a share is above 0% and at most 100%, not {text!r}")
    return float(found[1]) / 100


def parse_switch(text: str) -> bool:
    """``on`` or ``off``. Raises ValueError for anything else."""
    if text not in ("on", "off"):
        raise ValueError(f"--encoder is on or off, not {text!r}")
    return text == "on"


def key_hash(key: str) -> str:
    """How an API key is kept and compared: sha256, hex."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).hexdigest()


def hash_of_own(key: str, what: str = "an API key") -> str:
    """`key_hash` of a key of the server's. Raises ValueError for one that no client's header can hold."""
    if not key or key != key.strip() or not key.isascii():
        raise ValueError(f"{what} is empty, isn't ASCII, or has spaces or a line's end around it: give it without")
    return key_hash(key)


def option(
    written: Any,
    help: str,
    flag: str | None = None,
    *,
    read: Callable[[str], Any] | None = None,
    choices: tuple[str, ...] = (),
    envvar: str | None = None,
) -> Any:
    """A field that is an option: its default as it is `written`, its `flag` if not its name, what `read`s it."""
    value = written if read is None or written is None else read(written)
    said = typer.Option(*filter(None, [flag]), help=help, envvar=envvar)
    return field(default=value, metadata={"option": said, "default": written, "read": read, "flag": flag,
                                          "choices": choices})  # fmt: skip


@dataclass(frozen=True)
class ServeOptions:
    """Options of the front, from `comb serve` to encoder processes, middleware and vLLM's workers."""

    checkpoint: str = field(
        metadata={"option": typer.Argument(help="adapter, or any plain model: folder, name, Hub id")}
    )
    method: str | None = option(
        None, "how a plain model links documents: primed (the default), legolink:k, focus:r, naive,front=ADAPTER, "
        "full; of hybrids hypic:w,front=prose; none for an adapter",
    )  # fmt: skip
    audit: float = option(
        0.0, "share of a plain model's requests with documents that are also answered in full, to compare: 0.01"
    )
    encoder: bool = option("on", "on, or off: no pool, all documents go into the prompt", read=parse_switch)
    backbone: str | None = option(None, "where the adapter's backbone is, if not where the adapter says")
    pool_bytes: int = option("1GiB", "pool of documents, of all ranks together", "--comb-pool-bytes", read=parse_bytes)
    pool_block: int = option(16, "tokens per block of the pool", "--comb-pool-block")
    pool_dtype: str = option(
        "auto", "documents as computed (auto), or in half the bytes (fp8)", "--comb-pool-dtype", choices=("auto", "fp8")
    )
    pool_memory: str = option(
        "auto", "where the pool is: with the decoder (auto), or on the host", "--comb-pool-memory",
        choices=("auto", "host"),
    )  # fmt: skip
    encoder_device: str = option(
        "auto", "where they compute: auto (the pool's GPU, or any), cpu, cuda:1", "--comb-encoder-device"
    )
    host_bytes: int = option(
        "0", "memory for documents that have left the pool; with a disk folder at least one longest document",
        "--comb-host-bytes", read=parse_bytes,
    )  # fmt: skip
    disk_path: str | None = option(
        None, "private folder where documents are kept beyond restarts", "--comb-disk",
        read=lambda path: str(Path(path).resolve()),
    )  # fmt: skip
    disk_bytes: int | None = option(None, "of that folder; unbounded by default", "--comb-disk-bytes", read=parse_bytes)
    wait_seconds: float = option(10.0, "longest wait for room in the pool, then status 429", "--comb-wait-seconds")
    drain_seconds: float = option(
        20.0, "that open requests have when the server is told to end", "--comb-drain-seconds"
    )
    max_body_bytes: int = option("16MiB", "longest body of a request", "--comb-max-body", read=parse_bytes)
    max_documents: int = option(10_000, "documents that one key may register", "--comb-tenant-documents")
    tenant_share: float = option(
        "100%", "of the pool, for what one key uses or pins", "--comb-tenant-share", read=parse_share
    )
    tenant_pinned_share: float | None = option(
        None, "of the pool, for what one key pins; by default one part for each key", "--comb-tenant-pinned",
        read=parse_share,
    )  # fmt: skip
    lora_documents: str = option(
        "own", "how documents of a LoRA's requests are compiled: with it (own), or once without any for all (shared)",
        "--comb-lora", choices=("own", "shared"),
    )  # fmt: skip
    segments: str = option(
        "off", "auto: in prompts without documents of a plain model, text that came before is found and linked",
        "--comb-segments", choices=("off", "auto"),
    )  # fmt: skip
    segment_tokens: int = option(64, "shortest of the segments that are found", "--comb-segment-tokens")
    segment_patterns: tuple[str, ...] = option(
        (), "a regular expression of what stands at the start of a line in front of one, beside the usual labels; "
        "repeatable", "--comb-segment-pattern",
    )  # fmt: skip
    segment_kinds: tuple[str, ...] = option(
        "prose,code,json,logs", "kinds of segments that are found; `comb doctor MODEL --segments` says which are safe",
        "--comb-segment-kinds", read=lambda names: tuple(name.strip() for name in names.split(",") if name.strip()),
    )  # fmt: skip
    admin_hash: str | None = option(
        None, f"key that may switch encoder or method at `/v1/comb`; better by `{ADMIN_KEY}`", "--comb-admin-key",
        read=lambda key: hash_of_own(key, "the admin key") if key else None, envvar=ADMIN_KEY,
    )  # fmt: skip
    # what `comb serve` finds out itself
    link_tokens: str | None = None  # the adapter whose link tokens documents are compiled behind
    ranks: int = 1  # tensor-parallel size of the decoder, one pool each
    key_hashes: tuple[str, ...] = ()  # sha256 hex of the API keys; empty: no authentication
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)  # of chats whose requests don't say otherwise

    def __post_init__(self) -> None:
        for name in ("ranks", "pool_block", "max_body_bytes", "max_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not 0 <= self.audit <= 1:
            raise ValueError(f"audit is a share of requests, 0 to 1, not {self.audit}")
        for each in fields(self):
            known, chosen = each.metadata.get("choices"), getattr(self, each.name)
            if known and chosen not in known:
                raise ValueError(f"{flag_of(each)} is {' or '.join(known)}, not {chosen!r}")
        if self.pool_bytes < 1:
            raise ValueError(f"a pool of {self.pool_bytes} bytes has no room for a document: give it 1GiB, say")
        for name in ("wait_seconds", "drain_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name} is a number of seconds, >= 0, not {getattr(self, name)}")
        if self.disk_bytes is not None and self.disk_path is None:
            raise ValueError("--comb-disk-bytes is the size of a folder, and none is given: name it with --comb-disk")

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

    # ---- the command line ----

    @classmethod
    def parameters(cls) -> list[inspect.Parameter]:
        """Of a command, with annotations for typer."""
        hints, made = get_type_hints(cls), []
        for each in fields(cls):
            if not (said := each.metadata):
                continue
            kind: Any = hints[each.name]
            if said.get("read"):
                kind = str | None
            elif kind == tuple[str, ...]:  # typer repeats the option of a list, and not of a tuple
                kind = list[str]
            annotation, default = Annotated[kind, said["option"]], said.get("default", inspect.Parameter.empty)
            made.append(
                inspect.Parameter(each.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
            )
        return made

    @classmethod
    def read(cls, given: Mapping[str, Any]) -> ServeOptions:
        """The options of a command line. Raises ValueError for what can't be."""
        values = dict(given)
        for each in fields(cls):
            if (read := each.metadata.get("read")) and values.get(each.name) is not None:
                values[each.name] = read(values[each.name])
        return cls(**_with_tuples(values))

    def given(self, *names: str) -> list[str]:
        """The flags of those options that aren't at their defaults."""
        changed = [each for each in fields(self) if getattr(self, each.name) != each.default]
        return [flag_of(each) for each in changed if each.name in names]

    # ---- the environment ----

    def environment(self, folder: Path) -> dict[str, str]:
        """What the processes of an instance in `folder` look for, vLLM's workers among them."""
        return {INSTANCE_DIR: str(folder), OPTIONS: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> ServeOptions:
        """The options that `comb serve` has put into the environment. Raises ValueError outside of one."""
        if OPTIONS not in environment:
            raise ValueError(f"{OPTIONS} is not set: encoders, workers and middleware are started by `comb serve`")
        return cls(**_with_tuples(json.loads(environment[OPTIONS])))


def _with_tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}


def flag_of(option: Field[Any]) -> str:
    """What an option is called on the command line."""
    return option.metadata["flag"] or f"--{option.name}"


def instance_dir() -> Path:
    """The folder of this instance's pools."""
    return Path(os.environ[INSTANCE_DIR])


def pool_path(folder: Path, rank: int) -> Path:
    """The pool of a tensor-parallel rank."""
    return folder / f"pool-{rank}"
