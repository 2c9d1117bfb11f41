"""Tokenizers of bytes, one with a chat template, and a tiny Llama that reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content | trim }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())


def tokenizer_of(tokens: Sequence[str], **special: Any) -> PreTrainedTokenizerFast:
    """With these tokens in the order of their ids: `BYTES`, and others in front of them or behind."""
    inner = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=inner, **special)


def byte_tokenizer(chat_template: str | None = TEMPLATE, **special: Any) -> Any:
    """Every byte a token, and four special ones."""
    fast = tokenizer_of(BYTES, eos_token="<|end|>", **special)
    fast.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|system|>"]})
    fast.chat_template = chat_template
    return fast


def byte_llama(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Two layers of four heads, hidden size 32; the same for the same seed."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    known = {"vocab_size": 260, "max_position_embeddings": 512}
    return LlamaForCausalLM(LlamaConfig(**{**sizes, **known, **changes})).eval()
