"""Small models, prompts and decoding for the tests of MAC sessions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import transformers as tf
from torch import Tensor

from comb.mac import MacConfig
from tests.helpers.families import BASE, MLA, random_of, tiny

NEW = 16
# everything that can match, does: the loosest threshold, no caps
FREE = MacConfig(window=16, band=4, tau=0.0, min_length=0, max_chain=None, max_drift=False, audit_bound=None)
NEVER = replace(FREE, tau=1.0, audit_every=4, audit_bound=1e-3)


OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral_full": ("MistralConfig", {**BASE, "sliding_window": None}),
    "three_to_one": ("LlamaConfig", {**BASE, "hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2}),
    "five_to_one": ("LlamaConfig", {**BASE, "hidden_size": 40, "num_attention_heads": 5, "num_key_value_heads": 1}),
    "doge": ("DogeConfig", {**BASE, "keep_window_size": 8}),
    "deepseek_v32": (
        "DeepseekV32Config",
        {**BASE, **MLA, "q_lora_rank": 16, "index_topk": 8, "index_n_heads": 2, "index_head_dim": 16},
    ),
}


def model_of(family: str) -> Any:
    if family in OTHERS:
        name, values = OTHERS[family]
        return random_of(getattr(tf, name)(**values), std=0.2)
    return tiny(family, std=0.2)


def batch(rows: int = 3, length: int = 40) -> tuple[Tensor, Tensor]:
    """Left-padded prompts and their mask."""
    ids = torch.randint(3, 100, (rows, length), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    for row in range(1, rows):
        mask[row, : 7 * row] = 0
    return ids * mask, mask


def decode(model: Any, ids: Tensor, mask: Tensor | None = None, **arguments: Any) -> tuple[Tensor, Tensor]:
    """Greedy tokens [rows, new] and logits [rows, new, vocabulary]."""
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids) if mask is None else mask, max_new_tokens=NEW, do_sample=False,
        eos_token_id=None, pad_token_id=0, output_logits=True, return_dict_in_generate=True, **arguments,
    )  # fmt: skip
    return output.sequences[:, ids.shape[1] :], torch.stack(output.logits, 1)


def forward(model: Any, ids: Tensor, cache: Any) -> Tensor:
    with torch.no_grad():
        logits: Tensor = model(ids, past_key_values=cache).logits[:, -1]
    return logits
