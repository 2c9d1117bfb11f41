"""Saving and loading: the adapter alone, its backbone checked, damage named; and the layout of the published one."""

from __future__ import annotations

import json
import logging
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from comb import CombConfig, CombForCausalLM
from comb.backbones import damage
from comb.backbones.loading import resolve_name
from comb.model.conversion import convert_release
from comb.model.weights import check_checkpoint
from tests.helpers.byte_text import byte_tokenizer
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
    weights = load_file(saved / "adapter" / "model.safetensors")
    with caplog.at_level(logging.WARNING, logger="comb"):
        model = CombForCausalLM.from_pretrained(saved / "adapter")
    assert not caplog.records
    assert all(p.requires_grad == (not n.startswith("backbone.")) for n, p in model.named_parameters())
    assert set(weights) == {name for name, p in model.named_parameters() if p.requires_grad}
    config = json.loads((saved / "adapter" / "config.json").read_text())
    assert config["model_type"] == "comb"
    assert config["backbone_config"]["model_type"] == "llama"
    assert "_name_or_path" not in config["backbone_config"]  # where the backbone lay here is nobody else's business
    assert config["backbone_name_or_path"] == "backbone"  # and where it lies is found by whoever made it
    assert config["architectures"] == ["CombForCausalLM"]


@pytest.mark.parametrize("loader", [CombForCausalLM, AutoModelForCausalLM])
def test_round_trip(saved: Path, loader: Any) -> None:
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
    eager = loader.from_pretrained(saved / "adapter", attn_implementation="eager")
    implementations = {c._attn_implementation for c in (eager.config, eager.encoder.config, eager.backbone.config)}
    assert implementations == {"eager"}


def test_the_backbone_is_not_asked_for_its_weights(saved: Path) -> None:
    model = CombForCausalLM.from_pretrained(saved / "adapter")
    # bitsandbytes has a hook there that writes into what a pass in 4 bits computes with
    model.backbone.model.layers[0].register_state_dict_pre_hook(lambda *_: pytest.fail("the frozen weights change"))
    model.save_pretrained(saved / "again")
    CombForCausalLM.from_pretrained(saved / "again", backbone=model.backbone)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_round_trips(family: str, tmp_path: Path) -> None:
    model = open_gates(CombForCausalLM.from_backbone(tiny(family), num_encoder_layers=2))
    model.save_pretrained(tmp_path)
    loaded = CombForCausalLM.from_pretrained(tmp_path, backbone=tiny(family))
    assert torch.equal(logits(loaded), logits(model))


@pytest.mark.parametrize("shards", [("1GB", "20KB"), ("20KB", "1GB"), ("20KB", "40KB")])
def test_nothing_of_the_adapter_before_stays_in_its_folder(saved: Path, shards: tuple[str, str]) -> None:
    model, tokenizer = CombForCausalLM.from_pretrained(saved / "adapter"), byte_tokenizer()
    template, folder = tokenizer.chat_template, saved / "used"
    tokenizer.chat_template = {"default": template, "other": template}
    model.save_pretrained(folder, tokenizer=tokenizer, max_shard_size=shards[0])
    for name in ("merges.txt", "mine.txt"):
        (folder / name).write_text("#version: 0.2\n")
    model.save_pretrained(folder)
    assert {"merges.txt", "tokenizer.json"} <= {path.name for path in folder.iterdir()}  # whoever gave none kept it
    with torch.no_grad():
        model.cross_blocks[0].cross_attn.o_proj.weight.add_(0.5)
    tokenizer.chat_template = None
    for place in (folder, saved / "new"):
        model.save_pretrained(place, tokenizer=tokenizer, max_shard_size=shards[1])
    files = {path.name for path in (saved / "new").rglob("*") if path.is_file()}
    assert {path.name for path in folder.rglob("*") if path.is_file()} == {*files, "mine.txt"}
    assert torch.equal(logits(CombForCausalLM.from_pretrained(folder)), logits(model))
    again = AutoTokenizer.from_pretrained(folder)
    assert again.chat_template is None
    model.save_pretrained(folder, tokenizer=again, max_shard_size=shards[1])  # the folder it is from
    assert AutoTokenizer.from_pretrained(folder).get_vocab() == tokenizer.get_vocab()


