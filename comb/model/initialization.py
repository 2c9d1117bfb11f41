"""Starts encoder and cross blocks from the backbone's own layers, where the shapes allow.

A decoder layer of any family is first read into Llama-style parts (`read_layer`): fused projections are split,
``1 + w`` norms, residual multipliers and unusual softmax scales are folded into plain weights. What can't be read,
or has another shape, stays random.
"""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from comb.backbones.discovery import ATTENTION_NAMES, MLP_NAMES, BackboneInfo, find_child
from comb.backbones.torch_private import is_plain
from comb.model.config import CombEncoderConfig
from comb.model.cross_attention import CrossBlock
from comb.model.encoder import KeyValueHead, apply_rotary

logger = logging.getLogger(__name__)

TURN = 200
"""Tokens by which the keys of blocks that start as the backbone's own attention stand behind what reads them.

Blocks have no positions, and heads that look at what is near find all of it in a document side by side. At 100 to 300
tokens such a block adds .35 to .38 (R2) of what documents add in SmolLM2-135M's attention, at 0 .20, at 800 .14.
"""


@dataclass
class LayerParts:
    """One decoder layer in Llama-style names: ``self_attn.q_proj.weight`` and so on.

    Detached, and views of the layer's own weights where nothing had to be folded in: an 8B backbone isn't copied.
    """

    weights: dict[str, Tensor] = field(default_factory=dict)
    qk_norm: str = "none"
    norm_placement: str = "pre"

    def has(self, *names: str) -> bool:
        return all(name in self.weights for name in names)


@torch.no_grad()
def read_layer(layer: nn.Module, info: BackboneInfo) -> LayerParts:
    """The parts of a decoder layer that have a counterpart in a Llama-style layer; those found, no more."""
    with ExitStack() as stack:
        for module in layer.modules():
            if hasattr(module, "_hf_hook"):  # what accelerate keeps on the CPU or a disk is there while it is read
                from accelerate.utils import align_module_device

                stack.enter_context(align_module_device(module))
        return _read_layer(layer, info)


def _read_layer(layer: nn.Module, info: BackboneInfo) -> LayerParts:
    parts = LayerParts()
    attention, mlp = find_child(layer, ATTENTION_NAMES), find_child(layer, MLP_NAMES)
    if attention is not None and not info.latent_attention:
        _read_attention(parts, attention, info)
    if mlp is not None:
        gate, up, down = (_tensor(mlp, f"{name}.weight") for name in ("gate_proj", "up_proj", "down_proj"))
        fused = _tensor(mlp, "gate_up_proj.weight")
        if fused is not None and fused.ndim == 2:
            gate, up = fused.chunk(2)
        for name, tensor in (("gate_proj", gate), ("up_proj", up), ("down_proj", down)):
            if tensor is not None and tensor.ndim == 2:
                parts.weights[f"mlp.{name}.weight"] = tensor
    _read_norms(parts, layer, info)
    multiplier = getattr(layer, "residual_multiplier", 1.0)  # Granite's
    if multiplier != 1.0:
        for name in ("self_attn.o_proj.weight", "mlp.down_proj.weight"):
            if name in parts.weights:
                parts.weights[name] = parts.weights[name].float() * float(multiplier)
    return parts


