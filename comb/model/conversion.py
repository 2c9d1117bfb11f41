"""Turns a checkpoint in the layout of the published COMB release into an adapter folder and a plain backbone.

The release keeps everything in one file: ``chunk_model.*`` is the encoder with its K/V projections,
``language_model.model.layers.*`` the backbone, ``language_model.model.cross_layers.*`` the cross blocks. Its
`num_hidden_layers` counts cross layers too; `cross_attention_layers` does not: it holds indices of backbone layers.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig, PreTrainedConfig, PreTrainedModel

from comb.backbones.adapter import check_no_model_in, fingerprint_with_weights
from comb.backbones.damage import TOKENIZER_FILES, check_files, explained
from comb.backbones.tracebacks import named
from comb.backbones.whole import check_finite
from comb.files import read_json, share_weights
from comb.model.config import CombConfig, CombEncoderConfig
from comb.model.modeling import CombForCausalLM
from comb.model.weights import load_adapter

logger = logging.getLogger(__name__)

_CROSS = r"^language_model\.model\.cross_layers\."
ENCODER_RENAMES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"^chunk_model\.layers\.", "encoder.layers."),
        (r"^chunk_model\.([kv])_proj\.(\d+)\.", r"encoder.key_value_heads.\2.\1_proj."),
        (_CROSS + r"(\d+)\.cross_attn\.k_norm\.", r"encoder.key_value_heads.\1.k_norm."),
        (_CROSS + r"(\d+)\.cross_attn_attn_gate$", r"cross_blocks.\1.attention_gate"),
        (_CROSS + r"(\d+)\.cross_attn_mlp_gate$", r"cross_blocks.\1.mlp_gate"),
        (_CROSS, "cross_blocks."),
    )
)
BACKBONE_PREFIX = "language_model."
SHARED_EMBEDDING = "chunk_model.embed_tokens.weight"


def convert_release(source: str | Path, target: str | Path, *, backbone_name: str | None = None) -> CombForCausalLM:
    """Converts `source` into ``target/`` (the adapter) and ``target/backbone/`` (the plain backbone).

    Args:
        backbone_name: Hub id or folder to name as the backbone in the adapter's configuration (the same weights,
            already published); the folder written here otherwise.

    Returns:
        the converted model, loaded.

    Raises:
        ValueError: if `source` isn't in the release's layout, naming what differs.
    """
    source, target = Path(source), Path(target)
    check_no_model_in(target)  # as `source` is
    release = _read_config(source)
    check_files(source)
    with named(source), explained(source):
        # without the index: what is missing is named when it is loaded
        files = sorted(source.glob("model*.safetensors"))
        if not files:
            raise ValueError(f"{source} has no model*.safetensors")
        adapter, weights = split_weights({name: tensor for file in files for name, tensor in load_file(file).items()})
        positions = list(release["cross_attention_layers"])
        backbone = _build_backbone(release, weights, len(positions))
        config = CombConfig(
            backbone_name_or_path=backbone_name or "./backbone",  # relative to the adapter's folder
            backbone_config=AutoConfig.for_model(**backbone.config.to_dict()),
            backbone_fingerprint=fingerprint_with_weights(backbone),
            encoder_config=_encoder_config(backbone.config, adapter),
            cross_attention_layers=positions,
        )
        model = CombForCausalLM(config, backbone)
        model._place(load_adapter(model, adapter, source)).eval()
        check_finite(backbone, source)
        if (source / "generation_config.json").exists():
            model.generation_config = backbone.generation_config = GenerationConfig.from_pretrained(source)
    backbone.save_pretrained(target / "backbone")
    share_weights(target / "backbone")
    model.save_pretrained(target)
    for file in (file for pattern in TOKENIZER_FILES for file in source.glob(pattern)):
        for folder in (target, target / "backbone"):
            place = folder / file.relative_to(source)
            place.parent.mkdir(exist_ok=True)
            shutil.copy(file, place)
    logger.info("wrote the adapter to %s and its backbone to %s", target, target / "backbone")
    return model


def split_weights(weights: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(adapter weights under our names, backbone weights under the backbone's own names).

    Raises:
        ValueError: for a weight that belongs to neither, and when the encoder's embedding isn't the backbone's.
    """
    adapter: dict[str, Tensor] = {}
    backbone: dict[str, Tensor] = {}
    for name, tensor in weights.items():
        if name == SHARED_EMBEDDING:
            continue
        renamed = next((p.sub(to, name) for p, to in ENCODER_RENAMES if p.match(name)), None)
        if renamed is not None:
            adapter[renamed] = tensor
        elif name.startswith(BACKBONE_PREFIX):
            backbone[name.removeprefix(BACKBONE_PREFIX)] = tensor
        else:
            raise ValueError(f"weight {name!r} is neither encoder, cross layer nor backbone: not the release's layout")
    shared = weights.get(SHARED_EMBEDDING)
    if shared is not None:  # one tensor under two names may have been saved under either
        embedding = backbone.setdefault("model.embed_tokens.weight", shared)
        if not torch.equal(shared, embedding):
            raise ValueError("the encoder's embedding differs from the backbone's; this format shares one table")
    return adapter, backbone


