"""vLLM's LoRAs as documents see them: under each of them a document has other keys and values, and another name."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from comb.documents.catalog import KeyedSegment

FILES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")  # that vLLM reads


class Loras:
    """The LoRAs of an engine.

    Args:
        known: vLLM's `LoRARequest`s by the name that requests have for them; may grow.
    """

    def __init__(self, known: dict[str, Any] | None = None) -> None:
        self.known: dict[str, Any] = {} if known is None else known
        self._digests: dict[str, tuple[Any, str]] = {}

    def add(self, requests: Iterable[Any]) -> None:
        """Takes more of them."""
        for request in requests:
            if (before := self.known.get(request.lora_name)) is None or before.lora_path != request.lora_path:
                self.known[request.lora_name] = request

    def get(self, name: str) -> Any:
        """vLLM's request for one; None for the model without any."""
        return self.known.get(name)

    def name_of(self, body: Mapping[str, Any]) -> str:
        """The LoRA that a request asks for by its `model`; empty for none."""
        model = body.get("model")
        return model if isinstance(model, str) and model in self.known else ""

    async def compiled_with(self, name: str, segments: Sequence[KeyedSegment]) -> tuple[KeyedSegment, ...]:
        """Documents under the names that they have with a LoRA, which say what its files hold.

        Raises:
            ValueError: for one whose files can't be read.
        """
        if not name or not segments:
            return tuple(segments)
        request, digest = self._digests.get(name, (None, ""))
        if request is not self.known[name]:
            request = self.known[name]
            digest = await asyncio.to_thread(_digest, request)
            self._digests[name] = request, digest
        return tuple(replace(segment, key=key_computed(segment.key, digest)) for segment in segments)


def key_computed(key: str, how: str) -> str:
    """The name of a document's tokens when they are computed in another way than `key` says."""
    return hashlib.sha256(f"{key} {how}".encode()).hexdigest()


def _digest(request: Any) -> str:
    """Of the files of a LoRA."""
    from vllm.lora.utils import get_adapter_absolute_path  # as vLLM itself finds them, on the Hub too

    folder, found = Path(get_adapter_absolute_path(request.lora_path)), hashlib.sha256()
    there = [path for name in FILES if (path := folder / name).is_file()]
    try:
        for path in there:
            with path.open("rb") as file:
                found.update(f"{path.name} {hashlib.file_digest(file, 'sha256').hexdigest()}\n".encode())
    except OSError as error:
        raise ValueError(f"LoRA {request.lora_name!r} can't be read: {error}") from error
    if not there:
        raise ValueError(f"LoRA {request.lora_name!r}: {folder} holds none of {', '.join(FILES)}")
    return found.hexdigest()
