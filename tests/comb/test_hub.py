"""Model cards and publishing, with the real Hub client against a hub on this machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fake_hub import fake_hub
from families import open_gates, tiny
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from test_documents import byte_tokenizer

from comb import CombForCausalLM
from comb.hub import is_hub_id, plan_push, push


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """A saved adapter with what a training run leaves beside it."""
    folder = tmp_path / "my-adapter"
    model = open_gates(CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2))
    model.config.backbone_name_or_path = "owner/backbone"
    model.save_pretrained(folder)
    (folder / "training_args.bin").write_bytes(b"a token may be in here")
    (folder / "checkpoint-10").mkdir()
    (folder / "checkpoint-10" / "optimizer.pt").write_bytes(b"x")
    return folder


def test_the_card_is_valid_and_says_what_it_is(adapter: Path) -> None:
    card = ModelCard.load(adapter / "README.md")
    assert card.data.base_model == "owner/backbone"
    assert "position-independent-caching" in card.data.tags
    assert "2 layers, bidirectional" in card.text
    assert "before backbone layers [1, 3]" in card.text
    assert "256 bytes in float32" in card.text  # 2 tensors x 2 layers x 2 heads x 8 x 4 bytes


def test_what_a_person_wrote_stays(adapter: Path) -> None:
    path = adapter / "README.md"
    path.write_text(path.read_text().replace("---\n\n<!--", "---\n\nBy hand.\n\n<!--") + "\n## Limits\nMine.\n")
    model = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
    model.config.backbone_name_or_path = "owner/other"
    model.save_pretrained(adapter)
    text = path.read_text()
    assert "By hand." in text
    assert text.endswith("## Limits\nMine.\n")
    assert "**owner/other**" in text
    assert text.count("# my-adapter") == 1
    path.write_text("all my own")
    model.save_pretrained(adapter)
    assert path.read_text() == "all my own"


def test_scores_stand_in_the_card_with_their_command(adapter: Path) -> None:
    row = {"method": "comb", "n": 400, "em": 0.96, "f1": 0.99}
    results = {"argv": ["/usr/bin/comb", "eval", "out/x"], "results": [row]}
    (adapter / "results.json").write_text(json.dumps(results))
    training = {"argv": ["comb", "train", "c.yaml"], "steps": 20, "seed": 3, "tokens": {"examples": 7},
                "config": {"data": {"dataset": "squad"}, "train": {"answers": "gold"}}}  # fmt: skip
    (adapter / "training.json").write_text(json.dumps(training))
    card = plan_push(adapter, "me/x").card
    assert "| method `comb` | 96.0% exact match, 99.0% F1, n = 400 (`comb eval out/x`) |" in card
    assert "squad, 7 examples, gold answers, 20 steps, seed 3 (`comb train c.yaml`)" in card


def test_plan_names_what_goes_and_what_stays(adapter: Path) -> None:
    plan = plan_push(adapter, "me/tiny")
    assert {name for name, _ in plan.files} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "README.md",
    }
    assert set(plan.left_out) == {"training_args.bin", "checkpoint-10/optimizer.pt"}
    assert any("tokenizer" in warning for warning in plan.warnings)
    assert 'from_pretrained("me/tiny")' in plan.card


def test_a_backbone_that_others_cannot_load_is_warned_about(adapter: Path) -> None:
    config = json.loads((adapter / "config.json").read_text())
    (adapter / "config.json").write_text(json.dumps({**config, "backbone_name_or_path": "./backbone"}))
    assert any("not a Hub id" in warning for warning in plan_push(adapter, "me/x").warnings)


def test_hub_ids() -> None:
    assert is_hub_id("Qwen/Qwen3-8B")
    assert not any(
        is_hub_id(name) for name in ("nano", "./backbone", "/abs/path", "a/b/c", "../shared/x", "comb/methods")
    )


def test_a_folder_that_is_no_adapter(tmp_path: Path, adapter: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        plan_push(tmp_path, "me/x")
    weights = load_file(adapter / "model.safetensors")
    save_file({**weights, "backbone.lm_head.weight": torch.zeros(2)}, adapter / "model.safetensors")
    with pytest.raises(ValueError, match=r"belong to no adapter, among them 'backbone\.lm_head\.weight'"):
        plan_push(adapter, "me/x")
    (adapter / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="weights are missing"):
        plan_push(adapter, "me/x")
    tiny("llama").save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="model_type 'llama', not a COMB adapter"):
        plan_push(tmp_path / "plain", "me/x")


def test_only_files_at_the_top_are_published(adapter: Path) -> None:
    (adapter / "tokenizer_backup").mkdir()
    (adapter / "tokenizer_backup" / "secret.txt").write_text("x")
    (adapter / "README.md").unlink()
    plan = plan_push(adapter, "me/x")
    assert "tokenizer_backup/secret.txt" in plan.left_out
    assert "README.md" in dict(plan.files)
    assert not (adapter / "README.md").exists()  # a plan writes nothing


def test_bytes_in_the_card_follow_the_weights(tmp_path: Path) -> None:
    CombForCausalLM.from_backbone(tiny("llama").bfloat16(), num_encoder_layers=2).save_pretrained(tmp_path)
    assert "128 bytes in bfloat16" in (tmp_path / "README.md").read_text()


LOAD = """
import sys, torch
from comb import CombForCausalLM
model = CombForCausalLM.from_pretrained("me/tiny", backbone=sys.argv[1])
print(model.fingerprint)
"""


@pytest.mark.slow
def test_push_and_load_by_id(adapter: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
    tiny("llama").save_pretrained(tmp_path / "backbone")
    with fake_hub() as hub:
        address = push(adapter, "me/tiny", private=True, api=HfApi(endpoint=hub.url, token="hf_fake"))
        assert address.startswith(f"{hub.url}/me/tiny/commit/")
        assert set(hub.repos["me/tiny"]) == {"config.json", "generation_config.json", "model.safetensors", "README.md"}
        assert hub.private["me/tiny"]
        monkeypatch.setattr("comb.pretrained._api", lambda token: HfApi(endpoint=hub.url, token="hf_fake"))
        model = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
        model.push_to_hub("me/method", tokenizer=byte_tokenizer())
        model.save_pretrained(tmp_path / "copy", tokenizer=byte_tokenizer(), push_to_hub=True, repo_id="me/argument")
        for name in ("me/method", "me/argument"):
            assert "tokenizer.json" in hub.repos[name]
            assert b"base_model: owner/backbone" in hub.repos[name]["README.md"]
        environment = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0",
                       "HF_TOKEN": "hf_fake", "HF_HUB_DISABLE_XET": "1"}  # fmt: skip
        command = [sys.executable, "-c", LOAD, str(tmp_path / "backbone")]
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
        assert result.returncode == 0, result.stderr[-2000:]
    local = CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama"))
    assert result.stdout.split()[-1] == local.fingerprint
