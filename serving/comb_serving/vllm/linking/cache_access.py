"""Keys and values in and out of vLLM's cache, for whatever attention backend has it.

What a backend writes, its own writer writes here too. Where it puts things is found out once: numbers are written into
scratch blocks through that writer and looked for. So packing, head order and strides of no backend are assumed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.platforms import current_platform

from comb_serving.vllm.linking.setup import FP8, link_tokens_of
from comb_serving.vllm.linking.states import StateLayer, is_linear, state_layer

_DIGIT = 128  # numbers that every dtype of a cache holds exactly
_FP8_DIGIT = 8


@dataclass(frozen=True)
class TokenShape:
    """What a layer caches of a token: keys and values [heads, dim], or MLA's latent [rank] and rotary keys [1, dim]."""

    parts: tuple[tuple[int, ...], tuple[int, ...]]  # shapes of the tensors that its writer takes
    rotated: int  # which of them holds keys with rotary positions

    @property
    def width(self) -> int:
        """Numbers per token."""
        return sum(math.prod(part) for part in self.parts)

    def split(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Views of [T, width] as the two parts [T, *part]."""
        first, second = rows.split([math.prod(part) for part in self.parts], dim=-1)
        return first.unflatten(-1, self.parts[0]), second.unflatten(-1, self.parts[1])


@dataclass(frozen=True)
class TokenCodes:
    """How a layer's cache writes numbers: as they are, or as bytes of fp8 times a scale."""

    dtype: torch.dtype  # of the model
    fp8: torch.dtype | None = None  # of the cache; None where that is the model's own
    scales: tuple[float, float] = (1.0, 1.0)  # of keys and values (or MLA's two parts)

    @classmethod
    def of(cls, layer: Any, dtype: torch.dtype) -> TokenCodes:
        """Those of a layer, whose weights are loaded. Raises ValueError for another kind of cache."""
        name = getattr(layer, "kv_cache_dtype", "auto")
        if name not in FP8:
            return cls(dtype)
        if layer._k_scale.numel() != 1 or layer._v_scale.numel() != 1:
            raise ValueError("documents are linked in an fp8 cache with one scale a layer, and this one has several")
        fp8 = torch.float8_e5m2 if name == "fp8_e5m2" else current_platform.fp8_dtype()
        return cls(dtype, fp8, (float(layer._k_scale), float(layer._v_scale)))

    @property
    def stored(self) -> torch.dtype:
        """Of what is kept of the cache."""
        return self.dtype if self.fp8 is None else torch.uint8

    def numbers(self, part: Tensor, place: int) -> Tensor:
        """What the cache's first part (0) of tokens says, or its second, in the model's dtype."""
        return part if self.fp8 is None else (part.view(self.fp8).float() * self.scales[place]).to(self.dtype)

    def codes(self, part: Tensor, place: int) -> Tensor:
        """The inverse of `numbers`; what is beyond fp8 is its largest."""
        if self.fp8 is None:
            return part
        largest = torch.finfo(self.fp8).max
        return (part.float() / self.scales[place]).clamp(-largest, largest).to(self.fp8).view(torch.uint8)


def cached_layers(vllm_config: Any, *, states: bool = False) -> dict[str, Any]:
    """Attention layers with a cache of their own, by name, in the model's order; `states`: linear ones are linked too.

    Raises ValueError if there is none, or one of a kind that isn't known here.
    """
    known = vllm_config.compilation_config.static_forward_context
    found = {}
    for name, layer in known.items():
        if not isinstance(layer, Attention | MLAAttention):
            if states and is_linear(layer):
                continue
            if is_linear(layer):
                front = "adapter" if link_tokens_of(vllm_config) else "prose"
                raise ValueError(
                    f"this method links attention layers, and {name} is a {type(layer).__name__}, which keeps a state: "
                    f"use --method hypic:8,front={front}"
                )
            if hasattr(layer, "get_kv_cache_spec") and layer.get_kv_cache_spec(vllm_config) is not None:
                raise ValueError(f"documents are linked in attention layers; {name} is a {type(layer).__name__}")
        elif getattr(layer, "kv_sharing_target_layer_name", None) is None:
            found[name] = layer
    if not found:
        raise ValueError("this model has no attention layer with a KV cache to link: use --method full")
    return found


def linear_layers(vllm_config: Any) -> dict[str, StateLayer]:
    """Layers that keep a state, by name, in the model's order.

    Raises ValueError if there is none, or one whose states can't be linked.
    """
    known = vllm_config.compilation_config.static_forward_context
    found = {name: state_layer(name, layer) for name, layer in known.items() if is_linear(layer)}
    if not found:
        raise ValueError("hypic is for hybrid models, and this one has no linear layers: use --method legolink:16")
    return found


def token_shape(layer: Any) -> TokenShape:
    """What a layer caches of a token."""
    if isinstance(layer, MLAAttention):
        return TokenShape(((layer.kv_lora_rank,), (1, layer.qk_rope_head_dim)), rotated=1)
    values = getattr(layer, "head_size_v", layer.head_size)
    return TokenShape(((layer.num_kv_heads, layer.head_size), (layer.num_kv_heads, values)), rotated=0)


def write(layer: Any, first: Tensor, second: Tensor, slots: Tensor, cache: Tensor | None = None) -> None:
    """Writes tokens [T, *part] to slots [T] of a layer's cache (or of scratch blocks like it)."""
    cache = layer.kv_cache if cache is None else cache
    first, second = first.contiguous(), second.contiguous()
    if isinstance(layer, MLAAttention):
        layer.impl.do_kv_cache_update(first, second, cache, slots, layer.kv_cache_dtype, layer._k_scale)
    else:
        layer.impl.do_kv_cache_update(layer, first, second, cache, slots)


class CacheReader:
    """Reads tokens out of caches with blocks of one size; layers whose caches look alike share what was found out."""

    def __init__(self, block_size: int, codes: Mapping[Any, TokenCodes]) -> None:
        self.block_size, self._codes = block_size, codes
        self._places: dict[tuple[Any, ...], tuple[Tensor, int]] = {}

    def read(self, layer: Any, slots: Tensor) -> Tensor:
        """Tokens [T, width] of the slots [T], as the cache has them."""
        blocks, where = self._where(layer, slots)
        rows: Tensor = blocks[where]
        return rows

    def write_codes(self, layer: Any, rows: Tensor, slots: Tensor) -> None:
        """Writes tokens [T, width], as the cache has them, to the slots [T].

        A writer that is given numbers rounds them to fp8 in a way of its own; vLLM's for CPUs cuts them off.
        """
        blocks, where = self._where(layer, slots)
        blocks[where] = rows

    def _where(self, layer: Any, slots: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """A view of a layer's cache, and where in it the slots' numbers are [T, width]."""
        cache, shape = layer.kv_cache, token_shape(layer)
        alike = (type(layer.impl), tuple(cache.shape[1:]), cache.stride(), cache.dtype, shape)
        if alike not in self._places:
            found = self._find(layer, cache, shape)
            self._places[alike] = found, int(found.max()) + 1  # a GPU is waited for here, and not at every read
        places, extent = self._places[alike]
        blocks = cache.as_strided((cache.shape[0], extent), (cache.stride(0), 1))
        return blocks, ((slots // self.block_size)[:, None], places[slots % self.block_size])

    def _find(self, layer: Any, cache: Tensor, shape: TokenShape) -> Tensor:
        """Where in a block's memory each number of a token lies [block_size, width], digit by digit.

        Raises ValueError if the backend doesn't keep what it is given.
        """
        count = self.block_size * shape.width
        numbers = torch.arange(1, count + 1, device=cache.device).view(self.block_size, shape.width)
        slots = torch.arange(self.block_size, 2 * self.block_size, device=cache.device)
        size = cache.stride(0)
        found = torch.zeros(size, dtype=torch.long, device=cache.device)
        codes, place = self._codes[layer], 1
        base = _DIGIT if codes.fp8 is None else _FP8_DIGIT
        while place <= count:
            memory = torch.zeros(2 * size, dtype=cache.dtype, device=cache.device)
            scratch = memory.as_strided((2, *cache.shape[1:]), cache.stride())
            parts = shape.split(numbers // place % base)
            first, second = ((part * scale).to(codes.dtype) for part, scale in zip(parts, codes.scales, strict=True))
            write(layer, first, second, slots, scratch)
            written = memory[size:] if codes.fp8 is None else memory[size:].view(codes.fp8).float().round()
            found += written.long() * place
            place *= base
        places = found.nonzero().flatten()
        if len(places) != count or not torch.equal(found[places].sort().values, numbers.flatten()):
            raise ValueError(f"{type(layer.impl).__name__} doesn't keep keys and values as it gets them")
        order = torch.empty(count, dtype=torch.long, device=cache.device)
        order[found[places] - 1] = places
        return order.view(self.block_size, shape.width)
