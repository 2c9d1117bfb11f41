"""Checkpoints in the layout of the published COMB release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from comb import CombForCausalLM
from comb.model.conversion import convert_release

REFERENCE = Path(__file__).parents[2].parent / "shared" / "data" / "reference" / "combllama_tiny"
needs_reference = pytest.mark.skipif(
    not REFERENCE.exists(), reason="the reference checkpoint ../shared/data/reference/combllama_tiny is not here"
)


@needs_reference
@torch.no_grad()
def test_agrees_with_the_release(tmp_path: Path) -> None:
    convert_release(REFERENCE, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert isinstance(model, CombForCausalLM)
    expected = load_file(REFERENCE / "reference.safetensors")
    (picache,) = model.encode([expected["chunk_ids"][0]])
    for index, head in enumerate(model.encoder.key_value_heads):
        keys = head.k_norm(expected[f"k.{index}"][0])  # recorded in front of the norm
        torch.testing.assert_close(picache.keys[index], keys, rtol=0, atol=1e-4)
        torch.testing.assert_close(picache.values[index], expected[f"v.{index}"][0], rtol=0, atol=1e-4)
    linked = model(expected["input_ids"], documents=[[picache]]).logits
    torch.testing.assert_close(linked, expected["logits"], rtol=0, atol=1e-4)
    off = model(expected["input_ids"]).logits
    torch.testing.assert_close(off, expected["logits_encoder_off"], rtol=0, atol=1e-4)
    assert (expected["logits"] - expected["logits_encoder_off"]).abs().max() > 1e-2  # the two can be told apart


@needs_reference
def test_the_backbone_is_a_plain_model(tmp_path: Path) -> None:
    convert_release(REFERENCE, tmp_path / "out")
    backbone = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "backbone")
    assert type(backbone).__name__ == "LlamaForCausalLM"
    assert backbone.config.num_hidden_layers == 6  # the release counts its two cross layers too
    expected = load_file(REFERENCE / "reference.safetensors")
    with torch.no_grad():
        logits = backbone(expected["input_ids"]).logits
    torch.testing.assert_close(logits, expected["logits_encoder_off"], rtol=0, atol=1e-4)


# --- checkpoints of other sizes, made here -----------------------------------------------------------------


def write_release(
    folder: Path,
    *,
    tied: bool = False,
    bias: bool = False,
    output_bias: bool = False,
    head_dim: int = 8,
    shards: int = 1,
) -> Path:
    """A random checkpoint in the release's layout: 5 backbone layers, cross layers before 1, 3 and 4."""
    torch.manual_seed(0)
    hidden, inner, heads, kv_heads, vocab, cross = 24, 40, 6, 3, 50, [1, 3, 4]
    sizes = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    weights: dict[str, torch.Tensor] = {}

    def norm(name: str, size: int = hidden) -> None:
        weights[f"{name}.weight"] = 1 + 0.1 * torch.randn(size)

    def linear(name: str, out: int, size: int = hidden) -> None:
        weights[f"{name}.weight"] = torch.randn(out, size) * 0.1

    def layer(name: str) -> None:
        for letter, size in sizes.items():
            linear(f"{name}.self_attn.{letter}_proj", size)
            if bias or output_bias:
                weights[f"{name}.self_attn.{letter}_proj.bias"] = torch.randn(size) * 0.1
        linear(f"{name}.self_attn.o_proj", hidden, heads * head_dim)
        if output_bias:  # Llama's attention_bias has one here too, and the release's cross-attention has none at all
            weights[f"{name}.self_attn.o_proj.bias"] = torch.randn(hidden) * 0.1
        mlp(name)
        norm(f"{name}.input_layernorm")
        norm(f"{name}.post_attention_layernorm")

    def mlp(name: str) -> None:
        linear(f"{name}.mlp.gate_proj", inner)
        linear(f"{name}.mlp.up_proj", inner)
        linear(f"{name}.mlp.down_proj", hidden, inner)

    linear("language_model.model.embed_tokens", vocab)
    weights["chunk_model.embed_tokens.weight"] = weights["language_model.model.embed_tokens.weight"].clone()
    if not tied:
        linear("language_model.lm_head", vocab)
    norm("language_model.model.norm")
    for index in range(5):
        layer(f"language_model.model.layers.{index}")
    for index in range(3):
        layer(f"chunk_model.layers.{index}")
        for letter in "kv":
            linear(f"chunk_model.{letter}_proj.{index}", kv_heads * head_dim)
            if bias:
                weights[f"chunk_model.{letter}_proj.{index}.bias"] = torch.randn(kv_heads * head_dim) * 0.1
        name = f"language_model.model.cross_layers.{index}"
        linear(f"{name}.cross_attn.q_proj", heads * head_dim)
        if bias:
            weights[f"{name}.cross_attn.q_proj.bias"] = torch.randn(heads * head_dim) * 0.1
        linear(f"{name}.cross_attn.o_proj", hidden, heads * head_dim)
        norm(f"{name}.cross_attn.q_norm", head_dim)
        norm(f"{name}.cross_attn.k_norm", head_dim)
        mlp(name)
        norm(f"{name}.input_layernorm")
        norm(f"{name}.post_attention_layernorm")
        weights[f"{name}.cross_attn_attn_gate"] = torch.tensor([0.4])
        weights[f"{name}.cross_attn_mlp_gate"] = torch.tensor([-0.3])
    text: dict[str, Any] = {
        "model_type": "qwen2" if bias else "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": head_dim, "vocab_size": vocab,
        "num_hidden_layers": 5 + len(cross), "max_position_embeddings": 128, "rms_norm_eps": 1e-5,
        "rope_theta": 500.0, "rope_scaling": None, "hidden_act": "silu", "attention_bias": output_bias,
    }  # fmt: skip
    folder.mkdir(parents=True)
    config = {"model_type": "combllama", "cross_attention_layers": cross, "num_hidden_layers": 8, "text_config": text}
    (folder / "config.json").write_text(json.dumps(config))
    names = sorted(weights)
    for shard in range(shards):
        part = {name: weights[name] for name in names[shard::shards]}
        suffix = "" if shards == 1 else f"-{shard + 1:05d}-of-{shards:05d}"
        save_file(part, folder / f"model{suffix}.safetensors")
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


