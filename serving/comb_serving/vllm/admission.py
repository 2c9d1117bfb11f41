"""Refuses requests whose documents can't be read, before they reach the engine: there they would stop everybody's.

vLLM asks logits processors whether they can work with a request's parameters; this one does nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from comb_serving.pool.capability import KEY, unpack
from comb_serving.pool.shared_pool import PoolLayout, manifest_of
from comb_serving.vllm.decoder_pool import capability_of, own_path


class DocumentCheck:
    """What vLLM asks its logits processors about each request; below is one for each of its model runners."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Raises ValueError, which is status 400 over HTTP, for what no request of this instance may carry."""
        check_arguments(sampling_params.extra_args)


def check_arguments(extra_args: Mapping[str, Any] | None) -> None:
    """Raises ValueError for documents that the front hasn't signed, or that this instance's pool can't have."""
    given = extra_args or {}
    for name in ("kv_transfer_params", "ec_transfer_params"):
        if given.get(name):
            raise ValueError(f"{name} is not taken: it would name caches of other requests")
    if given.get(KEY) is None:
        return
    numbers = capability_of(given[KEY]).documents
    if not numbers:
        return
    path = own_path()
    if path is None or not manifest_of(path).exists():
        raise ValueError("this instance keeps no documents: start it with `comb serve`")
    unpack(numbers, PoolLayout(**json.loads(manifest_of(path).read_text())))


class DocumentCheckV1(DocumentCheck, LogitsProcessor):
    """For vLLM's V1 model runner."""

    def __init__(self, vllm_config: Any, device: Any, is_pin_memory: bool) -> None:
        pass

    def is_argmax_invariant(self) -> bool:
        """True, so that greedy decoding doesn't even call `apply`."""
        return True

    def update_state(self, batch_update: Any) -> None:
        """Keeps no state."""

    def apply(self, logits: Tensor) -> Tensor:
        """The same logits."""
        return logits


class DocumentCheckV2(DocumentCheck, LogitsProcessorV2):
    """For vLLM's V2 model runner, whose logits processors are another class."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: no request's logits are changed."""
        return False

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """The same logits."""
        return logits
