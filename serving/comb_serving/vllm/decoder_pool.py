"""The decoder's side of the shared pool: how large it is, and which heads this rank keeps."""

from __future__ import annotations

import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from comb.model.config import CombEncoderConfig
from comb_serving.config.instance import read_secret
from comb_serving.config.serve_options import INSTANCE_DIR, ServeOptions, instance_dir, pool_path
from comb_serving.pool.capability import KEY, Capability
from comb_serving.pool.shared_pool import PoolLayout, SharedPool

logger = logging.getLogger(__name__)


def own_path(rank: int = 0) -> Path | None:
    """Where the pool of a tensor-parallel rank is; None for an instance without documents."""
    return pool_path(instance_dir(), rank) if os.environ.get(INSTANCE_DIR) else None


def rank_layout(
    config: CombEncoderConfig, *, cross_layers: int, dtype: str, ranks: int, total: int, block_size: int,
    stored: str = "auto",
) -> PoolLayout:  # fmt: skip
    """The pool of one of `ranks` ranks, when all pools together may take `total` bytes; the same for all ranks.

    Raises:
        ValueError: if not even one block fits.
    """
    # more ranks than key/value heads: each head is kept by several ranks, which read it
    one = PoolLayout(
        cross_layers,
        max(1, config.num_key_value_heads // ranks),
        config.head_dim,
        num_blocks=1,
        block_size=block_size,
        dtype=dtype,
        stored=stored,
        sink_tokens=config.sink_tokens,
    )
    blocks = total // (one.nbytes * ranks)
    if blocks < 1:
        raise ValueError(
            f"a pool of {total} bytes is less than one block of {block_size} tokens, {one.nbytes * ranks} bytes: give "
            "more --comb-pool-bytes"
        )
    return replace(one, num_blocks=blocks)


def create_pool(model: Any, vllm_config: Any) -> SharedPool | None:
    """This rank's pool, made in the instance's folder; None if the instance has no folder, or is to have no pool."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

    path, ranks = own_path(get_tensor_model_parallel_rank()), get_tensor_model_parallel_world_size()
    if path is None and get_tensor_model_parallel_rank() == 0:
        logger.warning(
            "no %s: vLLM's own HTTP server drops `documents` of requests; `comb serve` has them", INSTANCE_DIR
        )
    if path is None or not (options := ServeOptions.from_environment()).has_pool:
        return None
    device = torch.device("cpu") if options.pool_memory == "host" else next(model.parameters()).device
    layout = rank_layout(
        model.comb_config,
        cross_layers=model.comb.blocks,
        dtype=str(vllm_config.model_config.dtype).removeprefix("torch."),
        ranks=ranks,
        total=options.pool_bytes,
        block_size=options.pool_block,
        stored=options.pool_dtype,
    )
    return SharedPool.create(path, layout, device)


def token_of(request: Any) -> Any:
    """The signed capability that a request in vLLM carries; None where there is none, as in pooling requests."""
    parameters = request.sampling_params
    return None if parameters is None else (parameters.extra_args or {}).get(KEY)


def capability_of(token: object) -> Capability:
    """What a request carries. Raises ValueError unless this instance has signed it."""
    if not os.environ.get(INSTANCE_DIR):
        raise ValueError(f"{KEY}: this instance keeps no documents: start it with `comb serve`, or set {INSTANCE_DIR}")
    return Capability.verify(token, read_secret(instance_dir()))
