"""Workers: the one of vLLM's V1 model runner makes the pool, and says in front of each step which row is whose."""

from __future__ import annotations

from typing import Any

from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu_worker import Worker
from vllm.v1.worker.worker_base import CompilationTimes

from comb_serving.vllm.fixed_weights import FixedWeights
from comb_serving.vllm.graphs import capture_blocks, without_full_v1, without_full_v2
from comb_serving.vllm.pool import create_pool, token_of
from comb_serving.vllm.rows import RequestDocuments


class RunnerRows:
    """A hook in front of the model's forward: reads the V1 runner's batch.

    Args:
        runner: vLLM's `GPUModelRunner`.
        documents: what the model's cross blocks look at.
    """

    def __init__(self, runner: Any, documents: RequestDocuments) -> None:
        self.runner, self.documents = runner, documents

    def __call__(self, *_: Any) -> None:
        """Sets the step. Runs without attention metadata are vLLM's own (profiling): no documents."""
        if get_forward_context().attn_metadata is None:
            self.documents.begin_without()
            return
        self.follow()
        batch = self.runner.input_batch
        self.documents.begin(batch.req_ids, self.runner.query_start_loc.np)

    def follow(self) -> bool:
        """Looks up the documents of the requests that are scheduled; whether there are any."""
        names = self.runner.input_batch.req_ids
        for name in names:
            self.documents.add(name, token_of(self.runner.requests[name]))
        self.documents.keep(names)
        return self.documents.known


class PoolOwner(FixedWeights):
    """The part of the worker that doesn't depend on the platform; mixed into vLLM's."""

    model_runner: Any
    vllm_config: Any
    comb_documents: RequestDocuments | None = None
    comb_rows: RunnerRows

    def load_model(self, **options: Any) -> None:
        """Loads the model, then makes this rank's pool, so that memory profiling sees it."""
        super().load_model(**options)
        model = self.model_runner.get_model()
        self.comb_documents = model.comb
        model.comb.pool = create_pool(model, self.vllm_config)
        self.comb_rows = RunnerRows(self.model_runner, model.comb)
        model.register_forward_pre_hook(self.comb_rows)
        model.register_forward_hook(lambda *_: model.comb.end())

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
        without_full_v1(self.model_runner.cudagraph_dispatcher, self.comb_rows.follow)


class CombGPUWorkerV2(FixedWeights, Worker):
    """For GPUs and vLLM's V2 model runner, whose model state (`state`) does all but this."""

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
