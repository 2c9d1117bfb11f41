"""What both servers serve: a backbone's folder and an adapter's, made with random weights where none are given."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

TOKENIZER = "nano"  # comes with the package, so that nothing is downloaded
OPEN_GATES = 0.5


@dataclass(frozen=True)
class Sizes:
    """A random Llama with an encoder."""

    layers: int
    encoder_layers: int
    hidden: int
    heads: int
    kv_heads: int
    dtype: str


@dataclass(frozen=True)
class Models:
    """Folders or Hub ids of the backbone and its adapter; `name` for titles."""

    backbone: str
    adapter: str
    name: str


def make_models(folder: Path, sizes: Sizes, positions: int, seed: int = 0) -> Models:
    """A backbone of random weights and an adapter on it, saved below `folder` with a tokenizer.

    Gates of the cross blocks are open: work is the same with closed ones, but answers would not depend on documents.

    Args:
        positions: longest prompt and answer.

    Raises:
        ValueError: for sizes that don't go together.
    """
    import torch
    from transformers import AutoTokenizer

    from comb import CombForCausalLM
    from comb.backbones.loading import resolve_name
    from comb.bench.inputs import make_random

    if not 1 <= sizes.encoder_layers <= sizes.layers:
        raise ValueError(f"an encoder has 1 to {sizes.layers} layers, as its backbone, not {sizes.encoder_layers}")
    tokenizer: Any = AutoTokenizer.from_pretrained(resolve_name(TOKENIZER))
    shape = {"layers": sizes.layers, "hidden": sizes.hidden, "heads": sizes.heads, "kv_heads": sizes.kv_heads}
    backbone = make_random({**shape, "vocab": len(tokenizer)}, positions, sizes.dtype, "cpu", seed=seed)
    tokenizer.model_max_length = positions
    place = folder / "backbone"
    backbone.save_pretrained(place)
    tokenizer.save_pretrained(place)
    torch.manual_seed(seed)
    model: Any = CombForCausalLM.from_backbone(
        str(place), num_encoder_layers=sizes.encoder_layers, dtype=backbone.dtype
    )
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(OPEN_GATES)
            block.mlp_gate.fill_(OPEN_GATES)
    model.save_pretrained(folder / "adapter", tokenizer=tokenizer)
    parameters = sum(parameter.numel() for parameter in backbone.parameters()) / 1e6
    name = f"random Llama of {parameters:.0f} M parameters, {sizes.layers} layers, {sizes.encoder_layers} of encoder"
    return Models(str(place), str(folder / "adapter"), name)
