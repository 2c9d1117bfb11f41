"""Finds the parts of any Hugging Face causal language model: layers, attention geometry, embeddings, rotary set-up.

It reads the module tree and the configuration, and asks the model itself (a forward stopped at the first layer) where
neither says enough. No model class is named here.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from comb.backbones.forward import takes_positions

ATTENTION_NAMES = ("self_attn", "attention", "attn", "self_attention")
LINEAR_NAMES = ("linear_attn", "mamba", "mixer", "conv", "short_conv", "ssm")
NORM_EPS_NAMES = ("rms_norm_eps", "norm_eps", "layer_norm_epsilon", "layer_norm_eps")
MLP_NAMES = ("mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp")


class UnsupportedBackboneError(ValueError):
    """A backbone that an encoder can't be attached to; the message says why."""


@dataclass(frozen=True)
class BackboneInfo:
    """What discovery found.

    `layer_kinds` holds one of ``full``, ``sliding``, ``linear``, ``both`` or ``none`` per decoder layer;
    `embedding_scale` is the factor between the embedding module's output and the first layer's input.
    """

    model_type: str
    layers_path: str
    num_layers: int
    layer_kinds: tuple[str, ...]
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    hidden_act: str
    rms_norm_eps: float
    rope_parameters: dict[str, Any]
    tied_embeddings: bool
    embedding_scale: float
    latent_attention: bool
    notes: tuple[str, ...] = ()


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of the language model inside `model` (multimodal models nest it)."""
    return model.config.get_text_config(decoder=True)


def position_count(config: Any) -> int | None:
    """Positions that a text configuration names; None where it names none (ALiBi, states)."""
    names = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
    return next((int(count) for name in names if (count := getattr(config, name, None))), None)


def start_token_id(config: Any) -> int | None:
    """The BOS token's id in a text configuration, or its EOS token's (the first one's); None where there is neither."""
    for name in ("bos_token_id", "eos_token_id"):
        token = getattr(config, name, None)
        token = token[0] if isinstance(token, list) and token else token
        if isinstance(token, int):
            return token
    return None


def decoder_layers(model: Any, count: int | None = None) -> nn.ModuleList:
    """The stack of `count` decoder layers; without it, of as many as the configuration says.

    Raises UnsupportedBackboneError if there is none.
    """
    layers: nn.ModuleList = model.get_submodule(_layers_path(model, count))
    return layers


def inspect_backbone(model: PreTrainedModel) -> BackboneInfo:
    """Finds layers, geometry, rotary parameters and embedding scale of a causal language model.

    Raises:
        UnsupportedBackboneError: for models that aren't causal or have an encoder, models without one stack of decoder
            layers, and models whose layers don't pass on one hidden state ``[batch, tokens, hidden]``.
    """
    config = text_config(model)
    if config.is_encoder_decoder or model.config.is_encoder_decoder or not hasattr(model, "generate"):
        raise UnsupportedBackboneError(
            f"{type(model).__name__} is not a decoder-only causal language model; load one with AutoModelForCausalLM"
        )
    path = _layers_path(model)
    layers: nn.ModuleList = model.get_submodule(path)
    embeddings = model.get_input_embeddings()
    if embeddings is None or getattr(embeddings, "weight", None) is None:
        raise UnsupportedBackboneError(f"{type(model).__name__} has no input embedding table to share with the encoder")
    scale, notes = _probe_first_layer(model, layers[0])
    heads, kv_heads, head_dim, latent = _attention_geometry(config, layers)
    if latent:
        notes.append("latent attention (MLA): the encoder gets ordinary K/V heads no wider than the latent")
    inner = _first(config, "intermediate_size", "ffn_hidden_size", "n_inner", default=None)
    output = model.get_output_embeddings()
    return BackboneInfo(
        model_type=str(config.model_type),
        layers_path=path,
        num_layers=len(layers),
        layer_kinds=tuple(_layer_kind(config, index, layer) for index, layer in enumerate(layers)),
        hidden_size=int(config.hidden_size),
        intermediate_size=int((max(inner) if isinstance(inner, list | tuple) else inner) or 4 * config.hidden_size),
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(embeddings.weight.shape[0]),
        max_position_embeddings=position_count(config) or 1 << 17,
        hidden_act=str(_first(config, "hidden_act", "hidden_activation", "activation_function", default="silu")),
        rms_norm_eps=float(_first(config, *NORM_EPS_NAMES, default=1e-6)),
        rope_parameters=_rope_parameters(config),
        tied_embeddings=output is not None and output.weight is embeddings.weight,
        embedding_scale=scale,
        latent_attention=latent,
        notes=tuple(notes),
    )


def _layers_path(model: Any, count: int | None = None) -> str:
    count = count or getattr(text_config(model), "num_hidden_layers", None)
    lists: dict[str, int] = {name: len(part) for name, part in model.named_modules() if isinstance(part, nn.ModuleList)}
    found = [name for name, length in lists.items() if length == count and count]
    if not found:
        shown = ", ".join(f"{name} ({length})" for name, length in lists.items())
        raise UnsupportedBackboneError(
            f"{type(model).__name__} has no list of {count} decoder layers; lists found: {shown or 'none'}"
        )
    # experts and per-layer adapters are lists too, but deeper in the tree than the layers that hold them
    return min(found, key=lambda name: name.count("."))


class _FirstLayerReached(Exception):  # noqa: N818  a signal, not an error
    pass


def _probe_first_layer(model: PreTrainedModel, first_layer: nn.Module) -> tuple[float, list[str]]:
    """Compares the embedding module's output with what the first layer is given: Gemma and Granite scale in between (in
    the forward, or inside the embedding module), GPT-2 adds positions. Two prompts show whether the layer is causal."""
    if any(parameter.is_meta for parameter in model.parameters()):
        return 1.0, ["weights on the meta device: the embedding scale was not probed"]
    embeddings = model.get_input_embeddings()
    tokens = torch.tensor([[1, 2, 3], [1, 2, 4]], device=embeddings.weight.device)
    numbered = torch.arange(3, device=tokens.device)[None]
    expected = (*tokens.shape, text_config(model).hidden_size)
    seen: list[Tensor] = []
    made: list[Any] = []

    def stop(layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        seen.append(layer_input(args, kwargs).clone())
        made.extend([layer.forward(*args, **kwargs)] if seen[-1].shape == expected else [])
        raise _FirstLayerReached

    was_training = model.training
    model.eval()
    handle = first_layer.register_forward_pre_hook(stop, with_kwargs=True)
    try:
        for positions in [{}, {"position_ids": numbered}] if takes_positions(model) else [{}]:
            with torch.no_grad(), suppress(_FirstLayerReached):
                model(input_ids=tokens, use_cache=False, **positions)
    finally:
        handle.remove()
        model.train(was_training)
    if not seen:
        raise UnsupportedBackboneError(f"{type(model).__name__} never ran its first decoder layer {first_layer}")
    with torch.no_grad():
        table = embeddings(tokens).float()
    given = seen[0].float().to(table.device)
    if tuple(table.shape) != expected and tuple(given.shape) == expected:
        raise UnsupportedBackboneError(
            f"the embedding table of {type(model).__name__} is {table.shape[-1]} wide, its layers {expected[-1]}: "
            "the projection in between can't be shared with the encoder"
        )
    if tuple(given.shape) != expected:
        raise UnsupportedBackboneError(
            f"the layers of {type(model).__name__} work on a hidden state of shape {tuple(given.shape)}, "
            f"not [batch, tokens, hidden] = {expected}"
        )
    if not torch.equal(seen[0], seen[-1]):  # RoBERTa's begin behind its padding's
        raise UnsupportedBackboneError(
            f"{type(model).__name__} numbers a prompt's positions otherwise than transformers' `generate` does"
        )
    first, second = (made[0][0] if isinstance(made[0], tuple) else made[0]).float()
    if (first - second)[:2].norm() > 0.05 * (first - second).norm():  # BERT: 0.14; what is rounded less
        raise UnsupportedBackboneError(
            f"{type(model).__name__} isn't causal, its tokens read those behind them: load a decoder (a model that can "
            "be both, as BERT, is one with is_decoder=True in its configuration)"
        )
    scale = float((given * table).sum() / (table * table).sum().clamp_min(1e-30))
    residual = (given - scale * table).norm() / given.norm().clamp_min(1e-30)
    if residual > 0.02:  # bf16 rounding stays below 0.01
        return 1.0, ["the backbone adds to its embeddings before the first layer; the encoder reads the plain table"]
    return (1.0 if abs(scale - 1) < 1e-3 else scale), []


def layer_input(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden state among a decoder layer's arguments: the first positional one, or by its usual name."""
    value = args[0] if args else kwargs.get("hidden_states")
    if not isinstance(value, Tensor):
        raise UnsupportedBackboneError("a decoder layer was called without a hidden state tensor as first argument")
    return value


def find_child(layer: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The first child of `layer` with one of `names`."""
    children = (getattr(layer, name, None) for name in names)
    return next((child for child in children if isinstance(child, nn.Module)), None)


_HYBRID_KINDS = {"linear_attention": "linear", "conv": "linear", "hybrid": "both", "moe": "none", "mlp": "none",
                 "full_attention": "full", "sliding_attention": "sliding"}  # fmt: skip


def _layer_kind(config: Any, index: int, layer: nn.Module) -> str:
    kinds = getattr(config, "layer_types", None) or ()
    declared = str(kinds[index]) if index < len(kinds) else "none"
    if index < len(kinds) and {"linear_attention", "conv", "hybrid"}.intersection(kinds):
        # a hybrid's configuration says it, and its modules mislead: KDA has a `q_proj` too, Lightning is `self_attn`
        return _HYBRID_KINDS.get(declared, declared)
    # `conv` and `mixer` also name things inside attention layers, so ask for state only where it is a child
    if find_child(layer, LINEAR_NAMES) is not None:
        return "both" if any(_is_attention(module) for module in layer.modules() if module is not layer) else "linear"
    if not _is_attention(find_child(layer, ATTENTION_NAMES)):
        return declared
    if not kinds:  # Mistral: one window for all layers, no list of kinds
        windowed = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
        return "sliding" if windowed else "full"
    return "sliding" if "sliding" in declared else "full"


def _is_attention(module: nn.Module | None) -> bool:
    return module is not None and any(hasattr(module, name) for name in ("q_proj", "qkv_proj", "query_key_value",
        "c_attn", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "q_lin", "Wqkv"))  # fmt: skip


def _attention_geometry(config: Any, layers: nn.ModuleList) -> tuple[int, int, int, bool]:
    """(query heads, K/V heads, head_dim, latent?) of the encoder: the backbone's own where it has ordinary heads."""
    heads = int(_first(config, "num_attention_heads", "n_head", "num_heads"))
    children = (find_child(layer, ATTENTION_NAMES) for layer in layers)
    attention = next((child for child in children if _is_attention(child)), None)
    latent_width = _first(config, "kv_lora_rank", default=0)
    if latent_width:
        head_dim = int(_first(config, "v_head_dim", default=config.hidden_size // heads))
        width = int(latent_width) + int(_first(config, "qk_rope_head_dim", default=0))
        # ordinary K and V of the same bytes as the latent, so that a PICache layer costs no more than a decoder layer
        fitting = [n for n in range(1, heads + 1) if heads % n == 0 and 2 * n * head_dim <= width]
        return heads, max(fitting, default=1), head_dim, True
    kv_heads = int(_first(config, "num_key_value_heads", "num_kv_heads", default=heads))
    head_dim = getattr(attention, "head_dim", None) or _first(config, "head_dim", default=0)
    return heads, kv_heads, int(head_dim or config.hidden_size // heads), False


def _rope_parameters(config: Any) -> dict[str, Any]:
    """One set of rotary parameters for the encoder: the global layers' where a backbone has several."""
    parameters = dict(getattr(config, "rope_parameters", None) or {})
    if "full_attention" in parameters:
        parameters = dict(parameters["full_attention"])
    elif parameters and all(isinstance(value, dict) for value in parameters.values()):
        parameters = dict(next(iter(parameters.values())))
    parameters.setdefault("rope_type", "default")
    parameters.setdefault("rope_theta", 10_000.0)
    factor = parameters.get("partial_rotary_factor") or getattr(config, "partial_rotary_factor", None)
    if factor and factor != 1.0:
        parameters["partial_rotary_factor"] = float(factor)
    return parameters


def _first(config: Any, *names: str, default: Any = ...) -> Any:
    for name in names:
        if (value := getattr(config, name, None)) is not None:
            return value
    if default is ...:
        raise UnsupportedBackboneError(
            f"the configuration of {config.model_type} has none of {', '.join(names)}: the encoder needs softmax "
            "attention heads to take its shape from"
        )
    return default
