"""PICaches as bytes: safetensors, so no pickle, and readable by any safetensors tool.

The metadata names the format version, the kind, the fingerprint and the key, and holds a checksum over all of that
and over every tensor's name, dtype, shape and bytes, so that a changed byte anywhere is either harmless (padding) or
noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import safetensors.torch
import torch
from torch import Tensor

from comb.cache.picache import PICACHE_KINDS, PICache, framed_sha256

FORMAT_VERSION = 1
MAX_HEADER_BYTES = 16 * 2**20  # ours are a few kilobytes; a damaged length must not make us read the whole disk


class PICacheError(ValueError):
    """A stored PICache can't be used: truncated, damaged, or made for another version, key or kind."""


@dataclass(frozen=True)
class PICacheHeader:
    """A file's metadata, as it stands and taken apart.

    `expires_at` is in seconds since the epoch, so that it holds across restarts; None: never.
    """

    kind: str
    fingerprint: str
    key: str
    checksum: str
    expires_at: float | None
    metadata: Mapping[str, str]


def serialize(pic: PICache, key: str, *, expires_at: float | None = None) -> bytes:
    """`pic` as the bytes of a safetensors file. Dtypes: whatever safetensors has, bf16, int8 and fp8 among them.

    Args:
        key: the key it is to be found under; `deserialize` refuses the file under another one.
        expires_at: wall-clock seconds since the epoch after which a store drops the file; None: never.
    """
    metadata = {"format_version": str(FORMAT_VERSION), "kind": pic.kind, "fingerprint": pic.fingerprint, "key": key}
    if expires_at is not None:
        metadata["expires_at"] = repr(float(expires_at))
    # safetensors refuses tensors that overlap in memory (keys and values cut from one buffer), hence the copies
    tensors = {name: _unshared(tensor) for name, tensor in pic.to("cpu").tensors().items()}
    metadata["checksum"] = _checksum(metadata, tensors)
    return safetensors.torch.save(tensors, metadata=metadata)


def _unshared(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format)


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Covers all that is used of a file: metadata (less the checksum itself), tensor names, dtypes, shapes, bytes."""

    def parts() -> Iterable[bytes | memoryview]:
        for name, text in sorted(metadata.items()):
            if name != "checksum":
                yield from (name.encode(), text.encode("utf-8", "surrogatepass"))
        for name, tensor in sorted(tensors.items()):
            yield from (name.encode(), f"{tensor.dtype}{list(tensor.shape)}".encode())
            yield tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data

    return framed_sha256(parts())


def parse_header(data: bytes) -> PICacheHeader:
    """The metadata of a serialised PICache, from its first bytes (the tensors may be missing).

    Raises:
        PICacheError: no safetensors file, no PICache, or one of another format version.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(MAX_HEADER_BYTES, len(data) - 8):
        raise PICacheError(f"truncated: {len(data)} bytes don't hold the file's header")
    try:
        metadata = dict(json.loads(data[8 : 8 + length])["__metadata__"])
        if not all(isinstance(value, str) for value in metadata.values()):
            raise TypeError("metadata values are not all strings")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PICacheError(f"not a PICache file: unreadable header ({type(error).__name__}: {error})") from error
    version = metadata.get("format_version")
    if version != str(FORMAT_VERSION):
        raise PICacheError(f"format version {FORMAT_VERSION} expected, got {version}; compile the document again")
    try:
        named = {name: metadata[name] for name in ("kind", "fingerprint", "key", "checksum")}
        expires_at = float(metadata["expires_at"]) if "expires_at" in metadata else None
    except (KeyError, ValueError) as error:
        raise PICacheError(f"not a PICache file: metadata without a usable {error}") from error
    return PICacheHeader(**named, expires_at=expires_at, metadata=metadata)


def deserialize(data: bytes, key: str, device: torch.device | str = "cpu") -> PICache:
    """The PICache that `serialize` wrote, on `device`.

    Raises:
        PICacheError: truncated, damaged (checksum), or of another format version, key or kind.
    """
    header = parse_header(data)
    if header.key != key:
        raise PICacheError(f"key {key!r} expected, the file holds {header.key!r}")
    if header.kind not in PICACHE_KINDS:
        known = ", ".join(PICACHE_KINDS.names())
        raise PICacheError(f"unknown PICache kind {header.kind!r}; known: {known}")
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # SafetensorError on a bad layout, but KeyError and others on a bad dtype or shape
        raise PICacheError(f"truncated or damaged: {type(error).__name__}: {error}") from error
    if _checksum(header.metadata, tensors) != header.checksum:
        raise PICacheError("damaged: the checksum does not match the content")
    try:
        return PICACHE_KINDS.get(header.kind).from_tensors(header.fingerprint, tensors).to(device)
    except (KeyError, ValueError) as error:
        raise PICacheError(f"kind {header.kind!r} does not hold these tensors: {error}") from error
