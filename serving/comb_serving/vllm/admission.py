"""Refuses requests whose documents can't be read, before they reach the engine: there they would stop everybody's.

vLLM asks logits processors whether they can work with a request's parameters; this one does nothing else.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.sample.logits_processor import LogitsProcessor

from comb_serving.vllm.pool import DocumentCheck


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
