"""Checkpoints in the layout of the published COMB release."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from comb import CombForCausalLM
from comb.model.conversion import convert_release
from tests.helpers.byte_text import byte_tokenizer

REFERENCE = Path(__file__).parents[2].parent / "shared" / "data" / "reference" / "combllama_tiny"
needs_reference = pytest.mark.skipif(not REFERENCE.exists(), reason="the release's reference checkpoint is not here")


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
    folder: Path, *, tied: bool = False, bias: bool = False, output_bias: bool = False, head_dim: int = 8,
    shards: int = 1,
) -> Path:  # fmt: skip
    """A random checkpoint in the release's layout: 5 backbone layers, cross layers before 1, 3 and 4."""
    torch.manual_seed(0)
    hidden, inner, heads, kv_heads, vocab, cross = 24, 40, 6, 3, 50, [1, 3, 4]
    wide, narrow = heads * head_dim, kv_heads * head_dim
    shapes: dict[str, tuple[int, ...]] = {"language_model.model.embed_tokens.weight": (vocab, hidden)}

    def linear(name: str, out: int, size: int, biased: bool = False) -> None:
        shapes[f"{name}.weight"] = (out, size)
        shapes.update({f"{name}.bias": (out,)} if biased else {})

    def mlp_and_norms(name: str) -> None:
        for part, out, size in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
            linear(f"{name}.mlp.{part}_proj", out, size)
        for norm in ("input", "post_attention"):
            shapes[f"{name}.{norm}_layernorm.weight"] = (hidden,)

    def layer(name: str) -> None:
        for letter, size in (("q", wide), ("k", narrow), ("v", narrow)):
            linear(f"{name}.self_attn.{letter}_proj", size, hidden, bias or output_bias)
        # Llama's attention_bias has one here too, and the release's cross-attention has none at all
        linear(f"{name}.self_attn.o_proj", hidden, wide, output_bias)
        mlp_and_norms(name)

    if not tied:
        linear("language_model.lm_head", vocab, hidden)
    shapes["language_model.model.norm.weight"] = (hidden,)
    for index in range(5):
        layer(f"language_model.model.layers.{index}")
    for index in range(3):
        layer(f"chunk_model.layers.{index}")
        for letter in "kv":
            linear(f"chunk_model.{letter}_proj.{index}", narrow, hidden, bias)
        name = f"language_model.model.cross_layers.{index}"
        linear(f"{name}.cross_attn.q_proj", wide, hidden, bias)
        linear(f"{name}.cross_attn.o_proj", hidden, wide)
        shapes |= {f"{name}.cross_attn.{letter}_norm.weight": (head_dim,) for letter in "qk"}
        mlp_and_norms(name)
    weights = {name: torch.randn(shape) * 0.1 + ("norm" in name) for name, shape in shapes.items()}  # norms around one
    weights["chunk_model.embed_tokens.weight"] = weights["language_model.model.embed_tokens.weight"].clone()
    for index in range(3):
        weights[f"language_model.model.cross_layers.{index}.cross_attn_attn_gate"] = torch.tensor([0.4])
        weights[f"language_model.model.cross_layers.{index}.cross_attn_mlp_gate"] = torch.tensor([-0.3])
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
    byte_tokenizer().save_pretrained(source)
    convert_release(source, tmp_path / "out")
    for folder in (tmp_path / "out", tmp_path / "out" / "backbone"):
        assert {"tokenizer.json", "chat_template.jinja"} <= {path.name for path in folder.iterdir()}
    (tmp_path / "out").rename(tmp_path / "elsewhere")
    CombForCausalLM.from_pretrained(tmp_path / "elsewhere").save_pretrained(tmp_path / "tuned")
    CombForCausalLM.from_pretrained(tmp_path / "tuned")


def test_a_published_backbone_can_be_named(tmp_path: Path) -> None:
    model = convert_release(write_release(tmp_path / "release"), tmp_path / "out", backbone_name="owner/backbone")
    assert model.config.backbone_name_or_path == "owner/backbone"