def test_shards_of_two_checkpoints_are_refused(saved: Path) -> None:
    model, folder = CombForCausalLM.from_pretrained(saved / "adapter"), saved / "sharded"
    model.save_pretrained(folder, max_shard_size="40KB")
    first, second = sorted(folder.glob("model-*.safetensors"))[:2]
    name, weight = next(iter(load_file(first).items()))
    save_file(load_file(second) | {name: weight + 1}, second, metadata={"format": "pt"})
    with pytest.raises(OSError, match=re.escape(f"has {name} in {second.name} and before")):
        CombForCausalLM.from_pretrained(folder)


def test_a_model_s_folder_is_not_written_over(saved: Path) -> None:
    model = CombForCausalLM.from_pretrained(saved / "adapter")
    before = {path.name: path.read_bytes() for path in (saved / "backbone").iterdir()}
    with pytest.raises(ValueError, match=r"backbone holds a model of another kind \('llama'\).* give another folder"):
        model.save_pretrained(saved / "backbone", tokenizer=byte_tokenizer())
    assert {path.name: path.read_bytes() for path in (saved / "backbone").iterdir()} == before


@pytest.mark.parametrize("other", [".", "../second"])
def test_an_adapter_is_nobody_s_backbone(saved: Path, other: str) -> None:
    shutil.copytree(saved / "adapter", saved / "second")
    edit(saved / "adapter" / "config.json", backbone_name_or_path=f"./{other}")
    message = r"adapter/config.json names \S+ as its backbone, which is an adapter itself: say where .*--backbone"
    with pytest.raises(ValueError, match=message):
        CombForCausalLM.from_pretrained(saved / "adapter")
    CombForCausalLM.from_pretrained(saved / "adapter", backbone=saved / "backbone")


def test_dtype_reaches_backbone_and_adapter(saved: Path) -> None:
    model = CombForCausalLM.from_pretrained(saved / "adapter", dtype=torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    mixed = CombForCausalLM.from_pretrained(saved / "adapter", dtype=torch.bfloat16, adapter_dtype=torch.float32)
    assert {p.dtype for n, p in mixed.named_parameters() if p.requires_grad} == {torch.float32}
    assert mixed.backbone.dtype == torch.bfloat16


def test_a_mixed_precision_adapter_keeps_its_precision(tmp_path: Path) -> None:
    backbone = tiny("llama").bfloat16()
    backbone.save_pretrained(tmp_path / "half")
    options = {"num_encoder_layers": 2, "adapter_dtype": torch.float32}
    CombForCausalLM.from_backbone(str(tmp_path / "half"), **options).save_pretrained(tmp_path / "mixed")
    loaded = CombForCausalLM.from_pretrained(tmp_path / "mixed")
    assert loaded.backbone.dtype == torch.bfloat16
    assert loaded.encoder.dtype == torch.float32
    assert "in float32" in (tmp_path / "mixed" / "README.md").read_text()


def test_arguments_of_from_pretrained(saved: Path) -> None:
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


def test_an_adapter_that_knows_no_exact_prefix_reads_as_it_did(saved: Path) -> None:
    path = saved / "adapter" / "config.json"
    written = json.loads(path.read_text())
    assert (written["format_version"], written.pop("exact_prefix")) == (3, True)
    path.write_text(json.dumps({**written, "format_version": 1}))
    assert CombForCausalLM.from_pretrained(saved / "adapter").config.exact_prefix is False


def test_another_backbone_or_none_is_refused(saved: Path) -> None:
    adapter = saved / "adapter"
    with pytest.raises(ValueError, match=r"embedding differs .* this adapter belongs to .*backbone"):
        CombForCausalLM.from_pretrained(adapter, backbone=tiny("llama", seed=5))
    for backbone, what in (
        (tiny("qwen2"), "other names or shapes"),
        (tiny("llama", vocab_size=130), "embedding table"),
    ):
        with pytest.raises(ValueError, match=what):
            CombForCausalLM.from_pretrained(adapter, backbone=backbone)
    edit(adapter / "config.json", backbone_name_or_path=str(saved / "gone"))
    with pytest.raises(OSError, match=r"gone.* could not be loaded .*backbone=\.\.\."):
        CombForCausalLM.from_pretrained(adapter)
    edit(adapter / "config.json", backbone_name_or_path="")
    with pytest.raises(ValueError, match="doesn't name its backbone"):
        CombForCausalLM.from_pretrained(adapter)
    with pytest.raises(ValueError, match=r"model_type 'llama', not a COMB adapter; .*from_backbone"):
        CombForCausalLM.from_pretrained(saved / "backbone")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("encoder.layers.1.mlp.up_proj.weight", lambda w: w.index_fill(0, torch.tensor([3]), torch.nan), " holds NaN"),
        ("cross_blocks.0.mlp_gate", None, r"lacks 1 weights, among them \['cross_blocks.0.mlp_gate'\]"),
        ("cross_blocks.0.mlp_gate", lambda w: w.repeat(2), r" has shape \(2,\), its configuration says \(1,\)"),
        ("cross_blocks.0.mlp_gate", lambda w: w.to(torch.int64), " is torch.int64: save it in 16 bits or more"),
        ("cross_blocks.0.mlp_gate", lambda w: w.to(torch.complex64), " is torch.complex64: save it"),
        ("cross_blocks.0.mlp_gate", lambda w: w.to(torch.float8_e4m3fn), " is torch.float8_e4m3fn: save it"),
    ],
    ids=["NaN", "missing", "misshapen", "int64", "complex", "8 bits"],
)
def test_damaged_weights_are_refused(saved: Path, name: str, change: Any, message: str) -> None:
    path = saved / "adapter" / "model.safetensors"
    weights = load_file(path)
    weight = weights.pop(name)
    save_file(weights | ({name: change(weight)} if change else {}), path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=re.escape(name) + message if change else message):
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