def _read_attention(parts: LayerParts, attention: nn.Module, info: BackboneInfo) -> None:
    heads, kv_heads, head_dim = info.num_attention_heads, info.num_key_value_heads, info.head_dim
    weights = parts.weights
    for kind in ("weight", "bias"):
        if (fused := _tensor(attention, f"qkv_proj.{kind}")) is not None:
            sizes = [heads * head_dim, kv_heads * head_dim, kv_heads * head_dim]
            split = fused.split(sizes) if len(fused) == sum(sizes) else ()
        elif (fused := _tensor(attention, f"query_key_value.{kind}")) is not None:
            # GPT-NeoX: per head its query, key and value in turn
            per_head = fused.unflatten(0, (heads, 3, head_dim)) if len(fused) == 3 * heads * head_dim else None
            split = tuple(per_head[:, i].flatten(0, 1) for i in range(3)) if per_head is not None else ()
        else:
            found = [_tensor(attention, f"{name}.{kind}") for name in ("q_proj", "k_proj", "v_proj")]
            split = tuple(tensor for tensor in found if tensor is not None) if None not in found else ()
        for name, tensor in zip(("q_proj", "k_proj", "v_proj"), split, strict=False):
            weights[f"self_attn.{name}.{kind}"] = tensor
    output = next((t for n in ("o_proj", "dense", "out_proj")
                   if (t := _tensor(attention, f"{n}.weight")) is not None), None)  # fmt: skip
    if output is not None:
        weights["self_attn.o_proj.weight"] = output
    for ours, theirs in (("q_norm", ("q_norm", "q_layernorm")), ("k_norm", ("k_norm", "k_layernorm"))):
        norm = find_child(attention, theirs)
        scale = _rms_weight(norm) if norm is not None else None
        if scale is not None:
            parts.qk_norm = "head" if len(scale) == head_dim else "flat"
            weights[f"self_attn.{ours}.weight"] = scale
    factor = float(getattr(attention, "scaling", head_dim**-0.5)) * math.sqrt(head_dim)
    if abs(factor - 1.0) > 1e-6:
        # a softmax scale other than 1/sqrt(head_dim) (Granite, Gemma) goes into whatever sets the queries' size
        set_by = ["q_proj.weight", "q_proj.bias"] if parts.qk_norm == "none" else ["q_norm.weight"]
        for name in (f"self_attn.{part}" for part in set_by):
            if name in weights:
                weights[name] = weights[name].float() * factor


def _read_norms(parts: LayerParts, layer: nn.Module, info: BackboneInfo) -> None:
    """Names differ in what they mean: Gemma's `post_attention_layernorm` stands behind, Llama's in front of the MLP."""
    before_mlp = find_child(layer, ("pre_feedforward_layernorm", "pre_ff_layernorm", "post_self_attn_layernorm"))
    after_mlp = find_child(layer, ("post_feedforward_layernorm", "post_mlp_layernorm"))
    first = find_child(layer, ("input_layernorm",))
    second = find_child(layer, ("post_attention_layernorm",))
    if before_mlp is not None and after_mlp is not None and first is not None:
        parts.norm_placement = "sandwich"
        named = {"input_layernorm": first, "attention_output_norm": second,
                 "post_attention_layernorm": before_mlp, "mlp_output_norm": after_mlp}  # fmt: skip
    elif first is None and after_mlp is not None:
        parts.norm_placement = "post"
        named = {"attention_output_norm": second, "mlp_output_norm": after_mlp}
    else:
        named = {"input_layernorm": first, "post_attention_layernorm": second or before_mlp}
    for name, norm in named.items():
        scale = _rms_weight(norm, info.hidden_size) if norm is not None else None
        if scale is not None:
            parts.weights[f"{name}.weight"] = scale


def _rms_weight(norm: nn.Module, size: int | None = None) -> Tensor | None:
    """The plain weight of an RMSNorm, whatever convention it stores (w or 1 + w); None for anything else.

    Asked of the module itself: an RMSNorm maps x to weight * x / rms(x), for every x.
    """
    parameter = next(norm.parameters(), None)
    if parameter is None or parameter.ndim != 1 or (size is not None and len(parameter) != size):
        return None
    generator = torch.Generator().manual_seed(0)
    norm = copy.deepcopy(norm)
    if parameter.is_meta:  # only the shape of things is asked for: what kind of norm it is shows with any weights
        norm = norm.to_empty(device="cpu")
        for own in norm.parameters():
            nn.init.constant_(own, 0.5)
    probes = torch.randn(2, len(parameter), generator=generator, device="cpu") * 3 + 1
    probes = probes.to(next(norm.parameters()).device)
    first, second = norm.float()(probes) / (probes / probes.pow(2).mean(-1, keepdim=True).sqrt())
    # a LayerNorm also subtracts the mean, so its two answers disagree
    if (first - second).abs().max() > 1e-3 * first.abs().max().clamp_min(1e-6):
        return None
    weight: Tensor = ((first + second) / 2).to(parameter.device)
    # measured, it is rounded as the machine rounds: of the usual conventions, what they are exactly
    plain = parameter.detach()
    exact: tuple[Tensor, ...] = (plain, (plain.double() + 1).float())
    if plain.is_meta:
        return plain
    return next((each for each in exact if torch.allclose(each.float(), weight, rtol=1e-4, atol=1e-5)), weight)


