"""Tiny Llamas as GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch


def write_gguf(
    path: Path, model: Any, tokenizer: Any, *, keys: Mapping[str, Any] | None = None,
    tensors: Mapping[str, Any] | None = None,
) -> Path:  # fmt: skip
    """The file. `keys` are more of its metadata, `tensors` more weights, or None for one that is left out."""
    config = model.config
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    found: dict[str, Any] = {}
    for name, tensor in model.state_dict().items():
        part = name.split(".")[-2]
        if part in heads:  # rotary channels are neighbours there, and halves of a head here
            tensor = tensor.unflatten(0, (heads[part], 2, -1)).transpose(1, 2).flatten(0, 2)
        found[str(names.get_name(name, try_suffixes=(".weight",)))] = tensor.float().numpy()
    writer = gguf.GGUFWriter(path, "llama")
    _describe(writer, config, tokenizer)
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    for name, values in (found | dict(tensors or {})).items():
        if values is not None:
            writer.add_tensor(name, np.ascontiguousarray(values, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _describe(writer: Any, config: Any, tokenizer: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.hidden_size // config.num_attention_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    words = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().get)
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list([*words, "\u0120a"])
    writer.add_token_types([gguf.TokenType.NORMAL] * (len(words) + 1))
    writer.add_token_merges(["\u0120 a"])
    writer.add_bos_token_id(tokenizer.convert_tokens_to_ids("<|user|>"))
    writer.add_eos_token_id(tokenizer.eos_token_id)


def same_weights(model: Any, other: Any) -> bool:
    """Whether two models of one class have the same weights, to bfloat16."""
    ours, theirs = model.bfloat16().state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