def test_the_result_can_be_moved(tmp_path: Path) -> None:
    convert_release(write_release(tmp_path / "release"), tmp_path / "out")
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    CombForCausalLM.from_pretrained(tmp_path / "elsewhere")


def test_the_result_can_be_saved_elsewhere(tmp_path: Path) -> None:
    convert_release(write_release(tmp_path / "release"), tmp_path / "out")
    CombForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "tuned")
    CombForCausalLM.from_pretrained(tmp_path / "tuned")


def test_tokenizer_files_come_along(tmp_path: Path) -> None:
    source = write_release(tmp_path / "release")
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("x")
    convert_release(source, tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "out" / "backbone"):
        assert (folder / "tokenizer.json").exists()
        assert (folder / "chat_template.jinja").exists()


@pytest.mark.parametrize("kept", ["chunk_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"])
def test_a_shared_table_may_be_saved_under_either_name(tmp_path: Path, kept: str) -> None:
    source = write_release(tmp_path / "release")
    weights = load_file(source / "model.safetensors")
    names = {"chunk_model.embed_tokens.weight", "language_model.model.embed_tokens.weight"} - {kept}
    save_file({n: t for n, t in weights.items() if n not in names}, source / "model.safetensors")
    model = convert_release(source, tmp_path / "out")
    assert torch.equal(model.get_input_embeddings().weight, weights[kept])


def test_a_published_backbone_can_be_named(tmp_path: Path) -> None:
    model = convert_release(write_release(tmp_path / "release"), tmp_path / "out", backbone_name="owner/backbone")
    assert model.config.backbone_name_or_path == "owner/backbone"


def test_what_is_not_the_release_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        convert_release(tmp_path, tmp_path / "out")
    source = write_release(tmp_path / "release")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps({**config, "model_type": "llama"}))
    with pytest.raises(ValueError, match="model_type 'llama'"):
        convert_release(source, tmp_path / "out")
    (source / "config.json").write_text(json.dumps(config))
    weights = load_file(source / "model.safetensors")
    save_file({**weights, "vision_tower.weight": torch.zeros(1)}, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"vision_tower\.weight"):
        convert_release(source, tmp_path / "out")
    with pytest.raises(ValueError, match="would be overwritten"):
        convert_release(source, source)
    for broken, message in [
        ({"cross_attention_layers": [4, 1, 3]}, "don't ascend"),
        ({"text_config": {}}, "names its model_type"),
        ({"text_config": {**config["text_config"], "tie_word_embeddings": False}}, "lm_head.weight is missing"),
    ]:
        (source / "config.json").write_text(json.dumps({**config, **broken}))
        without_head = {name: tensor for name, tensor in weights.items() if "lm_head" not in name}
        save_file(without_head, source / "model.safetensors")
        with pytest.raises(ValueError, match=message):
            convert_release(source, tmp_path / "out")
    (source / "config.json").write_text(json.dumps(config))
    damaged = {**weights, "chunk_model.k_proj.1.weight": weights["chunk_model.k_proj.1.weight"] * float("nan")}
    save_file(damaged, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"encoder\.key_value_heads\.1\.k_proj\.weight holds NaN"):
        convert_release(source, tmp_path / "out")
    own = {**weights, "chunk_model.embed_tokens.weight": weights["chunk_model.embed_tokens.weight"] + 1}
    save_file(own, source / "model.safetensors")
    with pytest.raises(ValueError, match="embedding differs"):
        convert_release(source, tmp_path / "out")
    weights.pop("chunk_model.k_proj.2.weight")
    save_file(weights, source / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing \['encoder\.key_value_heads\.2\.k_proj\.weight'\]"):
        convert_release(source, tmp_path / "out")
