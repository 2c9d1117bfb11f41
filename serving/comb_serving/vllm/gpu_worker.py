"""Workers: they make the pool, and say in front of each step which row is whose, in vLLM's V1 and V2 model runners.

CUDA graphs of whole steps are replayed without documents only, those of pieces with and without: they are captured
without documents, so one of a whole step holds no cross block, it is the plain backbone's. A step with documents is one
of pieces, between which cross blocks run, or of none. Both model runners decide by asking an object of theirs, whose
`dispatch` is wrapped here; seen in vLLM 0.32 and 0.33: `GPUModelRunner.cudagraph_dispatcher` (V1) and
`GPUModelRunner.cudagraph_manager` (V2).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial, wraps
from typing import Any

import torch
from vllm.compilation.breakable_cudagraph import is_breakable_cudagraph_enabled
from vllm.compilation.cuda_graph import CUDAGraphOptions, CUDAGraphWrapper
from vllm.config import CUDAGraphMode
from vllm.forward_context import get_forward_context
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from comb_serving.vllm.decoder_pool import create_pool, token_of
from comb_serving.vllm.fixed_weights import FixedWeights
from comb_serving.vllm.rows import RequestDocuments


def without_full_v1(dispatcher: Any, with_documents: Callable[[], bool]) -> None:
    """Has a V1 runner's dispatcher find no graph of a whole step for a step with documents."""
    dispatch = dispatcher.dispatch

    @wraps(dispatch)
    def found(*given: Any, invalid_modes: Any = None, **named: Any) -> Any:
        if with_documents():
            invalid_modes = {*(invalid_modes or ()), CUDAGraphMode.FULL}
        return dispatch(*given, invalid_modes=invalid_modes, **named)

    dispatcher.dispatch = found


def without_full_v2(manager: Any, with_documents: Callable[[], bool]) -> None:
    """As `without_full_v1`, for the manager of a V2 runner."""
    dispatch = manager.dispatch

    @wraps(dispatch)
    def found(
        num_reqs: int, num_tokens: int, uniform_token_count: int | None, *given: Any,
        max_query_len: int | None = None, **named: Any,
    ) -> Any:  # fmt: skip
        if not with_documents():
            return dispatch(num_reqs, num_tokens, uniform_token_count, *given, max_query_len=max_query_len, **named)
        # graphs of whole decode steps take batches of one length or bounded ones: this one doesn't say that it is
        graph = dispatch(num_reqs, num_tokens, None, *given, max_query_len=None, **named)
        if graph.cg_mode != CUDAGraphMode.FULL:
            return graph
        return replace(graph, cg_mode=CUDAGraphMode.NONE, num_tokens=num_tokens, num_reqs=num_reqs)

    manager.dispatch = found


def capture_blocks(model: Any, vllm_config: Any, device: torch.device) -> None:
    """Has the parts of cross blocks beside attention captured, where vLLM captures its own pieces.

    Not with breakable graphs: there vLLM is in the middle of a capture of its own, and blocks run as they are.
    """
    if not vllm_config.compilation_config.cudagraph_mode.has_piecewise_cudagraphs() or is_breakable_cudagraph_enabled():
        return
    tokens = vllm_config.scheduler_config.max_num_batched_tokens
    model.comb.room = torch.zeros(tokens, 1, dtype=torch.bool, device=device)
    graph = partial(
        CUDAGraphWrapper,
        vllm_config=vllm_config,
        runtime_mode=CUDAGraphMode.PIECEWISE,
        # what one part returns is read by the next; there are many of them, as of vLLM's own pieces
        cudagraph_options=CUDAGraphOptions(debug_log_enable=False, gc_disable=True, weak_ref_output=False),
    )
    for block in model.comb_blocks.values():
        block.capture(graph)


