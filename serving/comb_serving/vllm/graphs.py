"""CUDA graphs and documents: whole steps are replayed without documents only, pieces with and without.

Graphs are captured without documents, so one of a whole step holds no cross block: it is the plain backbone's. A step
with documents is one of pieces, between which cross blocks run, or of none. Both of vLLM's model runners decide by
asking an object of theirs, whose `dispatch` is wrapped here; seen in vLLM 0.32: `GPUModelRunner.cudagraph_dispatcher`
(V1) and `GPUModelRunner.cudagraph_manager` (V2).
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
