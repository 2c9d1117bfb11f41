"""PICache: the reusable result of compiling one segment; its kinds, its content key, and its bytes in a file.

A new kind of PICache is one class and one registration: subclass `PICache`, decorate with `@register_kind`.
"""

from __future__ import annotations

import hashlib
import json
import struct
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import safetensors.torch
import torch
from torch import Tensor

from comb.registry import Registry
from comb.waits import moved

KEY_VERSION = 2
FORMAT_VERSION = 1
_METADATA = {"format_version", "kind", "fingerprint", "key", "checksum"}


@dataclass(frozen=True, eq=False, repr=False)
class PICache(ABC):
    """What compiling one segment gave: tensors, and the fingerprint of what made them.

    Immutable, and compared by identity. Equal content has an equal `content_key`.

    Args:
        fingerprint: model + adapter + method that made it; a consumer refuses another's.
    """

    fingerprint: str
    kind: ClassVar[str]

    @property
    @abstractmethod
    def num_tokens(self) -> int:
        """Tokens of the segment, at least 1."""

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor by name, here one for each field; `from_tensors` takes it back."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name != "fingerprint"}

    @classmethod
    def from_tensors(cls, fingerprint: str, tensors: Mapping[str, Tensor]) -> Self:
        """The inverse of `tensors`. Raises KeyError or ValueError if `tensors` isn't what this kind holds."""
        own: Any = {field.name: tensors[field.name] for field in fields(cls) if field.name != "fingerprint"}
        return cls(fingerprint, **own)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors().values())

    @cached_property
    def alive_nbytes(self) -> int:
        """Bytes that its tensors keep alive: of one that was cut from another, all of that."""
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors().values())

    def to(self, device: torch.device | str) -> Self:
        """The same PICache on `device`; self if it is there already.

        Token ids stay on the host, where they are read: from a GPU each reading would be waited for. All other tensors
        go in one copy, and share one buffer afterwards; on the host of a GPU pinned memory, of which torch takes the
        next power of two.
        """
        tensors, there = self.tensors(), torch.device(device)
        copied = {name: tensor for name, tensor in tensors.items() if tensor.dtype != torch.int64}
        if len({tensor.device for tensor in copied.values()}) == 1 and not any(
            tensor.requires_grad for tensor in copied.values()
        ):
            copied = moved(copied, there)  # other ones each by itself
        after = {**tensors, **copied}
        return self._with(
            tensors, {n: one.to("cpu" if one.dtype == torch.int64 else there) for n, one in after.items()}
        )

    def standalone(self) -> Self:
        """The same values without gradients, and keeping alive no more memory than `nbytes`; self if it is so already.

        A slice of a batch keeps the whole batch alive, which no byte budget could account for.
        """
        tensors, after = self.tensors(), {}
        for name, tensor in tensors.items():
            own = tensor.detach() if tensor.requires_grad else tensor
            after[name] = own if own.untyped_storage().nbytes() <= own.nbytes else own.clone()
        return self._with(tensors, after)

    def _with(self, before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> Self:
        """A PICache of other tensors; self where they are the same (some kinds make one anew at every `tensors`)."""
        if all(after[name] is tensor for name, tensor in before.items()):
            return self
        return self.from_tensors(self.fingerprint, after)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.num_tokens} tokens, {self.nbytes} bytes, {self.fingerprint!r})"


PICACHE_KINDS: Registry[type[PICache]] = Registry("PICache kind", "comb.hybrid.picache")
P = TypeVar("P", bound=PICache)


def register_kind(cls: type[P]) -> type[P]:
    """Class decorator: files whose kind is `cls.kind` load as `cls`."""
    PICACHE_KINDS.register(cls.kind)(cls)
    return cls


@register_kind
@dataclass(frozen=True, eq=False, repr=False)
class CrossPICache(PICache):
    """What COMB's encoder emits for one segment.

    Args:
        keys: [cross_layers, tokens, kv_heads, head_dim], already normalised.
        values: same shape.
    """

    keys: Tensor
    values: Tensor
    kind: ClassVar[str] = "cross"

    def __post_init__(self) -> None:
        if self.keys.ndim != 4 or self.keys.shape != self.values.shape or self.keys.shape[1] < 1:
            raise ValueError(
                "CrossPICache expects keys and values of one shape [cross_layers, tokens >= 1, kv_heads, head_dim], "
                f"got {list(self.keys.shape)} and {list(self.values.shape)}"
            )

    @property
    def num_tokens(self) -> int:
        return self.keys.shape[1]


