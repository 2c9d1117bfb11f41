"""What a GGUF file says of its model, compared with the model that transformers has made of it.

transformers reads a few keys for each architecture, and takes its own defaults for all others: a scaled rotary
embedding, a soft cap or a window would be lost without a word. So every key is looked up in what was read.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from transformers import __version__

from comb.backbones.transformers_private import unused_gguf_tensors

_NO_EFFECT = (
    # shapes of weights, which are compared when they are loaded
    "vocab_size", "embedding_length", "embedding_length_out", "block_count", "feed_forward_length", "expert_count",
    "expert_feed_forward_length", "expert_shared_feed_forward_length", "expert_shared_count", "ssm.conv_kernel",
    "ssm.inner_size", "ssm.state_size", "ssm.time_step_rank", "shortconv.l_cache", "attention.q_lora_rank",
    "attention.kv_lora_rank", "nextn_predict_layers",
    # about the file
    "tensor_data_layout", "rope.scaling.finetuned", "decoder_start_token_id",
)  # fmt: skip

_ATTRIBUTES = {
    "context_length": ("max_position_embeddings", "n_positions", "n_ctx"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.layer_norm_epsilon": ("layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "layer_norm_epsilon", "norm_eps"),
    "attention.shared_kv_layers": ("num_kv_shared_layers",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "router_logit_softcapping": ("router_logit_softcapping",),
    "embedding_length_per_layer_input": ("hidden_size_per_layer_input",),
    "logit_scale": ("logit_scale",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_weights_scale": ("routed_scaling_factor",),
    "expert_weights_norm": ("norm_topk_prob",),
    "expert_group_count": ("n_group",),
    "expert_group_used_count": ("topk_group",),
    "leading_dense_block_count": ("first_k_dense_replace",),
    "interleave_moe_layer_step": ("decoder_sparse_step",),
    "use_parallel_residual": ("use_parallel_residual", "parallel_attn"),
    "ssm.group_count": ("linear_num_key_heads", "n_groups"),
}
"""Keys, and the attributes of a configuration that can hold their values."""


def check_read(reader: Any, model: Any, file: Path) -> None:
    """Compares all that a file says of its model with the model, and looks for tensors that it has no place for.
    Raises ValueError for what was not read, by its key or name."""
    architecture = str(reader.get_field("general.architecture").contents())
    said = {
        name.removeprefix(f"{architecture}."): field.contents()
        for name, field in reader.fields.items()
        if name.startswith(f"{architecture}.")
    }
    config = model.config.get_text_config()
    if _rope(config):
        said.setdefault("rope.freq_base", 10_000.0)  # where a file is silent it is that
    remedy = "take the model as safetensors, from where it was published"
    for key, value in said.items():
        if not _same(value, read := _read(key, value, said, config)):
            known = f", and would compute with {read!r}" if read is not None else ""
            raise ValueError(
                f"{file} says {architecture}.{key} = {value!r}, which transformers {__version__} doesn't take from a "
                f"GGUF file of a {architecture}{known}: {remedy}"
            )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    unused = unused_gguf_tensors(model, architecture, tensors)
    # factors of frequencies, which are 1 in models that scale nothing
    if "rope_freqs.weight" in unused and (tensors["rope_freqs.weight"].data == 1).all():
        unused.remove("rope_freqs.weight")
    if unused:
        raise ValueError(
            f"{file} has {len(unused)} weights ({', '.join(unused[:3])}{', ...' * (len(unused) > 3)}) that "
            f"transformers {__version__} doesn't take from a GGUF file of a {architecture}: {remedy}"
        )


def _read(key: str, value: Any, said: dict[str, Any], config: Any) -> Any:
    """What the model has where the file says `value`; `value` itself for what makes no difference, None if nothing."""
    if key in _NO_EFFECT:
        return value
    if key in _ATTRIBUTES:
        found = next((held for name in _ATTRIBUTES[key] if (held := getattr(config, name, None)) is not None), None)
        if found is None and (key == "context_length" or not value):
            return value  # there are no positions to run out of, or nothing of the kind
        neutral = {"logit_scale": 1.0, "embedding_scale": 1.0, "residual_scale": 1.0, "expert_weights_scale": 1.0}
        return neutral.get(key) if found is None else found

    def has(name: str) -> Any:
        return getattr(config, name, None)

    heads, rope = has("num_attention_heads") or has("n_head"), _rope(config)
    head_dim = has("head_dim") or (config.hidden_size // heads if heads and isinstance(heads, int) else None)
    widest = has("global_head_dim") or head_dim
    match key:
        case "attention.causal":
            return True
        case "attention.head_count_kv":
            kv_heads = has("num_key_value_heads") or has("num_kv_heads") or heads
            # a layer without attention has none
            return [count and kv_heads for count in value] if isinstance(value, list) else kv_heads
        case "attention.key_length":
            return _one_of(value, has("global_head_dim"), head_dim)
        case "attention.value_length":
            return _one_of(value, has("global_head_dim"), has("v_head_dim"), head_dim)
        case "attention.key_length_swa" | "attention.value_length_swa" | "rope.dimension_count_swa":
            return head_dim
        case "attention.scale":
            width = has("query_pre_attn_scalar") or head_dim
            computed = None if width is None else width**-0.5
            return computed if has("attention_multiplier") is None else has("attention_multiplier")
        case "attention.sliding_window":
            wide = not value or value >= (said.get("context_length") or math.inf)
            return value if wide else has("sliding_window")
        case "attention.sliding_window_pattern" | "full_attention_interval":
            if has("layer_types") is None:
                return None
            partial = [kind != "full_attention" for kind in has("layer_types")]  # the layers that see less
            if isinstance(value, list) or not value:
                return partial
            # every so manieth sees everything
            return value if partial == [bool(layer % value) for layer in range(1, len(partial) + 1)] else partial
        case "expert_gating_func":
            name = has("scoring_func") or "softmax"
            return {"softmax": 1, "sigmoid": 2}.get(name, name) if value else value
        case "rope.dimension_count":
            factor = rope.get("partial_rotary_factor") or has("partial_rotary_factor") or 1.0
            turned = None if widest is None else int(widest * factor)
            return _one_of(value, turned, has("rotary_dim"), has("qk_rope_head_dim")) if rope else None
        case "rope.dimension_sections":
            sections = rope.get("mrope_section") or ()
            return [*sections, *[0] * (len(value) - len(sections))]
        case "rope.freq_base":
            return rope.get("rope_theta")
        case "rope.freq_base_swa":
            return _rope(config, "sliding_attention").get("rope_theta")
        case "rope.scaling.attn_factor":
            return rope.get("attention_factor") or 1.0
    if key.startswith("rope.scaling.") or key in ("rope.scale", "rope.scale_linear"):
        factor = said.get("rope.scaling.factor", said.get("rope.scale_linear", said.get("rope.scale", 1.0)))
        kind, read = said.get("rope.scaling.type", "linear"), rope.get("rope_type", "default")
        if kind == "none" or (factor in (0, 1) and kind == "linear"):
            return value if read == "default" else read
        names = {"type": "rope_type", "original_context_length": "original_max_position_embeddings",
                 "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}  # fmt: skip
        name = names.get(key.removeprefix("rope.scaling."), "factor")
        return rope.get(name) if read == kind else read if name == "rope_type" else None
    return None if value else value  # zero and false say that there is none


def _one_of(said: Any, *found: Any) -> Any:
    """What is said, if it was found, or else what was found first."""
    values = [value for value in found if value is not None]
    return said if said in values else next(iter(values), None)


def _rope(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """Parameters of the rotary embedding, of one kind of layers where these have different ones."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {name: part for name, part in rope.items() if isinstance(part, dict)}
    return dict(kinds.get(layers, {}) if kinds else rope)


