"""Attention of encoder and cross blocks, through whichever implementation transformers is set to use."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import eager_attention_forward

from comb.waits import on_device


@dataclass(frozen=True)
class Lengths:
    """Token counts of the rows of a padded or packed batch.

    Args:
        counts: tokens per row, on the CPU. [rows] int64
    """

    counts: Tensor

    @property
    def longest(self) -> int:
        return int(self.counts.max())

    def mask(self, device: torch.device) -> Tensor | None:
        """True where a padded row holds a token; None when no row is padded. [rows, longest] bool"""
        if bool((self.counts == self.counts[0]).all()):
            return None
        positions = torch.arange(self.longest, device=device)
        return positions[None, :] < on_device(self.counts, device)[:, None]

    def offsets(self, device: torch.device) -> Tensor:
        """Where each row starts in a packed batch, and where the last one ends. [rows + 1] int32"""
        total = torch.zeros(len(self.counts) + 1, dtype=torch.int32)
        total[1:] = self.counts.cumsum(0)
        return on_device(total, device)


def uses_packing(implementation: str | None) -> bool:
    """Whether an implementation takes packed rows with offsets (the flash-attention family) and no mask."""
    return implementation is not None and "flash" in implementation


def attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, implementation: str | None, *,
    key_mask: Tensor | None = None, causal: bool = False, **packing: Any,
) -> Tensor:  # fmt: skip
    """Softmax attention, without or with a causal mask; keys that are more than the queries stand in front of all.

    Args:
        module: has `scaling`, and `num_key_value_groups`, as transformers' attention functions expect.
        query: [rows, heads, queries, head_dim]
        key, value: [rows, kv_heads, keys, head_dim]
        key_mask: True where a key exists. [rows, keys] bool
        packing: for the flash-attention family, `cu_seq_lens_q`, `cu_seq_lens_k`, `max_length_q`, `max_length_k`.

    Returns:
        [rows, queries, heads, head_dim]
    """
    if implementation == "flex_attention":  # takes block masks only; sdpa gives the same result
        implementation = "sdpa"
    mask = None if key_mask is None else key_mask[:, None, None, :]
    in_front = 0 if packing else key.shape[2] - query.shape[2]
    if causal and not packing and (in_front or implementation in (None, "eager")):
        # eager knows nothing of `is_causal`, and sdpa takes it as if the first key were the first query's
        visible = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril(in_front)
        mask = visible[None, None] if mask is None else mask & visible
    if mask is not None and implementation in (None, "eager"):  # adds it to the scores
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
    function: Any = ALL_ATTENTION_FUNCTIONS.get_interface(implementation or "eager", eager_attention_forward)
    given = query.dtype
    # those of transformers and those from the Hub; what somebody has registered may take anything
    is_flash = implementation is not None and (implementation.startswith("flash_attention") or "/" in implementation)
    if is_flash and uses_packing(implementation) and given == torch.float32:
        # its kernels know 16-bit types only; an adapter kept in float32 computes its attention in bfloat16
        query, key, value = query.bfloat16(), key.bfloat16(), value.bfloat16()
    output, _ = function(
        module, query, key, value, mask,
        dropout=0.0, scaling=module.scaling, is_causal=causal and mask is None, **packing,
    )  # fmt: skip
    result: Tensor = output.to(given)
    return result