@register_kind
@dataclass(frozen=True, eq=False, repr=False)
class TokenPICache(PICache):
    """Nothing but the segment's token ids [tokens] int64: for methods that compute everything at link time."""

    token_ids: Tensor
    kind: ClassVar[str] = "tokens"

    def __post_init__(self) -> None:
        if self.token_ids.ndim != 1 or self.token_ids.dtype != torch.int64 or not len(self.token_ids):
            raise ValueError(
                f"TokenPICache expects token_ids [tokens >= 1] int64, got {list(self.token_ids.shape)} "
                f"{self.token_ids.dtype}"
            )

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@register_kind
@dataclass(frozen=True, eq=False, repr=False)
class DecoderPICache(PICache):
    """The decoder's own keys and values for one segment, compiled from position zero.

    Args:
        keys: one [kv_heads, tokens, key_head_dim] per decoder layer; layers may differ in all but tokens.
        values: one [kv_heads, tokens, value_head_dim] per decoder layer (MLA's differ from the keys' head_dim).
        token_ids: [tokens] int64, for methods that compute some of the tokens again; None for those that never do.
    """

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]
    token_ids: Tensor | None = None
    kind: ClassVar[str] = "decoder"

    def __post_init__(self) -> None:
        if not self.keys or len(self.keys) != len(self.values):
            raise ValueError(
                "DecoderPICache expects one key and one value tensor per decoder layer, "
                f"got {len(self.keys)} keys and {len(self.values)} values"
            )
        for layer, (key, value) in enumerate(zip(self.keys, self.values, strict=True)):
            fits = key.ndim == value.ndim == 3 and key.shape[:2] == value.shape[:2] and key.shape[1] >= 1
            if not fits or key.shape[1] != self.keys[0].shape[1]:
                raise ValueError(
                    "DecoderPICache expects keys and values [kv_heads, tokens >= 1, head_dim] with the same kv_heads "
                    "and tokens, and as many tokens in every layer; "
                    f"layer {layer} has {list(key.shape)} and {list(value.shape)}"
                )
        if self.token_ids is not None and self.token_ids.shape != (self.num_tokens,):
            raise ValueError(f"DecoderPICache expects token_ids [{self.num_tokens}], got {list(self.token_ids.shape)}")

    @property
    def num_tokens(self) -> int:
        return self.keys[0].shape[1]

    def tensors(self) -> dict[str, Tensor]:
        tensors = {f"keys.{layer}": tensor for layer, tensor in enumerate(self.keys)}
        tensors |= {f"values.{layer}": tensor for layer, tensor in enumerate(self.values)}
        return tensors if self.token_ids is None else {**tensors, "token_ids": self.token_ids}

    @classmethod
    def from_tensors(cls, fingerprint: str, tensors: Mapping[str, Tensor]) -> Self:
        token_ids = tensors.get("token_ids")
        count = len(tensors) - (token_ids is not None)
        if count % 2:
            raise ValueError(f"DecoderPICache expects as many keys as values, got {sorted(tensors)}")
        layers = range(count // 2)
        return cls(
            fingerprint,
            keys=tuple(tensors[f"keys.{layer}"] for layer in layers),
            values=tuple(tensors[f"values.{layer}"] for layer in layers),
            token_ids=token_ids,
        )


def content_key(
    token_ids: Sequence[int] | Tensor, *, fingerprint: str, method: str, dtype: torch.dtype | str, salt: str = ""
) -> str:
    """The PICache's key: `document_key`, and behind a hyphen a digest of all else that changes its content.

    Args:
        token_ids: the segment's ids, at least one, each >= 0.
        fingerprint: of model and adapter.
        method: name and parameters, e.g. "legolink:16".
        dtype: of the tensors; ``torch.float16`` and ``"float16"`` are the same.
        salt: separates tenants that must not share entries.

    Raises:
        ValueError: no ids, or an id that is not an integer >= 0.
    """
    return compiled_key(document_key(token_ids, salt), fingerprint, method, str(dtype).removeprefix("torch."))


def document_key(token_ids: Sequence[int] | Tensor, salt: str = "") -> str:
    """What the keys of all PICaches of a tenant's document begin with, whatever compiles it: sha256 hex.

    Raises ValueError as `content_key` does.
    """
    ids = token_ids.tolist() if isinstance(token_ids, Tensor) else list(token_ids)
    if not ids:
        raise ValueError("content_key expects at least one token id, got none; leave empty documents out")
    try:
        encoded = struct.pack(f"<{len(ids)}q", *ids)
    except struct.error as error:
        raise ValueError(f"content_key expects integer token ids, got {ids[:8]}...: {error}") from error
    if min(ids) < 0:
        raise ValueError(f"content_key expects token ids >= 0, got {min(ids)}")
    return framed_sha256([b"comb-document", salt.encode("utf-8", "surrogatepass"), encoded])


def compiled_key(key: str, *how: str) -> str:
    """The key of the document of `key`, compiled as `key` says and as `how` says."""
    made = framed_sha256(
        text.encode("utf-8", "surrogatepass") for text in ("comb-picache", str(KEY_VERSION), key, *how)
    )
    return f"{document_of(key)}-{made[:32]}"


def document_of(key: str) -> str:
    """The `document_key` that a PICache's key begins with."""
    return key.partition("-")[0]


def framed_sha256(parts: Iterable[bytes | memoryview]) -> str:
    """sha256 hex over length-prefixed parts, so that no two different inputs have the same encoding."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(struct.pack("<Q", len(part)))
        digest.update(part)
    return digest.hexdigest()


# ---- files: safetensors, so no pickle, and readable by any of its tools ----


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


def _checksum(metadata: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Of all that is used of a file, its padding aside: a changed byte anywhere else is noticed."""
    parts: list[bytes | memoryview] = []
    for name, text in sorted(metadata.items()):
        if name != "checksum":
            parts += [name.encode(), text.encode("utf-8", "surrogatepass")]
    for name, tensor in sorted(tensors.items()):
        parts += [name.encode(), f"{tensor.dtype}{list(tensor.shape)}".encode()]
        parts.append(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return framed_sha256(parts)
