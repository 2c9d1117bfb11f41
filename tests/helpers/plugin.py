"""Fixtures of all tests on a real vLLM, on a CPU and on a GPU: the plug-in where it isn't installed, and an adapter."""

from __future__ import annotations

import os
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> None:
    """vLLM finds the plug-in here and in processes it starts, installed or not; it works alone in this process."""
    pytest.importorskip("vllm")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    if any(entry.name == "comb" for entry in metadata.entry_points(group="vllm.general_plugins")):
        return
    folder = tmp_path_factory.mktemp("entry-points")
    info = folder / "comb_pic-0.2.0.dist-info"
    info.mkdir()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: comb-pic\nVersion: 0.2.0\n")
    (info / "entry_points.txt").write_text(
        "".join(
            f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
            for group, entries in project["entry-points"].items()
        )
    )
    sys.path.insert(0, str(folder))
    places = [str(folder), *(str(ROOT / part) for part in (".", "training", "serving"))]
    os.environ["PYTHONPATH"] = os.pathsep.join([*places, os.environ.get("PYTHONPATH", "")])


@pytest.fixture(scope="session")
def nano_adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter on the nano backbone, saved with its tokenizer: its encoder is untrained, its gates are open."""
    import torch
    from transformers import AutoTokenizer

    from comb import CombForCausalLM
    from comb_training.nano import CHECKPOINT

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("adapter")
    model = CombForCausalLM.from_backbone(str(CHECKPOINT), num_encoder_layers=2, front="prose")
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(0.7)
            block.mlp_gate.fill_(0.4)
    model.save_pretrained(folder, tokenizer=AutoTokenizer.from_pretrained(CHECKPOINT))
    return folder
