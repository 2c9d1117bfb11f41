"""Refuses requests whose documents can't be read, before they reach the engine: there they would stop everybody's.

vLLM asks logits processors whether they can work with a request's parameters; this one does nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor as LogitsProcessorV2

from comb_serving.vllm.decoder_pool import DocumentCheck


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
