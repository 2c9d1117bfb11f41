"""The worker of vLLM's V1 model runner: makes the pool, and says in front of each step which row is whose."""

from __future__ import annotations

from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size
from vllm.forward_context import get_forward_context
from vllm.v1.worker.gpu_worker import Worker

from comb_serving.vllm.pool import create_pool
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
        names = self.runner.input_batch.req_ids
        for name in names:
            parameters = self.runner.requests[name].sampling_params
            self.documents.add(name, None if parameters is None else parameters.extra_args)
        self.documents.keep(names)
        self.documents.begin(names, self.runner.query_start_loc.np)


class PoolOwner:
    """The part of the worker that doesn't depend on the platform; mixed into vLLM's."""

    model_runner: Any
    vllm_config: Any
    comb_documents: RequestDocuments | None = None

    def load_model(self, **options: Any) -> None:
        """Loads the model, then makes this rank's pool, so that memory profiling sees it."""
        super().load_model(**options)  # type: ignore[misc]
        model = self.model_runner.get_model()
        self.comb_documents = model.comb
        model.comb.pool = create_pool(
            model,
            self.vllm_config.model_config.dtype,
            rank=get_tensor_model_parallel_rank(),
            ranks=get_tensor_model_parallel_world_size(),
        )
        model.register_forward_pre_hook(RunnerRows(self.model_runner, model.comb))
        model.register_forward_hook(lambda *_: model.comb.end())

    def shutdown(self) -> None:
        """Removes the pool's files."""
        super().shutdown()  # type: ignore[misc]
        if self.comb_documents is not None and self.comb_documents.pool is not None:
            self.comb_documents.pool.close()


class CombGPUWorker(PoolOwner, Worker):
    """For GPUs."""
