"""PICaches as bytes: safetensors, so no pickle, and readable by any safetensors tool.

The metadata names the format version, the kind, the fingerprint and the key, and holds a checksum over all of that
and over every tensor's name, dtype, shape and bytes, so that a changed byte anywhere is either harmless (padding) or
noticed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

import safetensors.torch
import torch
from torch import Tensor

from comb.cache.picache import PICACHE_KINDS, PICache, framed_sha256

FORMAT_VERSION = 1
_METADATA = {"format_version", "kind", "fingerprint", "key", "checksum"}


class PICacheError(ValueError):
    """A stored PICache can't be used: truncated, damaged, or made for another version, key or kind."""


def serialize(pic: PICache, key: str) -> bytes:
    """`pic` as the bytes of a safetensors file. Dtypes: whatever safetensors has, bf16, int8 and fp8 among them.

    Args:
        key: the key it is to be found under; `deserialize` refuses the file under another one.
    """
    metadata = {"format_version": str(FORMAT_VERSION), "kind": pic.kind, "fingerprint": pic.fingerprint, "key": key}
    # safetensors refuses tensors that overlap in memory (keys and values cut from one buffer), hence the copies
    tensors = {
        name: tensor.detach().clone(memory_format=torch.contiguous_format)
        for name, tensor in pic.to("cpu").tensors().items()
    }
    metadata["checksum"] = _checksum(metadata, tensors)
    return safetensors.torch.save(tensors, metadata=metadata)


def deserialize(data: bytes, key: str, device: torch.device | str = "cpu") -> PICache:
    """The PICache that `serialize` wrote, on `device`.

    Raises:
        PICacheError: truncated, damaged (checksum), or of another format version, key or kind.
    """
    metadata = _metadata(data)
    if metadata["key"] != key:
        raise PICacheError(f"key {key!r} expected, the file holds {metadata['key']!r}")
    if metadata["kind"] not in PICACHE_KINDS:
        raise PICacheError(f"unknown PICache kind {metadata['kind']!r}; known: {', '.join(PICACHE_KINDS.names())}")
    try:
        tensors = safetensors.torch.load(data)
    except Exception as error:  # SafetensorError on a bad layout, but KeyError and others on a bad dtype or shape
        raise PICacheError(f"truncated or damaged: {type(error).__name__}: {error}") from error
    if _checksum(metadata, tensors) != metadata["checksum"]:
        raise PICacheError("damaged: the checksum does not match the content")
    try:
        return PICACHE_KINDS.get(metadata["kind"]).from_tensors(metadata["fingerprint"], tensors).to(device)
    except (KeyError, ValueError) as error:
        raise PICacheError(f"kind {metadata['kind']!r} does not hold these tensors: {error}") from error


def _metadata(data: bytes) -> Mapping[str, str]:
    """A file's metadata; raises PICacheError for none of this format."""
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > len(data) - 8:
        raise PICacheError(f"truncated: {len(data)} bytes don't hold the file's header")
    try:
        metadata = dict(json.loads(data[8 : 8 + length])["__metadata__"])
        version = metadata["format_version"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PICacheError(f"not a PICache file: unreadable header ({type(error).__name__}: {error})") from error
    if version != str(FORMAT_VERSION):
        raise PICacheError(f"format version {FORMAT_VERSION} expected, got {version}; compile the document again")
    # also what comb no longer writes: a file with a time to live must not live for ever
    if metadata.keys() != _METADATA or not all(isinstance(value, str) for value in metadata.values()):
        raise PICacheError(f"not a PICache file: metadata {sorted(_METADATA)} expected, got {sorted(metadata)}")
    return metadata


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
