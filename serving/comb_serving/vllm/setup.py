"""What serving a comb checkpoint needs changed in vLLM's configuration, through its hook per architecture."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.models.config import VerifyAndUpdateConfig
from vllm.platforms import current_platform

from comb_serving.vllm import OP
from comb_serving.vllm.fixed_weights import check_no_transfer

# connectors that find caches by block hashes, to which the salt of documents belongs; others go by token ids
SALTED_CONNECTORS = ("OffloadingConnector", "SimpleCPUOffloadConnector")
SCHEDULER = "comb_serving.vllm.scheduler.make_scheduler"
WORKER = "comb_serving.vllm.gpu_worker.CombGPUWorker"
WORKER_V2 = "comb_serving.vllm.gpu_worker.CombGPUWorkerV2"
WORKER_CPU = "comb_serving.vllm.cpu_worker.CombCPUWorker"


def config_hook(backbone: type[VerifyAndUpdateConfig] | None) -> type[VerifyAndUpdateConfig]:
    """The hook of ``Comb<architecture>``, which runs the backbone architecture's own first."""

    class CombSetup(VerifyAndUpdateConfig):
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            if backbone is not None:
                backbone.verify_and_update_config(vllm_config)
            set_up(vllm_config)

        @staticmethod
        def verify_and_update_model_config(model_config: Any) -> None:
            if backbone is not None and hasattr(backbone, "verify_and_update_model_config"):
                backbone.verify_and_update_model_config(model_config)

    return CombSetup


def set_up(vllm_config: Any) -> None:
    """Names the worker, and the scheduler, which checks requests.

    Raises:
        ValueError: for features that documents don't work with.
    """
    parallel, model = vllm_config.parallel_config, vllm_config.model_config
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if getattr(parallel, name) > 1:
            raise ValueError(f"comb checkpoints are served with {name} 1, not {getattr(parallel, name)}")
    if parallel.enable_dbo:
        raise ValueError("comb checkpoints are served without enable_dbo: halves of a batch would read wrong documents")
    if vllm_config.speculative_config is not None:
        raise ValueError("comb checkpoints are served without speculative decoding: drafts would not see documents")
    if model.hf_config.model_type == "gpt_oss":
        raise ValueError("documents don't work with gpt-oss yet: vLLM renders its prompts in a way of their own")
    if model.enable_sleep_mode or model.enable_cumem_allocator:
        raise ValueError(
            "comb checkpoints are served without sleep mode and its allocator (enable_sleep_mode, "
            "enable_cumem_allocator): such memory can't be shared with the encoder"
        )
    check_no_transfer(vllm_config)
    transfer, cache = vllm_config.kv_transfer_config, vllm_config.cache_config
    connector = None if transfer is None else transfer.kv_connector
    if cache.kv_offloading_size is not None and cache.kv_offloading_backend != "native":
        connector = cache.kv_offloading_backend
    if connector is not None and connector not in SALTED_CONNECTORS:
        raise ValueError(
            f"comb checkpoints are served without the KV connector {connector}, which knows caches by their tokens "
            f"alone and would mix documents: leave it away, or choose one of {', '.join(SALTED_CONNECTORS)}"
        )
    compilation = vllm_config.compilation_config
    # graphs that aren't cut at the cross blocks would be replayed without documents
    if not vllm_config.model_config.enforce_eager:
        if compilation.splitting_ops is not None and f"vllm::{OP}" not in compilation.splitting_ops:
            raise ValueError(
                f"graphs must be cut at the cross blocks: add vllm::{OP} to splitting_ops, or leave it alone"
            )
        if compilation.pass_config.fuse_attn_quant:
            raise ValueError(
                "comb checkpoints are served without fuse_attn_quant: graphs would not be cut at cross blocks"
            )
    v2 = bool(vllm_config.use_v2_model_runner)
    scheduler = vllm_config.scheduler_config
    if scheduler.scheduler_cls not in (None, SCHEDULER):
        raise ValueError(f"comb checkpoints need their own scheduler, not {scheduler.scheduler_cls}: leave it alone")
    scheduler.scheduler_cls = SCHEDULER
    worker = WORKER_CPU if current_platform.is_cpu() else WORKER_V2 if v2 else WORKER
    if v2 and not current_platform.is_cuda_alike():
        return  # the model's state object knows the rows
    if parallel.worker_cls == "auto":
        parallel.worker_cls = worker
    elif parallel.worker_cls != worker:
        raise ValueError(f"comb checkpoints need their own worker, not {parallel.worker_cls}: leave worker_cls alone")
