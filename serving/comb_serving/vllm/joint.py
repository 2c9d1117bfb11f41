"""Joint attention inside vLLM: what a layer reads of documents is mixed into what its own attention gave.

`comb.kernels.joint` computes; the row's own keys are looked up in vLLM's cache, by whatever layout the backend has.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache

from comb.kernels.joint.attention import join_
from comb.kernels.joint.batch import OwnKeys
from comb.model.encoder import Rotary
from comb_serving.vllm.linking.cache_access import CacheReader
from comb_serving.vllm.rows import RequestDocuments


class JointReader:
    """Has one of vLLM's attention layers read documents, by a hook behind it.

    Args:
        attention: vLLM's layer.
        layer: which of the pool's cross layers it reads.
        documents: of the running step.
        name: under which the op finds this again.
        keys: what reads vLLM's cache, and rotary: what turns queries; shared by all layers.

    Raises:
        ValueError: for attention that scores otherwise than by a scaled product, or whose cache can't be read.
    """

    def __init__(
        self,
        attention: Attention,
        layer: int,
        documents: RequestDocuments,
        name: str,
        keys: CacheReader,
        rotary: Rotary,
    ) -> None:
        self.attention, self.layer, self.documents, self.name, self.keys = attention, layer, documents, name, keys
        self.rotary = rotary
        impl: Any = attention.impl
        for what in ("alibi_slopes", "logits_soft_cap", "sinks"):
            found = getattr(impl, what, None)
            if found is not None and not (isinstance(found, int | float) and found == 0):
                raise ValueError(f"joint attention isn't served with {what}: {attention.layer_name} has them")
        if is_quantized_kv_cache(attention.kv_cache_dtype):
            raise ValueError(
                f"joint attention reads a row's own keys out of vLLM's cache, which is {attention.kv_cache_dtype} "
                "here: leave kv_cache_dtype alone"
            )
        if not _has_block_tables(attention.attn_backend):
            raise ValueError(
                "joint attention looks up a row's own keys by its block table, which "
                f"{attention.attn_backend.get_name()} doesn't hand on: choose another attention backend, such as "
                "FLASH_ATTN or TRITON_ATTN"
            )
        self.window = getattr(attention, "sliding_window", None)
        # scores of documents are taken with the usual scale
        self.scale = float(impl.scale) * math.sqrt(attention.head_size)
        attention.register_forward_hook(self.read)

    def check_cache(self) -> None:
        """Looks into vLLM's cache, once it is there. Raises ValueError if keys aren't found in it."""
        self.keys.first(self.attention, torch.zeros(1, dtype=torch.long, device=self.attention.kv_cache.device))

    def read(self, _: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The layer's output [tokens, heads * head_dim], with documents in the rows that have any."""
        torch.ops.vllm.comb_cross_block(output, args[0], self.name)
        return output

    def mix_(self, output: Tensor, query: Tensor) -> None:
        """What the op does: nothing, unless a row of this step has documents."""
        step, pool = self.documents.step, self.documents.pool
        if not step.rows or pool is None:
            return
        self.documents.mixed += 1
        batches = step.places(output.device).batches
        if not batches:
            return
        shape = len(output), self.attention.num_heads, self.attention.head_size
        layer, own = pool.layer(self.layer), self.own_keys()
        for batch in batches:
            # documents are kept unmoved: queries are turned back by the place where each begins
            join_(output.view(shape), query.reshape(shape), layer, own, batch, self.rotary.turning, self.scale)

    def own_keys(self) -> OwnKeys:
        """Where this layer's keys of the step's requests are."""
        table = get_forward_context().attn_metadata[self.attention.layer_name].block_table
        keys, size = self.keys.first_view(self.attention), self.keys.block_size
        if keys is not None and keys.stride(-1) != 1:
            keys = None
        return OwnKeys(table, size, keys, partial(self.keys.first, self.attention), self.window)


def _has_block_tables(backend: Any) -> bool:
    """Whether the backend's metadata of a step has the block table of each row."""
    bases = getattr(backend.get_builder_cls(), "__orig_bases__", ())
    return any("block_table" in getattr(made, "__annotations__", ()) for base in bases for made in get_args(base))


def attention_of(layer: nn.Module) -> Attention:
    """The one attention of a decoder layer of vLLM's. Raises ValueError if there is none, or more than one."""
    found = [module for module in layer.modules() if isinstance(module, Attention)]
    if len(found) != 1:
        raise ValueError(f"joint attention needs one attention in a {type(layer).__name__}, which has {len(found)}")
    return found[0]
