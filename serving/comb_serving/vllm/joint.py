"""Joint attention inside vLLM: what a layer reads of documents is merged into what its own attention gave.

One softmax over several sets of keys is all their softmaxes, weighted by their denominators. A document's comes with
the attention to it (`comb.kernels.paged`). vLLM's own attention doesn't tell its denominator, so the row's own keys are
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
from comb.model.encoder import Rotary, apply_rotary
from comb_serving.vllm.linking.cache_access import CacheReader
from comb_serving.vllm.places import AlikeRows, StepPlaces
from comb_serving.vllm.rows import RequestDocuments

_AT_ONCE = 2**24
"""Scores of own keys that are computed at a time."""


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
        shape = len(output), self.attention.num_heads, self.attention.head_size
        output, places = output.view(shape), step.places(output.device)
        if not len(places.tokens):
            return
        rows = query.reshape(shape).index_select(0, places.tokens)
        if self.scale != 1.0:
            rows = rows * self.scale
        # one softmax over all: each part's share is that of its denominator, taken against the largest of them so far
        most = self.own_masses(rows, places)
        sums, mixed = torch.ones_like(most), output.index_select(0, places.tokens).float()
        for part in places.readings:
            if part.turn is None:  # documents are kept unmoved: queries are turned back by the place where each begins
                part.turn = self.rotary.turning(-part.starts[None])
            asked = rows.index_select(0, part.readers)
            asked = apply_rotary(asked.float().transpose(0, 1)[None], *part.turn)[0].transpose(0, 1).to(rows)
            mass = torch.empty(asked.shape[:2], dtype=torch.float32, device=asked.device)
            read = attend(asked, pool.layer(self.layer), part.batch, mass=mass)
            before, most = most, most.scatter_reduce(0, part.readers[:, None].expand_as(mass), mass, "amax")
            kept, more = torch.exp(before - most), torch.exp(mass - most.index_select(0, part.readers))
            sums = (sums * kept).index_add_(0, part.readers, more)
            mixed = (mixed * kept[..., None]).index_add_(0, part.readers, read.float() * more[..., None])
        output.index_copy_(0, places.tokens, (mixed / sums[..., None]).to(output))

    def own_masses(self, queries: Tensor, places: StepPlaces) -> Tensor:
        """Log of the denominators that vLLM's attention had for the tokens that read.

        queries [tokens, heads, head_dim], row behind row -> [tokens, heads] float32
        """
        table = get_forward_context().attn_metadata[self.attention.layer_name].block_table
        found = torch.empty(queries.shape[:2], dtype=torch.float32, device=queries.device)
        for alike in places.alike:
            heads_at_once = queries.shape[1] * alike.longest
            rows = max(1, _AT_ONCE // (heads_at_once * alike.count))
            tokens = max(1, _AT_ONCE // (heads_at_once * rows))
            for row, token in product(range(0, len(alike.index), rows), range(0, alike.count, tokens)):
                part = alike.part(row, row + rows, token, token + tokens)
                found[part.tokens] = self._masses(queries[part.tokens], part, table)
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
