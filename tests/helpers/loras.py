"""LoRAs of the nano backbone in PEFT's format, and the models that they amount to."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from comb_training.nano import CHECKPOINT

RANK, ALPHA = 4, 8
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def make_lora(folder: Path, seed: int, size: float = 0.15) -> Path:
    """Saves random matrices as a LoRA in `folder`, and the model with them merged in ``folder/merged``; the latter's
    path."""
    draw = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_pretrained(CHECKPOINT, dtype=torch.float32)
    matrices = {}
    for name, module in model.named_modules():
        if name.rsplit(".", 1)[-1] not in TARGETS:
            continue
        outputs, inputs = module.weight.shape
        down = torch.randn(RANK, inputs, generator=draw) / inputs**0.5
        up = size * torch.randn(outputs, RANK, generator=draw)
        module.weight.data += ALPHA / RANK * up @ down
        matrices |= {f"base_model.model.{name}.lora_A.weight": down, f"base_model.model.{name}.lora_B.weight": up}
    folder.mkdir(parents=True)
    save_file(matrices, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0,
              "bias": "none", "target_modules": list(TARGETS)}  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config))
    merged = folder / "merged"
    model.save_pretrained(merged)
    AutoTokenizer.from_pretrained(CHECKPOINT).save_pretrained(merged)
    return merged