def test_folders_that_are_no_release_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no config\.json"):
        convert_release(tmp_path, tmp_path / "out")
    source = write_release(tmp_path / "release")
    with pytest.raises(ValueError, match="would be overwritten"):
        convert_release(source, source)


@pytest.mark.parametrize(
    ("config", "text", "message"),
    [
        ({"model_type": "llama"}, {}, "model_type 'llama'"),
        ({"cross_attention_layers": [4, 1, 3]}, {}, "don't ascend"),
        ({}, None, "names its model_type"),
        ({}, {"tie_word_embeddings": False}, "lm_head.weight is missing"),
    ],
)
def test_configurations_that_are_not_the_releases_are_refused(
    tmp_path: Path, config: dict[str, Any], text: dict[str, Any] | None, message: str
) -> None:
    source = write_release(tmp_path / "release", tied=True)
    known = json.loads((source / "config.json").read_text())
    config = {**known, **config, "text_config": {} if text is None else {**known["text_config"], **text}}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        convert_release(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("vision_tower.weight", lambda _: torch.zeros(1), r"vision_tower\.weight"),
        ("chunk_model.k_proj.1.weight", lambda w: w * torch.nan,
         r"encoder\.key_value_heads\.1\.k_proj\.weight holds NaN"),
        ("chunk_model.embed_tokens.weight", lambda w: w + 1, "embedding differs"),
        ("chunk_model.k_proj.2.weight", None, r"missing \['encoder\.key_value_heads\.2\.k_proj\.weight'\]"),
    ],
)  # fmt: skip
def test_weights_that_are_not_the_releases_are_refused(tmp_path: Path, name: str, change: Any, message: str) -> None:
    source = write_release(tmp_path / "release")
    weights = load_file(source / "model.safetensors")
    weight = weights.pop(name, None)
    save_file(weights | ({name: change(weight)} if change else {}), source / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        convert_release(source, tmp_path / "out")


@pytest.mark.parametrize(
    ("file", "values", "words"),
    [
        ("config.json", {"cross_attention_layers": "x"}, "config.json has .* a list of cross_attention_layers"),
        ("config.json", {"cross_attention_layers": None}, "config.json has .* a list of cross_attention_layers"),
        ("config.json", {"text_config": 5}, "config.json has .* a text_config"),
        ("config.json", {"hidden_act": "swosh"}, "'swosh'.* see its config.json"),
        ("config.json", {"num_attention_heads": 0}, "config.json: num_attention_heads is 0"),
        ("config.json", {"rope_theta": "x"}, "'str'.* see its config.json"),
        ("generation_config.json", {"max_new_tokens": "x"}, "generation_config.json: max_new_tokens is 'x'"),
        ("tokenizer_config.json", {"eos_token": 5}, "tokenizer_config.json: eos_token is 5"),
        ("model.safetensors", {"chunk_model.layers.0.mlp.gate_proj.weight": None}, "lacks encoder.layers.0.mlp"),
        ("model.safetensors", {"language_model.model.layers.0.mlp.up_proj.weight": math.nan}, "NaN or infinity"),
    ],
)
def test_what_a_file_says_wrongly(tmp_path: Path, file: str, values: dict[str, Any], words: str) -> None:
    """Named with the file, and nothing is written."""
    path = write_release(tmp_path / "release") / file
    if file == "model.safetensors":
        held = load_file(path)
        for name, value in values.items():
            held[name].fill_(value) if value is not None else held.pop(name)
        save_file(held, path, metadata={"format": "pt"})
    else:
        content = json.loads(path.read_text()) if path.exists() else {}
        nested = {key: value for key, value in values.items() if key in content.get("text_config", {})}
        text = {"text_config": content["text_config"] | nested} if nested else {}
        path.write_text(json.dumps({**content, **({} if nested else values), **text}))
    with pytest.raises(ValueError, match=rf"release.*{words}") as found:
        convert_release(tmp_path / "release", tmp_path / "out")
    assert "\n" not in str(found.value)
    assert not (tmp_path / "out").exists()