def _tensor(module: nn.Module, path: str) -> Tensor | None:
    try:
        value = module.get_parameter(path)
    except AttributeError:
        return None
    return value.detach() if is_plain(value) else None


def encoder_config_for(
    backbone: PreTrainedModel,
    info: BackboneInfo,
    *,
    num_layers: int,
    causal: bool,
    max_document_tokens: int | None,
    initialization: str,
    front_tokens: int = 0,
) -> CombEncoderConfig:
    """The encoder's shape: the backbone's geometry, and room for what its layers hold besides.

    Args:
        initialization: ``random`` is a Llama-style layer whatever the backbone's layers have; ``first`` normalises the
            queries and keys of the cross-attention only where the backbone does.
    """
    config = CombEncoderConfig(
        hidden_size=info.hidden_size,
        intermediate_size=info.intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=info.num_attention_heads,
        num_key_value_heads=info.num_key_value_heads,
        head_dim=info.head_dim,
        hidden_act=info.hidden_act,
        rms_norm_eps=max(info.rms_norm_eps, 1e-6),
        max_position_embeddings=(
            info.max_position_embeddings - front_tokens if max_document_tokens is None else max_document_tokens
        ),
        front_tokens=front_tokens,
        rope_parameters=info.rope_parameters,
        causal=causal,
    )
    if initialization == "random":
        return config
    part = layer_parts(backbone, info, info.num_layers // 2)
    config.qk_norm, config.norm_placement = part.qk_norm, part.norm_placement
    config.attention_bias = part.has("self_attn.q_proj.bias")
    if initialization == "first" and part.qk_norm == "none":
        config.cross_qk_norm = "none"
    return config


@torch.no_grad()
def initialize_random(modules: Iterable[nn.Module], std: float, depth: int) -> None:
    """Normal weights, smaller by sqrt(2 depth) where they write to the residual stream; norms one, biases zero."""
    for root in modules:
        for name, module in root.named_modules():
            if isinstance(module, nn.Linear):
                writes = name.endswith(("o_proj", "down_proj"))
                nn.init.normal_(module.weight, std=std / math.sqrt(2 * depth) if writes else std)
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif (weight := getattr(module, "weight", None)) is not None:
                nn.init.ones_(weight)


def copy_parts(target: nn.Module, parts: LayerParts, renamed: dict[str, str] | None = None) -> list[str]:
    """Copies every part whose name and shape `target` has; returns the names that were copied.

    `renamed` maps a prefix of the parts' names to the target's; None keeps them as they are.
    """
    own = dict(target.named_parameters())
    copied = []
    for name, tensor in parts.weights.items():
        if renamed is not None:
            prefix = next((p for p in renamed if name.startswith(p)), None)
            if prefix is None:
                continue
            name = renamed[prefix] + name[len(prefix) :]
        parameter = own.get(name)
        if parameter is not None and parameter.shape == tensor.shape:
            parameter.data.copy_(tensor)
            copied.append(name)
    return copied


def sources_of_layers(count: int, info: BackboneInfo, initialization: str) -> list[int] | None:
    """The backbone's layers that `count` layers of an encoder begin as: its first ones, or evenly spaced from the first
    on, with repeats where it has fewer; None at random. Raises ValueError if it hasn't so many first ones."""
    if initialization == "random":
        return None
    if initialization == "backbone":
        return [index * info.num_layers // count for index in range(count)]
    if count > info.num_layers:
        raise ValueError(f"the backbone has {info.num_layers} layers, of which {count} can't be the encoder's first")
    return list(range(count))


@torch.no_grad()
def initialize_from_backbone(model: Any, *, turned: bool) -> None:
    """Each encoder layer of `model` from the backbone's layer that its configuration names, each cross block and its
    K/V head from the layer behind it, `turned` by `TURN` tokens.

    Layers without softmax attention (linear layers of a hybrid, latent attention) give their MLP and norms; the
    attention then comes from the nearest layer that has one, if any.
    """
    encoder, blocks, backbone, info = model.encoder, model.cross_blocks, model.backbone, model.info
    copied = 0
    for target, source in zip(encoder.layers, model.config.copied_layers, strict=True):
        copied += len(copy_parts(target, layer_parts(backbone, info, source)))
    for block, head, position in zip(blocks, encoder.key_value_heads, model.config.cross_attention_layers, strict=True):
        copied += _start_cross_block(block, head, layer_parts(backbone, info, position))
        if turned and encoder.config.cross_qk_norm == "none":  # behind a norm's weights it would be another turn
            cosine, sine = encoder.rotary(torch.tensor([[-TURN]], device=head.k_proj.weight.device))
            for parameter in head.k_proj.parameters():
                keys = parameter.view(info.num_key_value_heads, info.head_dim, -1).mT[None]  # [1, heads, inputs, dim]
                parameter.copy_(apply_rotary(keys, cosine, sine)[0].mT.reshape(parameter.shape))
    total = sum(1 for module in (encoder, blocks) for _ in module.parameters())
    logger.info("encoder and cross blocks: %d of %d tensors start from the backbone's layers", copied, total)


def layer_parts(backbone: PreTrainedModel, info: BackboneInfo, index: int) -> LayerParts:
    """`read_layer` of layer `index`, with the attention of the nearest layer that has one if it has none itself."""
    layers: nn.ModuleList = backbone.get_submodule(info.layers_path)
    part = read_layer(layers[index], info)
    if part.has("self_attn.q_proj.weight") or info.latent_attention:
        return part
    for other in sorted(range(len(layers)), key=lambda other: abs(other - index)):
        donor = read_layer(layers[other], info)
        if donor.has("self_attn.q_proj.weight"):
            attention = {name: tensor for name, tensor in donor.weights.items() if name.startswith("self_attn.")}
            return replace(part, weights={**part.weights, **attention}, qk_norm=donor.qk_norm)
    return part


def _start_cross_block(block: CrossBlock, head: KeyValueHead, part: LayerParts) -> int:
    copied = copy_parts(head, part, {
        "self_attn.k_proj": "k_proj", "self_attn.v_proj": "v_proj", "input_layernorm": "norm"})  # fmt: skip
    if part.qk_norm == "head":
        copied += copy_parts(head, part, {"self_attn.k_norm": "k_norm"})
    copied += copy_parts(block, part, {
        "self_attn.q_proj": "cross_attn.q_proj", "self_attn.o_proj": "cross_attn.o_proj", "mlp.": "mlp.",
        "input_layernorm": "input_layernorm", "post_attention_layernorm": "post_attention_layernorm"})  # fmt: skip
    if part.qk_norm == "head":
        copied += copy_parts(block, part, {"self_attn.q_norm": "cross_attn.q_norm"})
    elif not isinstance(head.k_norm, nn.Identity) and part.has("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
        # cross-attention that normalises where the layer doesn't: its norms take over the projections' size
        for norm, name in ((block.cross_attn.q_norm, "q_proj"), (head.k_norm, "k_proj")):
            weight, scale = part.weights[f"self_attn.{name}.weight"].float(), part.weights.get("input_layernorm.weight")
            if scale is not None and len(scale) == weight.shape[1]:
                weight = weight * scale
            # inputs of unit variance per channel: E[y_j^2] = sum_i (W_ji w_i)^2 + b_j^2, averaged over all channels
            variance = weight.pow(2).sum(1)
            if (bias := part.weights.get(f"self_attn.{name}.bias")) is not None:
                variance = variance + bias.float().pow(2)
            norm.get_parameter("weight").fill_(variance.mean().sqrt())
    return len(copied)
