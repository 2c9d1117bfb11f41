"""Joint attention inside vLLM: what a layer reads of documents is merged into what its own attention gave.

One softmax over two sets of keys is both softmaxes, weighted by their denominators. The documents' comes with the
attention to them (`comb.kernels.paged`). vLLM's own attention doesn't tell its denominator, so the row's own keys are
read once more out of vLLM's cache, by whatever layout the backend has: they are few, as documents aren't among them.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any, get_args

import torch
from torch import Tensor, nn
from vllm.forward_context import get_forward_context
from vllm.model_executor.layers.attention.attention import Attention
from vllm.utils.torch_utils import is_quantized_kv_cache

from comb.kernels.paged.attention import attend, masses
from comb_serving.vllm.linking.cache_access import CacheReader
from comb_serving.vllm.rows import AlikeRows, RequestDocuments

_AT_ONCE = 2**24
"""Scores of own keys that are computed at a time."""


class JointReader:
    """Has one of vLLM's attention layers read documents, by a hook behind it.

    Args:
        attention: vLLM's layer.
        layer: which of the pool's cross layers it reads.
        documents: of the running step.
        name: under which the op finds this again.
        keys: what reads vLLM's cache, shared by all layers.

    Raises:
        ValueError: for attention that scores otherwise than by a scaled product, or whose cache can't be read.
    """

    def __init__(
        self, attention: Attention, layer: int, documents: RequestDocuments, name: str, keys: CacheReader
    ) -> None:
        self.attention, self.layer, self.documents, self.name, self.keys = attention, layer, documents, name, keys
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
        shape = len(output), self.attention.num_heads, self.attention.head_size
        output, tokens = output.view(shape), step.tokens(output.device)
        rows = query.reshape(shape).index_select(0, tokens)
        if self.scale != 1.0:
            rows = rows * self.scale
        mass = torch.empty(rows.shape[:2], dtype=torch.float32, device=rows.device)
        read = attend(rows, pool.layer(self.layer), step.batch, mass=mass)
        share = torch.sigmoid(mass - self.own_masses(rows))[..., None].to(output)
        output.index_copy_(0, tokens, torch.lerp(output.index_select(0, tokens), read.to(output), share))

    def own_masses(self, queries: Tensor) -> Tensor:
        """Log of the denominators that vLLM's attention had for the step's rows; infinite for a token that reads none.

        queries [tokens, heads, head_dim], row behind row -> [tokens, heads] float32
        """
        table = get_forward_context().attn_metadata[self.attention.layer_name].block_table
        found = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        for group in self.documents.step.groups(queries.device):
            heads_at_once = queries.shape[1] * group.longest
            rows = max(1, _AT_ONCE // (heads_at_once * group.count))
            tokens = max(1, _AT_ONCE // (heads_at_once * rows))
            for row, token in product(range(0, len(group.index), rows), range(0, group.count, tokens)):
                part = group.part(row, row + rows, token, token + tokens)
                own = self._masses(queries[part.tokens], part, table)
                found[part.tokens] = own.masked_fill_(part.first[..., None], torch.inf)
        return found

    def _masses(self, queries: Tensor, rows: AlikeRows, table: Tensor) -> Tensor:
        """queries [rows, tokens, heads, head_dim] -> [rows, tokens, heads]"""
        places = torch.arange(rows.longest, device=queries.device)
        size = self.keys.block_size
        slots = table[rows.index][:, places // size].long() * size + places % size
        # places behind a row's end are read somewhere else, and hidden
        keys = self.keys.first(self.attention, slots.flatten()).unflatten(0, slots.shape)
        hidden = places > rows.at[..., None]
        if self.window is not None:
            hidden |= places <= rows.at[..., None] - self.window
        return masses(queries, keys, hidden)


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