class PoolOwner(FixedWeights):
    """The part of the V1 workers that doesn't depend on the platform; mixed into vLLM's."""

    model_runner: Any
    comb_documents: RequestDocuments | None = None  # what the model's cross blocks look at

    def load_model(self, **options: Any) -> None:
        """Loads the model, then makes this rank's pool, so that memory profiling sees it."""
        super().load_model(**options)
        model = self.model_runner.get_model()
        self.comb_documents = documents = model.comb
        documents.pool = create_pool(model, self.vllm_config)

        def begin(*_: Any) -> None:
            if get_forward_context().attn_metadata is None:  # vLLM's own run (profiling)
                documents.begin_without()
                return
            self.comb_follow()
            batch = self.model_runner.input_batch
            documents.begin(batch.req_ids, self.model_runner.query_start_loc.np, batch.num_computed_tokens_cpu)

        model.register_forward_pre_hook(begin)
        model.register_forward_hook(lambda *_: documents.end())

    def comb_follow(self) -> bool:
        """Looks up the documents of the requests that are scheduled; whether there are any."""
        assert self.comb_documents is not None
        names = self.model_runner.input_batch.req_ids
        for name in names:
            request = self.model_runner.requests[name]
            self.comb_documents.add(name, token_of(request), request.prompt_token_ids)
        self.comb_documents.keep(names)
        return self.comb_documents.known

    def shutdown(self) -> None:
        """Removes the pool's files."""
        super().shutdown()  # type: ignore[misc]
        if self.comb_documents is not None and self.comb_documents.pool is not None:
            self.comb_documents.pool.close()


class CombGPUWorker(PoolOwner, Worker):
    """For GPUs."""

    def load_model(self, **options: Any) -> None:
        """As `PoolOwner`'s; cross blocks take part in graphs."""
        super().load_model(**options)
        capture_blocks(self.model_runner.get_model(), self.vllm_config, self.device)
        without_full_v1(self.model_runner.cudagraph_dispatcher, self.comb_follow)


class CombGPUWorkerV2(FixedWeights, Worker):
    """For GPUs and vLLM's V2 model runner, whose model state (`with_documents`) does all but this."""

    def load_model(self, **options: Any) -> None:
        """As vLLM's, and promises what `compile_or_warm_up_model` does: vLLM asks before."""
        super().load_model(**options)
        self.model_runner.get_model().comb.full_graphs = True

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """As vLLM's; steps with documents are kept out of the graphs of whole steps that it has captured."""
        times = super().compile_or_warm_up_model()
        if self.model_runner.cudagraph_manager is not None:
            documents = self.model_runner.get_model().comb
            without_full_v2(self.model_runner.cudagraph_manager, lambda: documents.known)
        return times


def with_documents(base: Any) -> type:
    """For V2: a subclass of the model state `base`, which follows requests and sets the step before each forward."""

    class CombModelState(base):
        def __init__(self, vllm_config: Any, model: Any, encoder_cache: Any, device: Any) -> None:
            super().__init__(vllm_config, model, encoder_cache, device)
            self.documents = model.comb
            self.documents.pool = create_pool(model, vllm_config)
            capture_blocks(model, vllm_config, device)

        def add_request(self, req_index: int, new_req_data: Any) -> None:
            super().add_request(req_index, new_req_data)
            self.documents.add(new_req_data.req_id, token_of(new_req_data), new_req_data.prompt_token_ids)

        def remove_request(self, req_id: str) -> None:
            super().remove_request(req_id)
            self.documents.remove(req_id)

        def prepare_inputs(self, input_batch: Any, req_states: Any) -> Any:
            # runs of vLLM's own come here too, with made-up ids that no request has
            self.documents.begin(
                input_batch.req_ids, input_batch.query_start_loc_np, input_batch.num_computed_tokens_np
            )
            return super().prepare_inputs(input_batch, req_states)

        def prepare_dummy_inputs(self, num_reqs: int, num_tokens: int) -> Any:
            self.documents.begin_without()
            return super().prepare_dummy_inputs(num_reqs, num_tokens)

        def get_additional_cg_support(self) -> Any:
            if self.documents.full_graphs:
                return super().get_additional_cg_support()
            # another worker than comb's would replay whole steps for requests with documents
            return AttentionCGSupport.NEVER, "comb"

    CombModelState.__name__ = CombModelState.__qualname__ = f"Comb{base.__name__}"
    return CombModelState