def _same(said: Any, read: Any) -> bool:
    if isinstance(said, list | tuple) and isinstance(read, list | tuple):
        return len(said) == len(read) and all(map(_same, said, read))
    if isinstance(said, list | tuple):  # one value for each layer
        return bool(said) and all(_same(each, read) for each in said)
    if isinstance(said, float) or isinstance(read, float):
        return isinstance(read, int | float) and math.isclose(said, read, rel_tol=1e-5, abs_tol=1e-12)
    return bool(said == read)


def keep_special_tokens(reader: Any, tokenizer: Any, file: Path) -> None:
    """Lets the tokenizer put its tokens in front of a text and behind it where the file says so, and only there.
    Raises ValueError if it can't."""
    for end, place in (("bos", 0), ("eos", -1)):
        field = reader.get_field(f"tokenizer.ggml.add_{end}_token")
        token = getattr(tokenizer, f"{end}_token_id")
        if field is None or token is None:
            continue
        wanted = bool(field.contents())
        if (tokenizer("a")["input_ids"][place] == token) != wanted:
            setattr(tokenizer, f"add_{end}_token", wanted)
        if (tokenizer("a")["input_ids"][place] == token) != wanted:
            raise ValueError(
                f"{file} says tokenizer.ggml.add_{end}_token = {wanted}, and transformers' {type(tokenizer).__name__} "
                "doesn't take it from there: take the model as safetensors, from where it was published"
            )
