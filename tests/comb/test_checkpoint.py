"""Saving and loading: the adapter alone, its backbone checked, and damage named."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from comb import CombConfig, CombForCausalLM
from comb.backbones.loading import resolve_name
from tests.helpers.families import FAMILIES, open_gates, tiny


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """``backbone/`` and ``adapter/`` of a tiny Llama, gates open."""
    backbone = tiny("llama")
    backbone.save_pretrained(tmp_path / "backbone")
    model = CombForCausalLM.from_backbone(str(tmp_path / "backbone"), num_encoder_layers=2)
    open_gates(model).save_pretrained(tmp_path / "adapter")
    return tmp_path


def logits(model: CombForCausalLM) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.tensor([[5, 6, 7]]), documents=[model.encode([[8, 9, 10]])]).logits


def edit(path: Path, **values: object) -> None:
    config = json.loads(path.read_text())
    config.update(values)
    path.write_text(json.dumps(config))


def test_the_folder_holds_the_adapter_alone(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = {path.name for path in (saved / "adapter").iterdir()}
    assert {"config.json", "model.safetensors", "README.md", "generation_config.json"} <= names
    backbone = json.loads((saved / "adapter" / "config.json").read_text())["backbone_config"]
    assert backbone["model_type"] == "llama"
    assert "_name_or_path" not in backbone  # where the backbone lay here is nobody else's business
    weights = load_file(saved / "adapter" / "model.safetensors")
    with caplog.at_level(logging.WARNING, logger="comb"):
        model = CombForCausalLM.from_pretrained(saved / "adapter")
    assert not caplog.records
    assert all(p.requires_grad == (not n.startswith("backbone.")) for n, p in model.named_parameters())
    assert set(weights) == {name for name, p in model.named_parameters() if p.requires_grad}
    config = json.loads((saved / "adapter" / "config.json").read_text())
    assert config["model_type"] == "comb"
    assert config["backbone_config"]["model_type"] == "llama"
    assert config["backbone_name_or_path"] == "backbone"  # and where it lies is found by whoever made it
    assert config["architectures"] == ["CombForCausalLM"]


@pytest.mark.parametrize("loader", [CombForCausalLM, AutoModelForCausalLM])
def test_round_trip(saved: Path, loader: type) -> None:
    torch.manual_seed(99)  # whatever the state of the generator, loading draws nothing from it
    model = loader.from_pretrained(str(saved / "adapter"))
    assert isinstance(model, CombForCausalLM)
    assert not model.training
    again = loader.from_pretrained(saved / "adapter")
    assert torch.equal(logits(model), logits(again))
    assert model.fingerprint == again.fingerprint
    direct = CombForCausalLM.from_pretrained(saved / "adapter", backbone=tiny("llama"))
    assert torch.equal(logits(model), logits(direct))
    assert isinstance(AutoConfig.from_pretrained(saved / "adapter"), CombConfig)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_round_trips(family: str, tmp_path: Path) -> None:
    model = open_gates(CombForCausalLM.from_backbone(tiny(family), num_encoder_layers=2))
    model.save_pretrained(tmp_path)
    loaded = CombForCausalLM.from_pretrained(tmp_path, backbone=tiny(family))
    assert torch.equal(logits(loaded), logits(model))


def test_sharded_weights(saved: Path) -> None:
    model = CombForCausalLM.from_pretrained(saved / "adapter")
    model.save_pretrained(saved / "sharded", max_shard_size="20KB")
    assert (saved / "sharded" / "model.safetensors.index.json").exists()
    assert torch.equal(logits(CombForCausalLM.from_pretrained(saved / "sharded")), logits(model))


def test_dtype_reaches_backbone_and_adapter(saved: Path) -> None:
    model = CombForCausalLM.from_pretrained(saved / "adapter", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    mixed = CombForCausalLM.from_pretrained(saved / "adapter", dtype=torch.bfloat16, adapter_dtype=torch.float32)
    assert {p.dtype for n, p in mixed.named_parameters() if p.requires_grad} == {torch.float32}
    assert mixed.backbone.dtype == torch.bfloat16


def test_a_mixed_precision_adapter_keeps_its_precision(saved: Path, tmp_path: Path) -> None:
    backbone = tiny("llama").bfloat16()
    backbone.save_pretrained(tmp_path / "half")
    options = {"num_encoder_layers": 2, "adapter_dtype": torch.float32}
    CombForCausalLM.from_backbone(str(tmp_path / "half"), **options).save_pretrained(tmp_path / "mixed")
    loaded = CombForCausalLM.from_pretrained(tmp_path / "mixed")
    assert loaded.backbone.dtype == torch.bfloat16
    assert loaded.encoder.dtype == torch.float32
    assert "in float32" in (tmp_path / "mixed" / "README.md").read_text()


def test_arguments_of_from_pretrained(saved: Path, tmp_path: Path) -> None:
    (saved / "repository").mkdir()
    (saved / "adapter").rename(saved / "repository" / "inner")
    model = CombForCausalLM.from_pretrained(saved / "repository", subfolder="inner")
    assert isinstance(AutoModelForCausalLM.from_pretrained(saved / "repository", subfolder="inner"), CombForCausalLM)
    assert torch.equal(logits(model), logits(CombForCausalLM.from_pretrained(saved / "repository" / "inner")))
    inner = saved / "repository" / "inner"
    assert CombForCausalLM.from_pretrained(inner, config=str(inner)).config.cross_attention_layers == [1, 3]
    _, report = CombForCausalLM.from_pretrained(inner, output_loading_info=True)
    assert not any(report.values())
    with pytest.raises(ValueError, match="not supported for COMB adapters"):
        CombForCausalLM.from_pretrained(inner, "stray")


def test_a_relative_backbone_folder_is_found_from_anywhere(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(saved)
    model = CombForCausalLM.from_backbone("./backbone", num_encoder_layers=1)
    model.save_pretrained("relative")
    monkeypatch.chdir(saved.parent)
    CombForCausalLM.from_pretrained(saved / "relative")


@pytest.mark.parametrize("loader", [CombForCausalLM, AutoModelForCausalLM])
def test_attention_implementation_reaches_everything(saved: Path, loader: Any) -> None:
    model = loader.from_pretrained(saved / "adapter", attn_implementation="eager")
    implementations = {c._attn_implementation for c in (model.config, model.encoder.config, model.backbone.config)}
    assert implementations == {"eager"}


def test_another_backbone_is_refused(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"embedding differs .* this adapter belongs to .*backbone"):
        CombForCausalLM.from_pretrained(saved / "adapter", backbone=tiny("llama", seed=5))
    with pytest.raises(ValueError, match="other names or shapes"):
        CombForCausalLM.from_pretrained(saved / "adapter", backbone=tiny("qwen2"))


def test_a_missing_backbone_says_what_to_do(saved: Path) -> None:
    edit(saved / "adapter" / "config.json", backbone_name_or_path=str(saved / "gone"))
    with pytest.raises(OSError, match=r"gone.* could not be loaded .*backbone=\.\.\."):
        CombForCausalLM.from_pretrained(saved / "adapter")
    edit(saved / "adapter" / "config.json", backbone_name_or_path="")
    with pytest.raises(ValueError, match="doesn't name its backbone"):
        CombForCausalLM.from_pretrained(saved / "adapter")


def test_an_adapter_that_knows_no_exact_prefix_reads_as_it_did(saved: Path) -> None:
    path = saved / "adapter" / "config.json"
    written = json.loads(path.read_text())
    assert (written["format_version"], written.pop("exact_prefix")) == (2, True)
    path.write_text(json.dumps({**written, "format_version": 1}))
    assert CombForCausalLM.from_pretrained(saved / "adapter").config.exact_prefix is False


def test_a_plain_model_is_no_adapter(saved: Path) -> None:
    with pytest.raises(ValueError, match=r"model_type 'llama', not a COMB adapter; .*from_backbone"):
        CombForCausalLM.from_pretrained(saved / "backbone")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder.layers.1.mlp.up_proj.weight": lambda w: w.index_fill(0, torch.tensor([3]), torch.nan)},
         r"encoder\.layers\.1\.mlp\.up_proj\.weight holds NaN"),
        ({"cross_blocks.0.mlp_gate": None}, r"lacks 1 weights, among them \['cross_blocks.0.mlp_gate'\]"),
        ({"cross_blocks.0.mlp_gate": lambda w: w.repeat(2)},
         r"mlp_gate has shape \(2,\), its configuration says \(1,\)"),
    ],
    ids=["NaN", "missing", "misshapen"],
)  # fmt: skip
def test_damaged_weights_are_refused(saved: Path, changes: dict[str, Any], message: str) -> None:
    path = saved / "adapter" / "model.safetensors"
    weights = load_file(path)
    for name, change in changes.items():
        weight = weights.pop(name)
        weights |= {name: change(weight)} if change else {}
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        CombForCausalLM.from_pretrained(saved / "adapter")


def test_no_weights_or_half_of_them(saved: Path) -> None:
    path = saved / "adapter" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"(?i)incomplete|invalid|deserializ"):
        CombForCausalLM.from_pretrained(saved / "adapter")
    path.unlink()
    with pytest.raises(OSError, match="not an adapter checkpoint"):
        CombForCausalLM.from_pretrained(saved / "adapter")


def test_a_name_is_a_folder_or_may_be_on_the_hub(tmp_path: Path) -> None:
    for name in (tmp_path / "nowhere", "out/runs/7", "./here"):
        with pytest.raises(OSError, match=rf"no model '{name}': there is no such folder, and a Hub id is owner/name"):
            resolve_name(name)
    assert resolve_name(tmp_path) == str(tmp_path)
    assert resolve_name("owner/name") == "owner/name"


def test_keys_and_weights_of_a_newer_version_are_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(saved / "adapter" / "config.json", seam_tokens=3, other_new_key="x")
    path = saved / "adapter" / "model.safetensors"
    with caplog.at_level(logging.WARNING, logger="comb"):
        CombForCausalLM.from_pretrained(saved / "adapter")
    for named in ("other_new_key, seam_tokens", "format 2, this is 2"):
        assert named in caplog.text
    save_file({**load_file(path), "encoder.extra": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights that its config\.json doesn't speak of.*encoder\.extra.*upgrade"):
        CombForCausalLM.from_pretrained(saved / "adapter")
    edit(saved / "adapter" / "config.json", format_version=7)
    with pytest.raises(ValueError, match=r"config\.json .*newer comb \(format_version 7, this one reads 2\)"):
        CombForCausalLM.from_pretrained(saved / "adapter")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"cross_encoder_layers": [0]}, "cross_encoder_layers must name one of"),
        ({"cross_encoder_layers": [0, 9]}, "cross_encoder_layers must name one of"),
        ({"cross_attention_layers": [2, 1]}, "must ascend"),
        ({"encoder_config": {"qk_norm": "sometimes"}}, "qk_norm is one of"),
        ({"encoder_config": {"num_attention_heads": 3, "num_key_value_heads": 2}}, "must be a multiple"),
        ({"backbone_config": {"hidden_size": 3}}, "has no model_type"),
    ],
)
def test_configurations_that_make_no_sense(values: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CombConfig(**{"cross_attention_layers": [1, 2], "encoder_config": {"num_hidden_layers": 2}, **values})


def test_forms_that_are_gone_are_refused_by_name(saved: Path) -> None:
    folder = saved / "adapter"
    encoder = json.loads((folder / "config.json").read_text())["encoder_config"]
    # as adapters of the form that is left had them
    edit(folder / "config.json", encoder_config={**encoder, "shared_layers": False, "sink": "token"})
    assert not hasattr(CombForCausalLM.from_pretrained(folder).config.encoder_config, "shared_layers")
    edit(folder / "config.json", encoder_config={**encoder, "shared_layers": True, "primer": [5]})
    with pytest.raises(ValueError, match=r"any more \(primer, shared_layers\): train a front"):
        CombForCausalLM.from_pretrained(folder)
