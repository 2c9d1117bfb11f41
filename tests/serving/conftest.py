"""Fixtures shared by the serving tests: an adapter with open gates on the nano backbone, saved with its tokenizer."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from comb import CombForCausalLM
from comb_training.plugin import register

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="session")
def nano_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `comb serve` takes; its encoder is untrained, its gates are open."""
    from comb_training.nano import CHECKPOINT

    register()
    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("adapter")
    model = CombForCausalLM.from_backbone(str(CHECKPOINT), num_encoder_layers=2)
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(0.7)
            block.mlp_gate.fill_(0.4)
    model.save_pretrained(folder, tokenizer=AutoTokenizer.from_pretrained(CHECKPOINT))
    return folder
