"""Rows and documents for vLLM's V2 model runner, through the model state that a model class may bring."""

from __future__ import annotations

from typing import Any

from vllm.v1.attention.backend import AttentionCGSupport

from comb_serving.vllm.graphs import capture_blocks
from comb_serving.vllm.pool import create_pool, token_of


def with_documents(base: Any) -> type:
    """A subclass of the model state `base` that follows requests and sets the step in front of each forward pass."""

    class CombModelState(base):
        def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
            super().__init__(vllm_config, model, encoder_cache, device)
            self.documents = model.comb
            self.documents.pool = create_pool(model, vllm_config)
            capture_blocks(model, vllm_config, device)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            self.documents.add(new_req_data.req_id, token_of(new_req_data))

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            self.documents.remove(req_id)

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> dict[str, Any]:
            # runs of vLLM's own come here too, with made-up ids that no request has
            self.documents.begin(input_batch.req_ids, input_batch.query_start_loc_np)
            inputs: dict[str, Any] = super().prepare_inputs(input_batch, req_states)
            return inputs

        def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> dict[str, Any]:
            self.documents.begin_without()
            inputs: dict[str, Any] = super().prepare_dummy_inputs(num_reqs, num_tokens)
            return inputs

        def get_additional_cg_support(self) -> tuple[AttentionCGSupport, str | None]:
            if self.documents.full_graphs:
                found: tuple[AttentionCGSupport, str | None] = super().get_additional_cg_support()
                return found
            # another worker than comb's would replay whole steps for requests with documents
            return AttentionCGSupport.NEVER, "comb"

    CombModelState.__name__ = CombModelState.__qualname__ = f"Comb{base.__name__}"
    return CombModelState
