"""What both servers serve: a backbone's folder and an adapter's, made with random weights where none are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from comb import CombForCausalLM
from comb.backbones.loading import backbone_beside, load_config, resolve_name
from comb.bench.work.random_prompts import random_model
from comb.model.config import CombConfig
from comb_serving.bench.options import ServeBenchOptions

TOKENIZER = "nano"  # comes with the package, so that nothing is downloaded
OPEN_GATES = 0.5


@dataclass(frozen=True)
class Models:
    """Folders or Hub ids of what plain vLLM serves and what `comb serve` does; `name` for titles."""

    backbone: str
    adapter: str
    name: str


def models_of(options: ServeBenchOptions, folder: Path) -> Models:
    """The checkpoint that the options name and its backbone; or random ones, saved below `folder` with a tokenizer.

    Gates of random cross blocks are open: work is the same with closed ones, but answers would not depend on documents.

    Raises:
        ValueError: for sizes that don't go together.
    """
    if options.checkpoint is not None:
        place = resolve_name(options.checkpoint)
        if options.method is not None:
            return Models(place, place, f"{options.checkpoint}, {options.method}")
        backbone = options.backbone or backbone_beside(load_config(place, CombConfig).backbone_name_or_path, place)
        return Models(resolve_name(backbone), place, options.checkpoint)
    if options.method is not None:
        raise ValueError("--method is for a plain model: name it with --checkpoint")
    if not 1 <= options.encoder_layers <= options.layers:
        raise ValueError(f"an encoder has 1 to {options.layers} layers, as its backbone, not {options.encoder_layers}")
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_name(TOKENIZER))
    tokenizer.model_max_length = options.positions
    made = random_model(
        layers=options.layers, hidden=options.hidden, heads=options.heads, kv_heads=options.kv_heads,
        vocab=len(tokenizer), positions=options.positions, seed=options.seed,
    ).to(dtype=getattr(torch, options.dtype))  # fmt: skip
    place = str(folder / "backbone")
    made.save_pretrained(place)
    tokenizer.save_pretrained(place)
    torch.manual_seed(options.seed)
    model: Any = CombForCausalLM.from_backbone(place, num_encoder_layers=options.encoder_layers, dtype=made.dtype)
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(OPEN_GATES)
            block.mlp_gate.fill_(OPEN_GATES)
    model.save_pretrained(folder / "adapter", tokenizer=tokenizer)
    parameters = sum(parameter.numel() for parameter in made.parameters()) / 1e6
    size = f"{parameters:.0f} M parameters, {options.layers} layers, {options.encoder_layers} of encoder"
    return Models(place, str(folder / "adapter"), f"random Llama of {size}")
