"""The decoder's side of the shared pool: how large it is, and which heads this rank keeps."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from typing import Any

import torch

from comb.model.config import CombEncoderConfig
from comb_serving.config.instance import read_secret
from comb_serving.config.serve_options import INSTANCE_DIR, ServeOptions, instance_dir, pool_path
from comb_serving.pool.capability import KEY, Capability
from comb_serving.pool.shared_pool import PoolLayout, SharedPool

logger = logging.getLogger(__name__)


def rank_layout(
    config: CombEncoderConfig, options: ServeOptions, *, cross_layers: int, dtype: str, ranks: int
) -> PoolLayout:
    """The pool of one of `ranks` ranks, the same for all. Raises ValueError if not even one block fits."""
    # more ranks than key/value heads: each head is kept by several ranks, which read it
    one = PoolLayout(
        cross_layers,
        max(1, config.num_key_value_heads // ranks),
        config.head_dim,
        num_blocks=1,
        block_size=options.pool_block,
        dtype=dtype,
        stored=options.pool_dtype,
        sink_tokens=config.sink_tokens,
    )
    blocks = options.pool_bytes // (one.nbytes * ranks)
    if blocks < 1:
        raise ValueError(
            f"a pool of {options.pool_bytes} bytes is less than one block of {one.block_size} tokens, "
            f"{one.nbytes * ranks} bytes: give more --comb-pool-bytes"
        )
    return replace(one, num_blocks=blocks)


def create_pool(model: Any, vllm_config: Any) -> SharedPool | None:
    """This rank's pool, made in the instance's folder; None if the instance has no folder, or is to have no pool."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    rank = get_tensor_model_parallel_rank()
    if not os.environ.get(INSTANCE_DIR):
        if rank == 0:
            logger.warning(
                "no %s: vLLM's own HTTP server drops `documents` of requests; `comb serve` has them", INSTANCE_DIR
            )
        return None
    options = ServeOptions.from_environment()
    if not options.has_pool:
        return None
    device = torch.device("cpu") if options.pool_memory == "host" else next(model.parameters()).device
    layout = rank_layout(
        model.comb_config,
        options,
        cross_layers=model.comb.blocks,
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        ranks=get_tensor_model_parallel_world_size(),
    )
    return SharedPool.create(pool_path(instance_dir(), rank), layout, device)


def token_of(request: Any) -> Any:
    """The signed capability that a request in vLLM carries; None where there is none, as in pooling requests."""
    parameters = request.sampling_params
    return None if parameters is None else (parameters.extra_args or {}).get(KEY)


def capability_of(token: object) -> Capability:
    """What a request carries. Raises ValueError unless this instance has signed it."""
    if not os.environ.get(INSTANCE_DIR):
        raise ValueError(f"{KEY}: this instance keeps no documents: start it with `comb serve`, or set {INSTANCE_DIR}")
    return Capability.verify(token, read_secret(instance_dir()))
