"""Models of a run: a fresh encoder, an adapter to go on from, a backbone for block attention, what was trained."""

from __future__ import annotations

import os
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from comb.backbones.discovery import decoder_layers
from comb.backbones.loading import resolve_name
from comb.model.modeling import CombForCausalLM
from comb_training.config import Config
from comb_training.models.block_attention import BlockAttentionModel
from comb_training.models.lora import add_lora


def load_model(config: Config) -> CombForCausalLM:
    """A fresh encoder on the configured backbone, or the adapter of `model.init_from`, on the configured device."""
    options = dict(config.model.options)
    model: Any
    # trained weights stay in float32 whatever the backbone's: small updates, of gates above all, are not lost
    options.setdefault("adapter_dtype", torch.float32)
    if config.model.init_from is not None:
        shaping = sorted({"max_document_tokens", "initialization"} & options.keys())
        if shaping:
            raise ValueError(f"model.options {', '.join(shaping)} can't change the adapter of model.init_from")
        model = CombForCausalLM.from_pretrained(
            resolve_name(config.model.init_from), dtype=dtype_of(config.model.dtype), **options
        )
        model.requires_grad_(True).backbone.requires_grad_(False)
    else:
        model = CombForCausalLM.from_backbone(
            config.model.backbone,
            num_encoder_layers=config.model.num_encoder_layers,
            cross_attention_layers=config.model.cross_attention_layers,
            encoder_causal=config.model.encoder_causal,
            dtype=dtype_of(config.model.dtype),
            **options,
        )
    if config.train.lora_rank is not None:
        add_lora(
            model.get_submodule("encoder.layers"),
            rank=config.train.lora_rank,
            alpha=config.train.lora_alpha,
            dropout=config.train.lora_dropout,
        )
    loaded: CombForCausalLM = model.to(device_of(config))
    return loaded


def load_block_model(config: Config) -> BlockAttentionModel:
    """The configured backbone, all of it trainable, or with LoRA on its layers."""
    backbone: Any = AutoModelForCausalLM.from_pretrained(
        resolve_name(config.model.backbone), dtype=dtype_of(config.model.dtype), **config.model.options
    )
    model = BlockAttentionModel(backbone.to(device_of(config)))
    train = config.train
    if train.lora_rank is not None:
        backbone.requires_grad_(False)
        layers = decoder_layers(backbone)
        add_lora(layers, rank=train.lora_rank, alpha=train.lora_alpha, dropout=train.lora_dropout)
    return model


def load_checkpoint(name_or_path: str, config: Config) -> Any:
    """An adapter with its backbone, or a plain backbone, on the configured device."""
    set_threads(config)
    model: Any = AutoModelForCausalLM.from_pretrained(resolve_name(name_or_path), dtype=dtype_of(config.model.dtype))
    return model.to(device_of(config)).eval()


def set_threads(config: Config) -> None:
    """Applies `model.cpu_threads` to this process. Raises ValueError if it is less than one."""
    threads = config.model.cpu_threads
    if threads is None:
        return
    if threads < 1:
        raise ValueError(f"model.cpu_threads must be at least 1, not {threads}")
    torch.set_num_threads(threads)


def device_of(config: Config) -> torch.device:
    """Where to run. Raises ValueError if a GPU is asked for where there is none."""
    if config.model.device == "cuda" and not torch.cuda.is_available():
        raise ValueError("model.device=cuda, but there is no GPU that torch can use; model.device=cpu runs anywhere")
    kind = config.model.device
    if kind == "auto":
        kind = "cuda" if torch.cuda.is_available() else "cpu"
    # under torchrun each process drives the GPU of its number
    return torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)


def dtype_of(name: str) -> Any:
    """`model.dtype` for transformers. Raises ValueError if it is none."""
    if name == "auto":
        return "auto"
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f"model.dtype is float32, bfloat16, float16 or auto, not {name!r}")
    return dtype
