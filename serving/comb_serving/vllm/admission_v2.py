"""As `admission`, for vLLM's V2 model runner, whose logits processors are another class."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsProcessor

from comb_serving.vllm.pool import DocumentCheck


class DocumentCheckV2(DocumentCheck, LogitsProcessor):
    """Changes no logits; vLLM asks it about each request's parameters."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        pass

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """False: no request's logits are changed."""
        return False

    def apply(self, logits: Tensor, ctx: Any) -> Tensor:
        """The same logits."""
        return logits
