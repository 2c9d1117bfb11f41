"""Tiny random models of many families: configurations only, a few thousand parameters each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

BASE: dict[str, Any] = {
    "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MLA = {
    "num_key_value_heads": 4, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
    "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "first_k_dense_replace": 1,
    "n_group": 1, "topk_group": 1,
}  # fmt: skip
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
LINEAR = {"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8}


def _config(cls: str, **values: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, cls)(**values)


FAMILIES: dict[str, Callable[[], Any]] = {
    "llama": _config("LlamaConfig", **BASE, tie_word_embeddings=True),
    "qwen2": _config("Qwen2Config", **BASE),
    "qwen3": _config("Qwen3Config", **BASE, head_dim=16),
    "mistral": _config("MistralConfig", **BASE, sliding_window=8),
    "gemma2": _config("Gemma2Config", **BASE, head_dim=16, sliding_window=8, query_pre_attn_scalar=16),
    "gemma3": _config("Gemma3TextConfig", **BASE, head_dim=16, sliding_window=8,
                      layer_types=["sliding_attention", "full_attention"] * 2),
    "phi3": _config("Phi3Config", **BASE),
    "gpt_neox": _config("GPTNeoXConfig", **{k: v for k, v in BASE.items() if k != "num_key_value_heads"}),
    "olmo2": _config("Olmo2Config", **BASE),
    "granite": _config("GraniteConfig", **BASE, embedding_multiplier=12.0, residual_multiplier=0.22,
                       attention_multiplier=0.2, logits_scaling=8.0),
    "mixtral": _config("MixtralConfig", **BASE, num_local_experts=4),
    "qwen3_moe": _config("Qwen3MoeConfig", **BASE, **MOE, head_dim=16),
    "deepseek_v2": _config("DeepseekV2Config", **{**BASE, **MLA}, q_lora_rank=None),
    "qwen3_next": _config("Qwen3NextConfig", **BASE, **MOE, **LINEAR, head_dim=16, shared_expert_intermediate_size=16),
    "bamba": _config("BambaConfig", **BASE, **MAMBA, attn_layer_indices=[1, 3], mamba_expand=2),
    "falcon_h1": _config("FalconH1Config", **BASE, **MAMBA, head_dim=8, mamba_d_ssm=64, embedding_multiplier=5.0),
    "gpt2": _config("GPT2Config", vocab_size=128, n_embd=32, n_layer=4, n_head=4, n_positions=256),
    "lfm2": _config("Lfm2Config", **BASE, full_attn_idxs=[1, 3]),
}  # fmt: skip

# Backbones of training-free linking on top of those: other places, pairings and scalings of positions.
_LONG = {**BASE, "max_position_embeddings": 512}
_ROPE = {"rope_theta": 10_000.0, "factor": 4.0}
_SCALED = {"original_max_position_embeddings": 64, **_ROPE}
LINK_FAMILIES: dict[str, Callable[[], Any]] = {
    "llama3_rope": _config("LlamaConfig", **_LONG, rope_parameters={"rope_type": "llama3", **_SCALED,
                           "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "yarn": _config("LlamaConfig", **{**_LONG, "max_position_embeddings": 256},
                    rope_parameters={"rope_type": "yarn", **_SCALED}),
    "linear_rope": _config("LlamaConfig", **_LONG, rope_parameters={"rope_type": "linear", **_ROPE}),
    "dynamic_ntk": _config("LlamaConfig", **{**BASE, "max_position_embeddings": 32},
                           rope_parameters={"rope_type": "dynamic", **_ROPE}),
    "longrope": _config("Phi3Config", **BASE, original_max_position_embeddings=32,
                        rope_parameters={"rope_type": "longrope", "rope_theta": 10_000.0,
                        "short_factor": [1.0] * 4, "long_factor": [3.0, 4.0, 5.0, 6.0], "factor": 8.0,
                        "original_max_position_embeddings": 32}),
    "phi": _config("PhiConfig", **BASE, partial_rotary_factor=0.5),
    # its last layers read the keys of earlier ones
    "gemma3n": _config("Gemma3nTextConfig", **BASE, head_dim=16, sliding_window=8, vocab_size_per_layer_input=128,
                       layer_types=["sliding_attention", "full_attention"] * 2, num_kv_shared_layers=2,
                       hidden_size_per_layer_input=8, laurel_rank=8, altup_num_inputs=2,
                       activation_sparsity_pattern=None),
    "glm4": _config("Glm4Config", **BASE, head_dim=16),
    "cohere": _config("CohereConfig", **BASE),
    "cohere2": _config("Cohere2Config", **BASE, sliding_window=8),
    "smollm3": _config("SmolLM3Config", **BASE),
    "exaone4": _config("Exaone4Config", **BASE, sliding_window=8),
    "gpt_oss": _config("GptOssConfig", **BASE, head_dim=8, num_local_experts=4, sliding_window=8,
                       rope_parameters={"rope_type": "default", "rope_theta": 10_000.0}),
    "gptj": _config("GPTJConfig", vocab_size=128, n_embd=32, n_layer=3, n_head=4, rotary_dim=4, n_positions=256,
                    bos_token_id=1, eos_token_id=2),
    "deepseek_v3": _config("DeepseekV3Config", **{**BASE, **MLA}, q_lora_rank=None),
    "nanochat": _config("NanoChatConfig", **BASE),
    "bloom": _config("BloomConfig", vocab_size=128, hidden_size=32, n_layer=3, n_head=4),
    "mpt": _config("MptConfig", vocab_size=128, d_model=32, n_layers=3, n_heads=4, max_seq_len=256, bos_token_id=1),
    "falcon": _config("FalconConfig", vocab_size=128, hidden_size=32, num_hidden_layers=3, num_attention_heads=4,
                      bos_token_id=1, eos_token_id=2),
    "falcon_alibi": _config("FalconConfig", vocab_size=128, hidden_size=32, num_hidden_layers=3, alibi=True,
                            num_attention_heads=4, bos_token_id=1, eos_token_id=2),
    # refused: learned positions, attention in fixed chunks
    "opt": _config("OPTConfig", vocab_size=128, hidden_size=32, num_hidden_layers=3, num_attention_heads=4, ffn_dim=64,
                   max_position_embeddings=256, word_embed_proj_dim=32, bos_token_id=1, eos_token_id=2),
    "llama4": _config("Llama4TextConfig", **BASE, intermediate_size_mlp=64, head_dim=8, num_local_experts=2,
                      attention_chunk_size=16),
}  # fmt: skip

# without softmax attention in every layer, and with caches that aren't all keys and values
_STATES: dict[str, Any] = {"vocab_size": 128, "hidden_size": 32, "num_hidden_layers": 3, "pad_token_id": 0,
                           "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
STATE_FAMILIES: dict[str, Callable[[], Any]] = {
    "mamba": _config("MambaConfig", **_STATES, state_size=8),
    "mamba2": _config("Mamba2Config", **_STATES, state_size=8, num_heads=4, head_dim=16, n_groups=1, chunk_size=16),
    "falcon_mamba": _config("FalconMambaConfig", **_STATES, state_size=8),
    "rwkv": _config("RwkvConfig", **_STATES, attention_hidden_size=32, intermediate_size=64),
    "xlstm": _config("xLSTMConfig", **{**_STATES, "hidden_size": 64}, num_heads=2, chunk_size=16, qk_dim_factor=1.0,
                     mlstm_round_up_to_multiple_of=8, ffn_round_up_to_multiple_of=8),
    "recurrent_gemma": _config("RecurrentGemmaConfig", **_STATES, num_attention_heads=2, intermediate_size=96,
                               lru_width=32),
}  # fmt: skip

# of transformers from 5.20 on, where the installed one has them
_SMALL = {name: value for name, value in BASE.items() if name != "intermediate_size"}
_LINEAR_FIRST = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]
_NEWER: dict[str, tuple[str, dict[str, Any]]] = {
    "bailing_hybrid": ("BailingHybridConfig", {**BASE, **MLA, "head_dim": 8, "layer_types": _LINEAR_FIRST}),
    # linear layers, and others with a sliding window
    "lara_mini": ("LaraMiniConfig", {**_SMALL, **MOE, **LINEAR, "head_dim": 16, "sliding_window": 8,
                  "shared_expert_intermediate_size": 16,
                  "layer_types": ["linear_attention", "sliding_attention", "linear_attention", "full_attention"]}),
    "lfm3": ("Lfm3Config", {**BASE, "head_dim": 16, "conv_L_cache": 5, "sliding_window": 8,
             "layer_types": ["conv", "conv", "full_attention", "sliding_attention"]}),
    # several states in a layer
    "inkling2": ("Inkling2TextConfig", {**_SMALL, "unpadded_vocab_size": 128, "head_dim": 8, "d_rel": 4,
                 "rel_extent": 64, "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8,
                 "moe_intermediate_size": 16, "n_routed_experts": 4, "num_experts_per_tok": 2,
                 "n_layers_per_attn_res_block": 2, "layer_types": ["hybrid"] * 4}),
    # goes through its layers in the middle twice, with keys and values of each time
    "dory": ("DoryConfig", {**BASE, "head_dim": 16, "sliding_window": 8, "n_input_layers": 1, "n_output_layers": 1,
             "layer_types": ["sliding_attention", "full_attention"] * 2}),
}  # fmt: skip
STATE_FAMILIES |= {name: _config(cls, **values) for name, (cls, values) in _NEWER.items() if hasattr(tf, cls)}

# expert kernels batch tokens of all rows, so a row's last bits depend on its neighbours in the plain model too
MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v2", "qwen3_next")


def random_of(config: Any, seed: int = 0, std: float | None = None) -> Any:
    """A random model in eval mode, the same for the same seed.

    `std` makes all its matrices that large: with the usual 0.02 attention hardly looks at anything.
    """
    torch.manual_seed(seed)
    model = tf.AutoModelForCausalLM.from_config(config).eval()
    for parameter in model.parameters() if std is not None else ():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def tiny(family: str, seed: int = 0, std: float | None = None, **changes: Any) -> Any:
    """A tiny model of a family, random as `random_of` makes it; `changes` are the configuration's."""
    config = (FAMILIES | LINK_FAMILIES | STATE_FAMILIES)[family]()
    for name, value in changes.items():
        setattr(config, name, value)
    return random_of(config, seed, std)


def open_gates(model: Any, attention: float = 0.7, mlp: float = 0.3) -> Any:
    """Opens all gates, so that documents matter before any training. Returns the model."""
    for block in model.cross_blocks:
        block.attention_gate.data.fill_(attention)
        block.mlp_gate.data.fill_(mlp)
    return model
