"""Tiny random hybrids of many families, with decays slow enough that states matter.

transformers' own initialisation forgets within ten tokens, so that dropping every transition would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as tf

from tests.helpers.byte_text import byte_tokenizer

BASE: dict[str, Any] = {
    "vocab_size": 101, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 4096,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GDN = {
    "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 12, "linear_value_head_dim": 20,
    "linear_conv_kernel_dim": 4,
}  # fmt: skip
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
MAMBA2 = {
    "mamba_n_heads": 6, "mamba_d_head": 16, "mamba_d_state": 10, "mamba_n_groups": 2, "mamba_d_conv": 4,
    "mamba_chunk_size": 16, "mamba_expand": 2,
}  # fmt: skip
_STATES = {name: BASE[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id",
                                         "bos_token_id", "eos_token_id")} | {"state_size": 10, "expand": 2}  # fmt: skip
PATTERN = ["linear_attention", "linear_attention", "full_attention", "linear_attention"]


def _config(cls: str, **values: Any) -> Callable[[], Any]:
    return lambda: getattr(tf, cls)(**values)


HYBRIDS: dict[str, Callable[[], Any]] = {
    "qwen3_next": _config("Qwen3NextConfig", **BASE, **GDN, **MOE, head_dim=16, layer_types=PATTERN),
    "qwen3_5": _config("Qwen3_5TextConfig", **BASE, **GDN, head_dim=16, layer_types=PATTERN),
    "olmo_hybrid": _config("OlmoHybridConfig", **BASE, **GDN, layer_types=PATTERN),
    "bamba": _config("BambaConfig", **BASE, **MAMBA2, attn_layer_indices=[2]),
    "granitemoehybrid": _config("GraniteMoeHybridConfig", **BASE, **MAMBA2, layer_types=PATTERN, num_local_experts=4,
                                num_experts_per_tok=2, shared_intermediate_size=32),
    "nemotron_h": _config("NemotronHConfig", **BASE, layers_block_type=["linear_attention", "mlp", "full_attention",
                          "linear_attention"], mamba_num_heads=6, mamba_head_dim=16, ssm_state_size=10, n_groups=2,
                          conv_kernel=4, chunk_size=16, head_dim=12),
    "falcon_h1": _config("FalconH1Config", **{**BASE, "num_hidden_layers": 3}, **{**MAMBA2, "mamba_n_heads": 6},
                         mamba_d_ssm=96, head_dim=12),
    "zamba2": _config("Zamba2Config", **BASE, layers_block_type=["linear_attention", "hybrid", "linear_attention",
                      "hybrid"], mamba_d_state=10, mamba_d_conv=4, mamba_expand=2, mamba_ngroups=2, n_mamba_heads=6,
                      chunk_size=16, num_mem_blocks=1, use_shared_attention_adapter=False),
    "lfm2": _config("Lfm2Config", **BASE, layer_types=["conv", "full_attention", "conv", "full_attention"],
                    conv_L_cache=3, block_auto_adjust_ff_dim=False),
    "kimi_linear": _config("KimiLinearConfig", **{**BASE, "num_key_value_heads": 4}, layer_types=PATTERN,
                           linear_num_heads=4, linear_head_dim=12, linear_conv_kernel_dim=4, kv_lora_rank=16,
                           qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8, num_local_experts=4,
                           num_experts_per_tok=2, moe_intermediate_size=16, n_group=1, topk_group=1,
                           n_shared_experts=1, q_lora_rank=None),
    "jamba": _config("JambaConfig", **BASE, attn_layer_period=4, attn_layer_offset=2, mamba_d_state=8, mamba_d_conv=4,
                     mamba_expand=2, mamba_dt_rank=6, num_experts=2, num_experts_per_tok=1, expert_layer_period=2,
                     expert_layer_offset=1),
    # states in every layer and no keys: nothing in transformers' cache tells how long it is
    "mamba": _config("MambaConfig", **_STATES, time_step_rank=6),
    "falcon_mamba": _config("FalconMambaConfig", **_STATES, time_step_rank=6),
    "mamba2": _config("Mamba2Config", **_STATES, num_heads=6, head_dim=16, n_groups=2, chunk_size=16),
}  # fmt: skip

REFUSED = {
    # takes a cache of its own and no other
    "minimax": _config("MiniMaxConfig", **BASE, layer_types=PATTERN, block_size=16, num_local_experts=2,
                       num_experts_per_tok=2, head_dim=12),
}  # fmt: skip


def tiny_hybrid(family: str, seed: int = 0) -> Any:
    """A tiny random model, in eval mode, the same for the same seed."""
    torch.manual_seed(seed)
    return slow_decays(tf.AutoModelForCausalLM.from_config((HYBRIDS | REFUSED)[family]()).eval(), seed)


def text_model(family: str) -> tuple[Any, Any]:
    """One that reads bytes, and its tokenizer."""
    tokenizer = byte_tokenizer()
    torch.manual_seed(0)
    config = HYBRIDS[family]()
    config.vocab_size = len(tokenizer)
    return slow_decays(tf.AutoModelForCausalLM.from_config(config).eval()), tokenizer


def slow_decays(model: Any, seed: int = 0) -> Any:
    """Large enough weights that layers do something, and decays slow enough that states remember."""
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("dt_bias", "dt_proj.bias")):
                parameter.copy_(-4 + 0.3 * torch.randn(parameter.shape, generator=generator))
            elif name.endswith("A_log"):
                parameter.copy_(-torch.rand(parameter.shape, generator=generator))
            elif parameter.ndim > 1:
                fan_in = parameter[0].numel()
                # Mamba's keys and queries aren't normalised, and small ones leave next to nothing in a state
                size = 2.5 if name.endswith("x_proj.weight") else 0.6
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * size * fan_in**-0.5)
    return model
