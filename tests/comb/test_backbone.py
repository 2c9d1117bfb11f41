"""Backbones: what is found on each family, which are refused, and what is said of slow dtypes and kernels."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import transformers as tf
from torch import nn

from comb import methods
from comb.backbones import attention_calls, loading
from comb.backbones.adapter import (
    backbone_fingerprint,
    check_fingerprint,
    fingerprint,
    fingerprint_name,
    fingerprint_with_weights,
)
from comb.backbones.discovery import UnsupportedBackboneError, inspect_backbone
from comb.backbones.tokenizer import front_ids
from comb.model.cross_attention import LayerHooks
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import tiny
from tests.helpers.hybrids import HYBRIDS, tiny_hybrid

LINEAR = ["linear", "linear", "full", "linear"]


@pytest.mark.parametrize(
    ("family", "heads"),
    [("llama", (4, 2, 8)), ("qwen3", (4, 2, 16)), ("gemma2", (4, 2, 16)), ("gpt_neox", (4, 4, 8)), ("phi3", (4, 2, 8))],
)
def test_heads_follow_the_explicit_head_dim(family: str, heads: tuple[int, int, int]) -> None:
    info = inspect_backbone(tiny(family))
    assert (info.num_attention_heads, info.num_key_value_heads, info.head_dim) == heads


@pytest.mark.parametrize(
    ("family", "kinds"),
    {
        "llama": ["full"] * 4, "mistral": ["sliding"] * 4, "gemma3": ["sliding", "full"] * 2,
        "deepseek_v2": ["full"] * 4,
        "qwen3_next": LINEAR, "bamba": LINEAR, "olmo_hybrid": LINEAR, "kimi_linear": LINEAR,
        "nemotron_h": ["linear", "none", "full", "linear"], "zamba2": ["linear", "both"] * 2, "falcon_h1": ["both"] * 3,
        "lfm2": ["linear", "full"] * 2, "jamba": LINEAR,
    }.items(),
)  # fmt: skip
def test_layer_kinds(family: str, kinds: list[str]) -> None:
    model = tiny_hybrid(family) if family in HYBRIDS else tiny(family)
    assert list(inspect_backbone(model).layer_kinds) == kinds


@pytest.mark.parametrize(("family", "scale"), [("granite", 12.0), ("falcon_h1", 5.0), ("llama", 1.0), ("gemma3", 1.0)])
def test_embedding_scale_is_what_the_first_layer_sees(family: str, scale: float) -> None:
    # Gemma 3 scales inside its embedding module, so nothing is left to do behind it
    assert inspect_backbone(tiny(family)).embedding_scale == pytest.approx(scale, rel=1e-3)


def test_latent_attention_gets_heads_no_wider_than_the_latent() -> None:
    info = inspect_backbone(tiny("deepseek_v2"))
    assert info.latent_attention
    assert 2 * info.num_key_value_heads * info.head_dim <= 16 + 8


def test_what_an_encoder_takes_of_positions() -> None:
    gpt2 = inspect_backbone(tiny("gpt2"))
    assert gpt2.embedding_scale == 1.0
    assert any("plain table" in note for note in gpt2.notes)
    theta = tiny("gemma3").config.rope_parameters["full_attention"]["rope_theta"]
    assert inspect_backbone(tiny("gemma3")).rope_parameters["rope_theta"] == theta
    assert inspect_backbone(tiny("gpt_neox")).rope_parameters["partial_rotary_factor"] == 0.25


def test_an_encoder_decoder_is_refused_with_the_reason() -> None:
    t5 = tf.T5ForConditionalGeneration(tf.T5Config(vocab_size=64, d_model=16, num_layers=2, num_heads=2, d_ff=16))
    bert = tf.BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=2, num_attention_heads=2)
    both = tf.EncoderDecoderConfig.from_encoder_decoder_configs(bert, bert)
    for model in (t5, tf.EncoderDecoderModel(both)):
        with pytest.raises(UnsupportedBackboneError, match="not a decoder-only"):
            inspect_backbone(model)


@pytest.mark.parametrize(("kind", "decoder", "why"), [
    ("Bert", False, "isn't causal"), ("Bert", True, ""), ("Electra", False, "isn't causal"),
    ("Roberta", True, "numbers a prompt's positions otherwise"),
])  # fmt: skip
def test_an_encoder_is_refused_and_a_decoder_of_its_kind_taken(kind: str, decoder: bool, why: str) -> None:
    config = getattr(tf, f"{kind}Config")(
        vocab_size=64, hidden_size=16, embedding_size=16, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=32, is_decoder=decoder, initializer_range=0.2,
    )  # fmt: skip
    for dtype in (torch.float32, torch.bfloat16):
        model = tf.AutoModelForCausalLM.from_config(config).to(dtype)
        with pytest.raises(UnsupportedBackboneError, match=why) if why else nullcontext():
            inspect_backbone(model)


def test_a_model_without_a_stack_of_layers_is_refused_with_the_lists_it_has() -> None:
    model = tiny("llama")
    model.config.num_hidden_layers = 7
    with pytest.raises(UnsupportedBackboneError, match=r"no list of 7 decoder layers; lists found: model.layers \(4\)"):
        inspect_backbone(model)


def test_a_hidden_state_of_another_shape_is_refused() -> None:
    model = tiny("llama")
    embed = model.model.embed_tokens.forward
    model.model.embed_tokens.forward = lambda ids: embed(ids)[None].expand(2, -1, -1, -1)  # several parallel streams
    with pytest.raises(UnsupportedBackboneError, match=r"hidden state of shape \(2, 2, 3, 32\)"):
        inspect_backbone(model)


def test_hooks_are_counted_and_leave_no_trace() -> None:
    layers = nn.ModuleList(nn.Identity() for _ in range(3))
    hooks = LayerHooks(layers, {1: lambda hidden: hidden + 1})
    x = torch.zeros(1, 2, 4)
    with hooks.attached():
        with hooks.attached():
            assert torch.equal(layers[1](x), x + 1)
            assert len(layers[1]._forward_pre_hooks) == 1
        assert torch.equal(layers[1](x), x + 1)
    assert torch.equal(layers[1](x), x)
    assert not any(layer._forward_pre_hooks for layer in layers)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fingerprint_matches_across_dtypes(dtype: torch.dtype) -> None:
    model = tiny("llama").to(dtype)
    check_fingerprint(model, fingerprint(tiny("llama")), "llama")  # as earlier adapters have it
    expected = fingerprint_with_weights(tiny("llama"))
    check_fingerprint(model, expected, "llama")
    assert fingerprint_name(expected) == fingerprint_name(fingerprint(tiny("llama")))
    same = backbone_fingerprint(model) == backbone_fingerprint(tiny("llama"))
    assert same == (dtype == torch.float32)  # what a cache is kept under
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight += 0.01  # a fine-tune that leaves the embedding
    with pytest.raises(ValueError, match="not the layers it was trained on; this adapter belongs to llama"):
        check_fingerprint(model, expected, "llama")
    model.is_quantized = True  # whose values are others
    check_fingerprint(model, expected, "llama")


def test_a_front_s_file_may_begin_as_windows_editors_begin_one(tmp_path: Path) -> None:
    (tmp_path / "front.txt").write_text("Salt.", encoding="utf-8-sig")
    assert front_ids(str(tmp_path / "front.txt"), byte_tokenizer()) == byte_tokenizer()("Salt.")["input_ids"]


# ---- what is said of a CPU's dtypes, and of cuDNN, by times that a stand-in for the GPU says ----


@pytest.mark.parametrize(
    ("model", "multiplied", "said"),
    [
        (nn.Linear(10, 10).to(torch.bfloat16), False, [
            "this CPU multiplies bfloat16 several times slower than float32: load the model with dtype=float32 "
            "(--dtype float32; model.dtype=float32 when training)"
        ]),
        (nn.Linear(10, 10), False, []),  # float32
        (nn.Linear(10, 10).to(torch.bfloat16), True, []),  # a CPU that has it
        (nn.Linear(9, 9).to(torch.bfloat16), False, []),  # 90 parameters: done before it is noticed
        (nn.Linear(10, 10, device="meta", dtype=torch.bfloat16), False, []),
        (nn.ReLU(), False, []),
    ],
)  # fmt: skip
def test_a_dtype_that_is_slow_here_is_told_once_with_what_to_do(
    model: nn.Module,
    multiplied: bool,
    said: list[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(loading, "NOTICED", 100)
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: multiplied)
    monkeypatch.setattr(loading, "_warned", set())
    with caplog.at_level(logging.WARNING, loading.__name__):
        for _ in range(2):
            loading.warn_if_slow(model)
    assert caplog.messages == said


@pytest.mark.parametrize(
    ("device", "before", "with_it", "without", "behind"),
    [
        ("cuda:0", True, 0.03, 0.0002, False),
        ("cuda:0", True, 0.0004, 0.0002, True),  # not slow
        ("cuda:0", True, 0.03, 0.03, True),  # something else is
        ("cuda:0", False, 0.03, 0.0, False),
        ("cpu", True, 0.03, 0.0, True),
    ],
)
def test_cudnn_goes_where_it_plans_for_each_length_and_that_is_said(
    device: str, before: bool, with_it: float, without: float, behind: bool,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    monkeypatch.setattr(attention_calls, "_chosen", set())
    monkeypatch.setattr(
        attention_calls, "seconds_of_lengths", lambda device: (with_it if enabled() else without, 0.0001)
    )
    own = enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(before)
        attention_calls.choose_attention(torch.device(device))
        assert enabled() == behind
        gone = before and not behind
        assert ("takes 30 ms for each new number of keys here, without it 0.2 ms" in caplog.text) == gone
        torch.backends.cuda.enable_cudnn_sdp(True)  # a user's own choice holds
        attention_calls.choose_attention(torch.device(device))
        assert enabled()
    finally:
        torch.backends.cuda.enable_cudnn_sdp(own)


def test_methods_choose_before_they_compute(monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[torch.device] = []
    monkeypatch.setattr("comb.methods.base.choose_attention", chosen.append)
    methods.create("full", byte_llama())
    assert chosen == [torch.device("cpu")]
