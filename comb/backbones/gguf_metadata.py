"""What a GGUF file says of its model, compared with the model that transformers has made of it.

transformers reads a few keys for each architecture, and takes its own defaults for all others: a scaled rotary
embedding, a soft cap or a window would be lost without a word. So every key is looked up in what was read.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
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

    Args:
        reader: the package gguf's, of the file.

    Raises:
        ValueError: for what was not read, by its key or name.
    """
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
        read = _read(key, value, said, config)
        if not _same(value, read):
            known = f", and would compute with {read!r}" if read is not None else ""
            raise ValueError(
                f"{file} says {architecture}.{key} = {value!r}, which transformers {__version__} doesn't take from a "
                f"GGUF file of a {architecture}{known}: {remedy}"
            )
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    unused = unused_gguf_tensors(model, architecture, tensors)
    # factors of frequencies; they are 1 in models that scale nothing
    if unused := [name for name in unused if name != "rope_freqs.weight" or not (tensors[name].data == 1).all()]:
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
    compared: Callable[..., Any] | None = _COMPUTED.get(key)
    if compared is not None:
        return compared(value, said, config)
    if key.startswith("rope.scaling.") or key in ("rope.scale", "rope.scale_linear"):
        return _scaling(key, value, said, config)
    return None if value else value  # zero and false say that there is none


def _same(said: Any, read: Any) -> bool:
    if isinstance(said, list | tuple) and isinstance(read, list | tuple):
        return len(said) == len(read) and all(map(_same, said, read))
    if isinstance(said, list | tuple):  # one value for each layer
        return bool(said) and all(_same(each, read) for each in said)
    if isinstance(said, float) or isinstance(read, float):
        return isinstance(read, int | float) and math.isclose(said, read, rel_tol=1e-5, abs_tol=1e-12)
    return bool(said == read)


def _head_dim(config: Any) -> int | None:
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    found: int | None = getattr(config, "head_dim", None) or (config.hidden_size // heads if heads else None)
    return found


def _one_of(*found: Any) -> Callable[[Any], Any]:
    values = [value for value in found if value is not None]
    return lambda said: said if said in values else next(iter(values), None)


def _rope(config: Any, layers: str = "full_attention") -> dict[str, Any]:
    """Parameters of the rotary embedding, of one kind of layers where these have different ones."""
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {name: part for name, part in rope.items() if isinstance(part, dict)}
    return dict(kinds.get(layers, {}) if kinds else rope)


def _rotary_dim(said: int, _: dict[str, Any], config: Any) -> Any:
    if not _rope(config):
        return None
    factor = _rope(config).get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None) or 1.0
    head = getattr(config, "global_head_dim", None) or _head_dim(config)
    dims = None if head is None else int(head * factor)
    return _one_of(dims, getattr(config, "rotary_dim", None), getattr(config, "qk_rope_head_dim", None))(said)


def _kv_heads(said: Any, _: dict[str, Any], config: Any) -> Any:
    heads = getattr(config, "num_attention_heads", None) or getattr(config, "n_head", None)
    read = getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads
    # a layer without attention has none
    return [count and read for count in said] if isinstance(said, list) else read


def _window(said: Any, all_said: dict[str, Any], config: Any) -> Any:
    longest = all_said.get("context_length") or math.inf
    if not said or said >= longest:
        return said
    return getattr(config, "sliding_window", None)


def _full_layers(said: Any, _: dict[str, Any], config: Any) -> Any:
    """Which layers see less than everything; `said`, if that is all but every so manieth."""
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        return None
    other = [kind != "full_attention" for kind in kinds]
    if isinstance(said, list):
        return other
    return said if said and other == [bool((layer + 1) % said) for layer in range(len(other))] else other


def _attention_scale(_: Any, __: dict[str, Any], config: Any) -> Any:
    if getattr(config, "attention_multiplier", None) is not None:
        return config.attention_multiplier
    width = getattr(config, "query_pre_attn_scalar", None) or _head_dim(config)
    return None if width is None else width**-0.5


def _gating(said: int, _: dict[str, Any], config: Any) -> Any:
    name = getattr(config, "scoring_func", None) or "softmax"
    return {"softmax": 1, "sigmoid": 2}.get(name, name) if said else said


def _scaling(key: str, value: Any, said: dict[str, Any], config: Any) -> Any:
    """Of a rotary embedding that is scaled, what of it was read."""
    factor = said.get("rope.scaling.factor", said.get("rope.scale_linear", said.get("rope.scale", 1.0)))
    kind = said.get("rope.scaling.type", "linear")
    rope = _rope(config)
    read = rope.get("rope_type", "default")
    if key == "rope.scaling.attn_factor":
        return rope.get("attention_factor") or 1.0
    if kind == "none" or (factor in (0, 1) and kind == "linear"):
        return value if read == "default" else read
    names = {"type": "rope_type", "original_context_length": "original_max_position_embeddings",
             "yarn_beta_fast": "beta_fast", "yarn_beta_slow": "beta_slow"}  # fmt: skip
    name = names.get(key.removeprefix("rope.scaling."), "factor")
    return rope.get(name) if read == kind else read if name == "rope_type" else None


_COMPUTED: dict[str, Callable[..., Any]] = {
    "attention.causal": lambda *_: True,
    "attention.head_count_kv": _kv_heads,
    "attention.key_length": lambda said, _, c: _one_of(getattr(c, "global_head_dim", None), _head_dim(c))(said),
    "attention.value_length": lambda said, _, c: _one_of(
        getattr(c, "global_head_dim", None), getattr(c, "v_head_dim", None), _head_dim(c)
    )(said),
    "attention.key_length_swa": lambda _, __, c: _head_dim(c),
    "attention.value_length_swa": lambda _, __, c: _head_dim(c),
    "attention.scale": _attention_scale,
    "attention.sliding_window": _window,
    "attention.sliding_window_pattern": _full_layers,
    "expert_gating_func": _gating,
    "full_attention_interval": _full_layers,
    "rope.dimension_count": _rotary_dim,
    "rope.dimension_count_swa": lambda _, __, c: _head_dim(c),
    "rope.dimension_sections": lambda said, _, c: [
        *(_rope(c).get("mrope_section") or ()), *[0] * (len(said) - len(_rope(c).get("mrope_section") or ()))
    ],
    "rope.freq_base": lambda _, __, c: _rope(c).get("rope_theta"),
    "rope.freq_base_swa": lambda _, __, c: _rope(c, "sliding_attention").get("rope_theta"),
}  # fmt: skip


def keep_special_tokens(reader: Any, tokenizer: Any, file: Path) -> None:
    """Lets the tokenizer put its tokens in front of a text and behind it where the file says so, and only there.

    Raises:
        ValueError: if it can't.
    """
    for end, place in (("bos", 0), ("eos", -1)):
        field = reader.get_field(f"tokenizer.ggml.add_{end}_token")
        token = getattr(tokenizer, f"{end}_token_id")
        if field is None or token is None:
            continue
        wanted = bool(field.contents())
        if _adds(tokenizer, token, place) != wanted:
            setattr(tokenizer, f"add_{end}_token", wanted)
        if _adds(tokenizer, token, place) != wanted:
            raise ValueError(
                f"{file} says tokenizer.ggml.add_{end}_token = {wanted}, and transformers' {type(tokenizer).__name__} "
                "doesn't take it from there: take the model as safetensors, from where it was published"
            )


def _adds(tokenizer: Any, token: int, place: int) -> bool:
    ids: Iterable[int] = tokenizer("a")["input_ids"]
    return bool(list(ids)[place] == token)