def _read_config(source: Path) -> dict[str, Any]:
    path = source / "config.json"
    if not path.exists():
        raise ValueError(f"{source} has no config.json: give the folder of a published COMB checkpoint")
    release = read_json(path)
    text = release.get("text_config") or {}
    matched = re.fullmatch(r"comb[a-z0-9_]+", str(release.get("model_type")))
    known = isinstance(text, Mapping) and isinstance(text.get("num_hidden_layers"), int)
    layers = release.get("cross_attention_layers")
    whole = isinstance(layers, list) and all(isinstance(layer, int) for layer in layers)
    if not matched or not known or "model_type" not in text or not whole:
        raise ValueError(
            f"{path} has model_type {release.get('model_type')!r}; `comb convert` reads the published COMB layout "
            "(model_type 'combllama', a list of cross_attention_layers and a text_config that names its model_type and "
            "num_hidden_layers)"
        )
    return release


def _build_backbone(release: dict[str, Any], weights: dict[str, Tensor], num_cross: int) -> PreTrainedModel:
    text = dict(release["text_config"])
    text["num_hidden_layers"] = text["num_hidden_layers"] - num_cross
    tied = text.get("tie_word_embeddings", release.get("tie_word_embeddings"))
    if "lm_head.weight" not in weights and tied is False:
        raise ValueError("language_model.lm_head.weight is missing, and the configuration says it isn't tied")
    text["tie_word_embeddings"] = "lm_head.weight" not in weights
    for token in ("bos_token_id", "eos_token_id", "pad_token_id"):
        if text.get(token) is None and release.get(token) is not None:
            text[token] = release[token]
    config: PreTrainedConfig = AutoConfig.for_model(**text)
    dtype = next(iter(weights.values())).dtype
    backbone: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    missing, unexpected = backbone.load_state_dict(weights, strict=False)
    missing = [name for name in missing if not (name == "lm_head.weight" and config.tie_word_embeddings)]
    if missing or unexpected:
        raise ValueError(f"the backbone's weights don't fit {config.model_type}: missing {missing[:3]}, "
                         f"unexpected {unexpected[:3]}")  # fmt: skip
    backbone.tie_weights()
    return backbone.eval()


def _encoder_config(text: PreTrainedConfig, adapter: dict[str, Tensor]) -> CombEncoderConfig:
    layers = {int(name.split(".")[2]) for name in adapter if name.startswith("encoder.layers.")}
    needed = ("encoder.key_value_heads.0.k_norm.weight", *(f"encoder.layers.0.{part}.weight" for part in (
        "mlp.gate_proj", "self_attn.q_proj", "self_attn.k_proj")))  # fmt: skip
    if gone := [name for name in needed if name not in adapter]:
        raise ValueError(f"the encoder lacks {gone[0]}: download the checkpoint again")
    head_dim = adapter["encoder.key_value_heads.0.k_norm.weight"].shape[0]
    return CombEncoderConfig(
        hidden_size=text.hidden_size,
        intermediate_size=adapter["encoder.layers.0.mlp.gate_proj.weight"].shape[0],
        num_hidden_layers=len(layers),
        num_attention_heads=adapter["encoder.layers.0.self_attn.q_proj.weight"].shape[0] // head_dim,
        num_key_value_heads=adapter["encoder.layers.0.self_attn.k_proj.weight"].shape[0] // head_dim,
        head_dim=head_dim,
        hidden_act=text.hidden_act,
        rms_norm_eps=text.rms_norm_eps,
        max_position_embeddings=text.max_position_embeddings,
        rope_parameters=dict(text.rope_parameters),
        attention_bias="encoder.layers.0.self_attn.q_proj.bias" in adapter,
        attention_output_bias="encoder.layers.0.self_attn.o_proj.bias" in adapter,
        cross_attention_bias="cross_blocks.0.cross_attn.q_proj.bias" in adapter,
        mlp_bias="encoder.layers.0.mlp.gate_proj.bias" in adapter,
        kv_input_norm=False,
    )