def test_a_server_sees_other_layers_in_the_backbones_files(saved: Path) -> None:
    check_checkpoint(saved / "adapter")  # vLLM loads them, and knows the embedding alone
    path = saved / "backbone" / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.1.mlp.up_proj.weight"] += 0.01
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"not the layers it was trained on; this adapter belongs to .*backbone"):
        check_checkpoint(saved / "adapter")


def test_a_server_compares_only_what_is_known_to_be_read(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, adapter = saved / "backbone", saved / "adapter"
    others = {name: weight + 1 for name, weight in load_file(folder / "model.safetensors").items()}
    save_file(others, folder / "consolidated.safetensors")  # in the folder, and read by nobody
    check_checkpoint(adapter)
    # PEFT's folder has no config.json; with one, the model that was trained on has weights that this doesn't speak of
    tuned = get_peft_model(AutoModelForCausalLM.from_pretrained(folder), LoraConfig(target_modules=["q_proj"]))
    tuned.save_pretrained(saved / "tuned")
    CombForCausalLM.from_backbone(saved / "tuned", num_encoder_layers=1).save_pretrained(saved / "on_tuned")
    check_checkpoint(saved / "on_tuned")
    for name in ("config.json", "model.safetensors"):
        shutil.copy(folder / name, saved / "tuned")
    check_checkpoint(saved / "on_tuned")
    # another revision than the adapter's is in the Hub's cache
    shutil.copytree(folder, saved / "main")
    save_file(others, saved / "main" / "model.safetensors", metadata={"format": "pt"})
    edit(adapter / "config.json", backbone_name_or_path="someone/model", backbone_revision="v1")
    cached = {None: saved / "main" / "config.json", "v1": folder / "config.json"}
    monkeypatch.setattr(damage, "try_to_load_from_cache", lambda *_, revision=None: str(cached[revision]))
    monkeypatch.setattr("comb.model.weights.check_weights", lambda _: None)
    check_checkpoint(adapter)
    edit(adapter / "config.json", backbone_config=None)
    check_checkpoint(adapter, str(saved / "main"))


def test_keys_and_weights_of_a_newer_version_are_named(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(saved / "adapter" / "config.json", seam_tokens=3, other_new_key="x")
    path = saved / "adapter" / "model.safetensors"
    with caplog.at_level(logging.WARNING, logger="comb"):
        CombForCausalLM.from_pretrained(saved / "adapter")
    for named in ("other_new_key, seam_tokens", "format 3, this is 3"):
        assert named in caplog.text
    save_file({**load_file(path), "encoder.extra": torch.zeros(1)}, path, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"1 weights that its config\.json doesn't speak of.*encoder\.extra.*upgrade"):
        CombForCausalLM.from_pretrained(saved / "adapter")
    edit(saved / "adapter" / "config.json", format_version=7)
    with pytest.raises(ValueError, match=r"config\.json .*newer comb \(format_version 7, this one reads 3\)"):
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


REFERENCE = Path(__file__).parents[2].parent / "shared" / "data" / "reference" / "combllama_tiny"


@pytest.mark.skipif(not REFERENCE.exists(), reason="the release's reference checkpoint is not here")
@torch.no_grad()
def test_agrees_with_the_release(tmp_path: Path) -> None:
    convert_release(REFERENCE, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, CombForCausalLM)
    expected = load_file(REFERENCE / "reference.safetensors")
    (picache,) = model.encode([expected["chunk_ids"][0]])
    linked = model(expected["input_ids"], documents=[[picache]]).logits
    torch.testing.assert_close(linked, expected["logits"], rtol=0, atol=1e-4)
    assert (expected["logits"] - expected["logits_encoder_off"]).abs().max() > 1e-2  # the two can be told apart
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "backbone")
    assert type(backbone).__name__ == "LlamaForCausalLM"
    assert backbone.config.num_hidden_layers == 6  # the release counts its two cross layers too
    plain = backbone(expected["input_ids"]).logits
    torch.testing.assert_close(plain, expected["logits_encoder_off"], rtol=0, atol=1e-4)


# --- checkpoints of other sizes, made here -----------------------------------------------------------------


def write_release(
    folder: Path, *, tied: bool = False, bias: bool = False, output_bias: bool = False, head_dim: int = 8,
    shards: int = 1,
) -> Path:  # fmt: skip
    """A random checkpoint in the release's layout: 5 backbone layers, cross layers before 1, 3 and 4."""
    torch.manual_seed(0)
    hidden, inner, heads, kv_heads, vocab, cross = 24, 40, 6, 3, 50, [1, 3, 4]
    text: dict[str, Any] = {
        "model_type": "qwen2" if bias else "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "num_hidden_layers": 5, "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 500.0, "rope_scaling": None, "hidden_act": "silu", "attention_bias": output_bias,
    }  # fmt: skip
    backbone = AutoModelForCausalLM.from_config(AutoConfig.for_model(**text)).state_dict()
    weights = {
        f"language_model.{name}": tensor for name, tensor in backbone.items() if not tied or "lm_head" not in name
    }
    prefix = "model.layers.0."
    layer = {name.removeprefix(prefix): tensor for name, tensor in backbone.items() if name.startswith(prefix)}
    for index in range(3):
        name = f"language_model.model.cross_layers.{index}"
        weights |= {f"chunk_model.layers.{index}.{part}": tensor for part, tensor in layer.items()}
        weights |= {f"{name}.{part}": tensor for part, tensor in layer.items() if "self_attn" not in part}
        # Llama's attention_bias has more of them than Qwen's, and the release's cross-attention has none of those
        for there, own in ((f"chunk_model.k_proj.{index}", "k_proj"), (f"chunk_model.v_proj.{index}", "v_proj"),
                           (f"{name}.cross_attn.q_proj", "q_proj")):  # fmt: skip
            parts = ("weight", "bias") if bias else ("weight",)
            weights |= {f"{there}.{part}": layer[f"self_attn.{own}.{part}"] for part in parts}
        weights[f"{name}.cross_attn.o_proj.weight"] = layer["self_attn.o_proj.weight"]
        weights |= {f"{name}.cross_attn.{letter}_norm.weight": torch.ones(head_dim) for letter in "qk"}
    weights = {name: torch.randn(tensor.shape) * 0.1 + ("norm" in name) for name, tensor in weights.items()}
    weights["chunk_model.embed_tokens.weight"] = weights["language_model.model.embed_tokens.weight"].clone()
    for index in range(3):
        weights[f"language_model.model.cross_layers.{index}.cross_attn_attn_gate"] = torch.tensor([0.4])
        weights[f"language_model.model.cross_layers.{index}.cross_attn_mlp_gate"] = torch.tensor([-0.3])
    text["num_hidden_layers"] += len(cross)
    folder.mkdir(parents=True)
    config = {"model_type": "combllama", "cross_attention_layers": cross, "num_hidden_layers": 8, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    for shard in range(shards):
        suffix = "" if shards == 1 else f"-{shard + 1:05d}-of-{shards:05d}"
        save_file({name: weights[name] for name in names[shard::shards]}, folder / f"model{suffix}.safetensors")
    return folder


@pytest.mark.parametrize(
    "options",
    [{}, {"tied": True}, {"shards": 3}, {"head_dim": 16}, {"bias": True, "head_dim": 4}, {"output_bias": True}],
    ids=str,
)
@torch.no_grad()
def test_other_sizes(tmp_path: Path, options: dict[str, Any]) -> None:
    source = write_release(tmp_path / "release", **options)
    model = convert_release(source, tmp_path / "out")
    assert model.config.cross_attention_layers == [1, 3, 4]
    assert model.info.num_layers == 5
    assert model.encoder.config.rope_parameters["rope_theta"] == 500.0
    loaded = CombForCausalLM.from_pretrained(tmp_path / "out")
    ids = torch.tensor([[3, 4, 5]])
    linked = loaded(ids, documents=[loaded.encode([[7, 8, 9, 10]])]).logits
    assert torch.equal(linked, model(ids, documents=[model.encode([[7, 8, 9, 10]])]).logits)
    assert (linked - loaded(ids).logits).abs().max() > 1e-3


@pytest.mark.parametrize("kept", ["chunk_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"])
def test_a_shared_table_may_be_saved_under_either_name(tmp_path: Path, kept: str) -> None:
    source = write_release(tmp_path / "release")
    weights = load_file(source / "model.safetensors")
    names = {"chunk_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"} - {kept}
    save_file({n: t for n, t in weights.items() if n not in names}, source / "model.safetensors")
    model = convert_release(source, tmp_path / "out")
    assert torch.equal(model.get_input_embeddings().weight, weights[kept])


def test_the_result_has_tokenizer_files_and_can_be_moved_and_saved_elsewhere(tmp_path: Path) -> None:
    source = write_release(tmp_path / "release")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = {"default": tokenizer.chat_template, "tool_use": tokenizer.chat_template}
    tokenizer.save_pretrained(source)
    named = convert_release(source, tmp_path / "out", backbone_name="owner/backbone")
    assert named.config.backbone_name_or_path == "owner/backbone"
    convert_release(source, tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "out" / "backbone"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template
        modes = {(folder / name).stat().st_mode for name in ("config.json", "model.safetensors")}
        assert len(modes) == 1  # who may read one may read the other
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    CombForCausalLM.from_pretrained(tmp_path / "elsewhere").save_pretrained(tmp_path / "tuned")
    CombForCausalLM.from_pretrained(tmp_path / "tuned")


def test_folders_that_are_no_release_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        convert_release(tmp_path, tmp_path / "out")
    source = write_release(tmp_path / "release")
    with pytest.raises(ValueError, match="release holds a model of another kind"):
        convert_release(source, source)


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("config.json", {"model_type": "llama"}, "model_type 'llama'"),
        ("config.json", {"cross_attention_layers": [4, 1, 3]}, "must ascend"),
        ("config.json", {"cross_attention_layers": None}, "config.json has .* a list of cross_attention_layers"),
        ("config.json", {"text_config": {}}, "names its model_type"),
        ("config.json", {"text_config": 5}, "config.json has .* a text_config"),
        ("config.json", {"text_config": {"tie_word_embeddings": False}}, "lm_head.weight is missing"),
        ("config.json", {"text_config": {"hidden_act": "swosh"}}, "'swosh'.* see its config.json"),
        ("generation_config.json", {"max_new_tokens": "x"}, "TypeError.* see .* generation_config.json"),
        ("vision_tower.weight", lambda _: torch.zeros(1), r"vision_tower\.weight"),
        ("chunk_model.k_proj.1.weight", lambda w: w * torch.nan,
         r"encoder\.key_value_heads\.1\.k_proj\.weight holds NaN"),
        ("chunk_model.embed_tokens.weight", lambda w: w + 1, "embedding differs"),
        ("chunk_model.k_proj.2.weight", None, r"lacks 1 weights, among them \['encoder\.key_value_heads\.2\.k_proj"),
        ("chunk_model.layers.0.mlp.gate_proj.weight", None, "lacks encoder.layers.0.mlp"),
        ("language_model.model.layers.0.mlp.up_proj.weight", lambda w: w * torch.nan, "NaN or infinity"),
    ],
)  # fmt: skip
def test_what_a_file_says_wrongly(tmp_path: Path, file: str, values: Any, words: str) -> None:
    """Named with the file, and nothing is written."""
    source = write_release(tmp_path / "release", tied=file == "config.json")
    if file.endswith(".weight"):
        held = load_file(source / "model.safetensors")
        weight = held.pop(file, None)
        save_file(held | ({file: values(weight)} if values else {}), source / "model.safetensors")
    else:
        content = json.loads((source / file).read_text()) if (source / file).exists() else {}
        for name, value in values.items():
            content[name] = {**content[name], **value} if value and isinstance(value, dict) else value
        (source / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"release.*{words}") as found:
        convert_release(source, tmp_path / "out")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()
