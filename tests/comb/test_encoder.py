"""The encoder: batches of different lengths, packing, rotary set-ups, and starting from the backbone."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AttentionInterface, LlamaConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from comb import CombEncoderConfig, CombForCausalLM
from comb.backbones.discovery import inspect_backbone
from comb.model.attention import Lengths, attend
from comb.model.config import spread_cross_layers, spread_encoder_layers
from comb.model.cross_attention import LinkedDocuments
from comb.model.encoder import EncoderLayer, Rotary, equal_parts
from comb.model.initialization import copy_parts, encoder_config_for, read_layer
from tests.helpers.families import FAMILIES, open_gates, tiny

LENGTHS = (3, 17, 1, 8, 17, 30)


def segments() -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 100, (length,), generator=generator).tolist() for length in LENGTHS]


FRONT = [40, 41, 42, 43, 44]


@pytest.mark.parametrize("front", ["none", FRONT], ids=["alone", "behind a front"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_batch_equals_each_alone(
    causal: bool, implementation: str, front: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = CombForCausalLM.from_backbone(tiny("qwen3"), num_encoder_layers=3, encoder_causal=causal, front=front)
    model.config._attn_implementation = implementation
    for picache, segment in zip(model.encode(segments()), segments(), strict=True):
        (alone,) = model.encode([segment])
        torch.testing.assert_close(picache.keys, alone.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(picache.values, alone.values, rtol=1e-4, atol=1e-5)
    if not causal:  # the control: without a mask the padded rows differ
        (alone,) = model.encode(segments()[:1])
        monkeypatch.setattr(Lengths, "mask", lambda *_: None)
        assert (model.encode(segments())[0].keys - alone.keys).abs().max() > 1e-3


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_behind_a_front_a_segment_is_what_it_is_behind_its_text_and_has_its_first_token(implementation: str) -> None:
    def fresh(**options: Any) -> CombForCausalLM:
        torch.manual_seed(0)
        model = CombForCausalLM.from_backbone(
            tiny("qwen3").double(), num_encoder_layers=3, encoder_causal=True, **options
        )
        model.config._attn_implementation = implementation
        return model

    model, without = fresh(front=FRONT), fresh()
    for picache, segment in zip(model.encode(segments()), segments(), strict=True):
        (text,) = without.encode([FRONT + segment])
        expected = [torch.cat((whole[:, :1], whole[:, len(FRONT) :]), dim=1) for whole in (text.keys, text.values)]
        torch.testing.assert_close([picache.keys, picache.values], expected, rtol=1e-4, atol=1e-5)
        assert picache.num_tokens == len(segment) + 1
    assert model.max_document_tokens == without.max_document_tokens - len(FRONT)
    assert model.fingerprint != without.fingerprint
    (before,) = model.encode([[5, 6]])  # both are learned
    for learned in (model.encoder.front, model.encoder.sink):
        learned.data.add_(0.1)
        (after,) = model.encode([[5, 6]])
        assert after.fingerprint != before.fingerprint
        assert (after.keys - before.keys).abs().max() > 1e-4
        before = after


def test_a_front_is_saved_and_needs_a_tokenizer_for_text(tmp_path: Any) -> None:
    made = CombForCausalLM.from_backbone("nano", num_encoder_layers=2, front="prose")
    assert made.config.encoder_config.front_tokens == made.encoder.front.shape[3] > 50
    made.save_pretrained(tmp_path)
    loaded = CombForCausalLM.from_pretrained(tmp_path)
    assert loaded.fingerprint == made.fingerprint
    assert torch.equal(loaded.encoder.sink, made.encoder.sink)
    with pytest.raises(ValueError, match="no tokenizer beside its weights"):
        CombForCausalLM.from_backbone(tiny("llama"), front="prose")
    with pytest.raises(ValueError, match="no text to compile documents behind"):
        CombForCausalLM.from_backbone("nano", front=str(tmp_path / "missing.txt"))
    with pytest.raises(ValueError, match="token ids below 128, got 128"):
        CombForCausalLM.from_backbone(tiny("llama"), front=[5, 128])


def test_equal_segments_are_encoded_once_and_many_in_batches(
    model: CombForCausalLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches: list[list[int]] = []
    honest = model.encoder.forward
    monkeypatch.setattr(model.encoder, "forward", lambda e: batches.append(list(map(len, e))) or honest(e))
    monkeypatch.setattr("comb.model.modeling.ENCODE_BATCH_TOKENS", 40)
    assert [picache.num_tokens for picache in model.encode(segments())] == list(LENGTHS)
    assert all(len(batch) * max(batch) <= 40 for batch in batches)
    batches.clear()
    first, second, third = model.encode([[5, 6], [7, 8, 9], [5, 6]])
    assert [len(batch) for batch in batches] == [2]
    assert torch.equal(first.keys, third.keys)
    assert first.keys.data_ptr() != third.keys.data_ptr()
    assert second.num_tokens == 3


def test_passes_that_ranks_agree_on_change_nothing(model: CombForCausalLM) -> None:
    """ZeRO-3 gathers weights at every call of a module: each rank must call as often, whatever its documents."""
    asked: list[tuple[int, int]] = []
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.encoder.register_forward_hook(count)
    expected = model._encode(list(map(tuple, segments())))
    assert calls == 1
    model.agree_on_passes = lambda wanted, possible: asked.append((wanted, possible)) or 3  # type: ignore[func-returns-value]
    with torch.enable_grad():
        found = model._encode(list(map(tuple, segments())))
    assert (asked, calls) == ([(1, len(LENGTHS))], 4)
    for left, right in zip(found, expected, strict=True):
        torch.testing.assert_close(left, right)


@pytest.mark.parametrize("parts", [1, 2, 5, 7])
def test_parts_are_as_many_as_asked_and_none_empty(parts: int) -> None:
    segments = [(1,) * length for length in (1, 1, 2, 3, 30, 31, 32)]
    found = equal_parts(segments, parts)
    assert len(found) == parts
    assert all(found)
    assert [segment for part in found for segment in part] == segments


# --- the flash-attention path, with a plain implementation of the same interface ---------------------------


def varlen_attention(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: Any = None,
    *, scaling: float, is_causal: bool, cu_seq_lens_q: torch.Tensor, cu_seq_lens_k: torch.Tensor,
    max_length_q: int, max_length_k: int, **kwargs: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """What flash-attention's variable-length function computes, row by row."""
    assert attention_mask is None
    assert query.shape[0] == key.shape[0] == 1
    pieces = []
    for row in range(len(cu_seq_lens_q) - 1):
        q = query[:, :, cu_seq_lens_q[row] : cu_seq_lens_q[row + 1]]
        k, v = (t[:, :, cu_seq_lens_k[row] : cu_seq_lens_k[row + 1]] for t in (key, value))
        assert q.shape[2] <= max_length_q
        assert k.shape[2] <= max_length_k
        # flash-attention's causal mask ends at the last query's last key
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2])
        pieces.append(nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=seen if is_causal else None, scale=scaling, enable_gqa=True))  # fmt: skip
    return torch.cat(pieces, dim=2).transpose(1, 2), None


@pytest.mark.parametrize("front", ["none", FRONT], ids=["alone", "behind a front"])
@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_packed_rows_give_the_same_as_padded_rows(causal: bool, front: Any, query: torch.Tensor) -> None:
    AttentionInterface.register("flash_plain_test", varlen_attention)

    def run(implementation: str) -> tuple[list[Any], torch.Tensor, torch.Tensor]:
        torch.manual_seed(1)
        backbone = tiny("llama")
        shape = {"num_encoder_layers": 2, "encoder_causal": causal, "front": front}
        model = open_gates(CombForCausalLM.from_backbone(backbone, **shape))
        model.double()  # in float32 flash attention would get 16 bits
        model.config._attn_implementation = implementation
        backbone.config._attn_implementation = "sdpa"
        pics = model.encode(segments())
        documents = [[pics[0], pics[1], pics[4]], []]
        beams = {"num_beams": 2, "max_new_tokens": 3, "do_sample": False}
        return pics, model(query, documents=documents).logits, model.generate(query, documents=documents, **beams)

    packed, padded = run("flash_plain_test"), run("sdpa")
    for left, right in zip(packed[0], padded[0], strict=True):
        torch.testing.assert_close(left.keys, right.keys, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(packed[1], padded[1], rtol=1e-4, atol=1e-5)
    assert torch.equal(packed[2], padded[2])


# --- rotary ------------------------------------------------------------------------------------------------

ATTENTION: dict[str, Any] = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 16}


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 1000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
         "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64},
    ],
    ids=lambda rope: rope["rope_type"],
)  # fmt: skip
def test_rotary_equals_the_backbones(rope: dict[str, Any]) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, max_position_embeddings=256, rope_parameters=rope)
    ours = CombEncoderConfig(**ATTENTION, max_position_embeddings=256, rope_parameters=config.rope_parameters)
    positions = torch.arange(40)[None]
    expected = LlamaRotaryEmbedding(config)(torch.zeros(1), positions)
    for left, right in zip(Rotary(ours)(positions), expected, strict=True):
        torch.testing.assert_close(left, right)


def test_length_dependent_rotary_is_fixed() -> None:
    """Dynamic NTK rescales with the longest row of a batch: a document would depend on its neighbours."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
    rotary = Rotary(CombEncoderConfig(**ATTENTION, max_position_embeddings=32, rope_parameters=rope))
    short = rotary(torch.arange(8)[None])[0]
    torch.testing.assert_close(rotary(torch.arange(100)[None])[0][:, :8], short, rtol=0, atol=0)


# --- starting from the backbone ----------------------------------------------------------------------------


# what a Llama-style layer has no counterpart for: LayerNorm and plain MLPs, experts, latent or gated attention
PARTLY = {"gpt_neox": 7, "mixtral": 6, "qwen3_moe": 8, "deepseek_v2": 2, "qwen3_next": 7, "gpt2": 0, "lfm2": 6}


def _layer_in_and_out(family: str) -> tuple[Any, nn.Module, torch.Tensor, torch.Tensor]:
    model = tiny(family)
    with torch.no_grad():
        for parameter in model.parameters():  # norms of one hide whether "1 + w" was understood
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.2)
    info = inspect_backbone(model)
    index = max(i for i, kind in enumerate(info.layer_kinds) if kind in ("full", "sliding", "both"))
    layer = model.get_submodule(info.layers_path)[index]
    seen: dict[str, torch.Tensor] = {}

    def record(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        seen.update(x=args[0], y=output[0] if isinstance(output, tuple) else output)

    with torch.no_grad(), layer.register_forward_hook(record, with_kwargs=True):
        model(torch.randint(3, 100, (2, 7)))
    return model, layer, seen["x"], seen["y"]


@pytest.mark.parametrize("family", sorted(FAMILIES.keys() - {"falcon_h1"}))  # which has multipliers inside the layer
def test_a_copied_layer_computes_what_the_backbones_layer_computes(family: str) -> None:
    """Or is given what has a counterpart."""
    model, layer, x, y = _layer_in_and_out(family)
    info = inspect_backbone(model)
    shape: dict[str, Any] = {"num_layers": 2, "causal": True, "max_document_tokens": None}
    config = encoder_config_for(model, info, **shape, initialization="backbone")
    config._attn_implementation = "sdpa"
    ours, theirs = EncoderLayer(config), read_layer(layer, info)
    copied = copy_parts(ours, theirs)
    if family in PARTLY:
        assert len(copied) == PARTLY[family]
        return
    assert sorted(copied) == sorted(name for name, _ in ours.named_parameters())
    if family in ("llama", "phi3", "qwen3"):  # Granite's are scaled
        storages = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        read = {tensor.untyped_storage().data_ptr() for tensor in theirs.weights.values() if tensor.ndim == 2}
        assert read <= storages  # no copies
    with torch.no_grad():
        result = ours(x, Rotary(config)(torch.arange(7)[None]))
    torch.testing.assert_close(result, y, rtol=1e-4, atol=1e-5)
    assert (y - x).abs().max() > 1e-3  # control: the layer does something


def test_cross_blocks_start_from_the_layer_they_precede() -> None:
    backbone = tiny("llama")
    model = CombForCausalLM.from_backbone(backbone, num_encoder_layers=2, cross_attention_layers=[1, 3])
    for block, head, index in zip(model.cross_blocks, model.encoder.key_value_heads, (1, 3), strict=True):
        layer = backbone.model.layers[index]
        assert torch.equal(block.cross_attn.q_proj.weight, layer.self_attn.q_proj.weight)
        assert torch.equal(block.mlp.down_proj.weight, layer.mlp.down_proj.weight)
        assert torch.equal(head.v_proj.weight, layer.self_attn.v_proj.weight)
        assert block.attention_gate.item() == block.mlp_gate.item() == 0.0
    backbone = tiny("bamba")  # linear layers borrow attention from the nearest full one
    model = CombForCausalLM.from_backbone(backbone, num_encoder_layers=2, cross_attention_layers=[2])
    attention = backbone.model.layers[1].self_attn
    assert torch.equal(model.cross_blocks[0].cross_attn.q_proj.weight, attention.q_proj.weight)
    assert torch.equal(model.encoder.key_value_heads[0].k_proj.weight, attention.k_proj.weight)


def test_where_layers_go() -> None:
    assert spread_cross_layers(32, 8) == [4, 7, 11, 14, 18, 21, 25, 28]
    assert spread_cross_layers(6, 2) == [2, 4]
    assert spread_cross_layers(3, 3) == [0, 1, 2]
    assert spread_encoder_layers(8, 8) == list(range(8))
    assert spread_encoder_layers(4, 2) == [1, 3]
    assert spread_encoder_layers(2, 4) == [0, 0, 1, 1]
    with pytest.raises(ValueError, match="can't place 5 cross blocks before 4"):
        spread_cross_layers(4, 5)


@pytest.mark.parametrize("name", ["flash_attention_2", "kernels-community/flash-attn3"])
def test_flash_attention_of_any_name_gets_16_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels take nothing else, also those from the Hub."""
    seen = []

    def flash(module: Any, query: Tensor, key: Tensor, value: Tensor, mask: None, **_: Any) -> tuple[Tensor, None]:
        seen.append({query.dtype, key.dtype, value.dtype})
        return query.transpose(1, 2), None

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._global_mapping, name, flash)
    given = torch.randn(1, 2, 3, 8)
    module = SimpleNamespace(scaling=1.0)
    assert attend(module, given, given, given, name).dtype == torch.float32
    attend(module, *[given.half()] * 3, name)
    assert seen == [{torch.bfloat16}, {torch.float16}]


EPS = 1e-6
TOKENS = torch.tensor([5, 17, 3, 44, 29, 8, 61])


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight


def rotate(x: Tensor, theta: float) -> Tensor:
    """[T, d]: pairs (i, i + d/2) turned by position * theta^(-2i/d)."""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x)).outer(theta ** (-torch.arange(half).double() / half))
    turned = torch.complex(*x.split(half, dim=-1)) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat([turned.real, turned.imag], dim=-1)


def softmax_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """[Q, d], [T, d], [T, d] -> [Q, d]; every query sees every key."""
    return (query @ key.T / math.sqrt(query.shape[-1])).softmax(-1) @ value


def gated_mlp(x: Tensor, w: dict[str, Tensor], name: str) -> Tensor:
    gate, up, down = (w[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
    return (nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T


def encode(w: dict[str, Tensor], config: Any, layers: int, hidden: Tensor) -> list[Tensor]:
    """Eq. 1-4: every encoder layer's output, [T, D] each. Bidirectional: no mask."""
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    theta = config.rope_parameters["rope_theta"]
    outputs = []
    for index in range(layers):
        at = f"encoder.layers.{index}"
        x = rms_norm(hidden, w[f"{at}.input_layernorm.weight"])
        query, key, value = ((x @ w[f"{at}.self_attn.{part}_proj.weight"].T).split(size, -1) for part in "qkv")
        mixed = [
            softmax_attention(rotate(q, theta), rotate(key[head // groups], theta), value[head // groups])
            for head, q in enumerate(query)
        ]
        hidden = hidden + torch.cat(mixed, -1) @ w[f"{at}.self_attn.o_proj.weight"].T
        x = rms_norm(hidden, w[f"{at}.post_attention_layernorm.weight"])
        hidden = hidden + gated_mlp(x, w, f"{at}.mlp")
        outputs.append(hidden)
    return outputs


def cross_block(
    w: dict[str, Tensor], config: Any, at: int, source: Tensor, hidden: Tensor, gate: Callable[[Tensor], Tensor]
) -> Tensor:
    """Eq. 5-8: keys and values of one cross block from the encoder's output `source` [T, D], and the gated block."""
    size, groups = config.head_dim, config.num_attention_heads // config.num_key_value_heads
    head, block = f"encoder.key_value_heads.{at}", f"cross_blocks.{at}"
    norm = w.get(f"{head}.norm.weight")
    source = source if norm is None else rms_norm(source, norm)
    key = [rms_norm(k, w[f"{head}.k_norm.weight"]) for k in (source @ w[f"{head}.k_proj.weight"].T).split(size, -1)]
    value = (source @ w[f"{head}.v_proj.weight"].T).split(size, -1)
    x = rms_norm(hidden, w[f"{block}.input_layernorm.weight"])
    query = [
        rms_norm(q, w[f"{block}.cross_attn.q_norm.weight"])
        for q in (x @ w[f"{block}.cross_attn.q_proj.weight"].T).split(size, -1)
    ]
    mixed = [softmax_attention(q, key[number // groups], value[number // groups]) for number, q in enumerate(query)]
    attended = torch.cat(mixed, -1) @ w[f"{block}.cross_attn.o_proj.weight"].T
    hidden = hidden + gate(w[f"{block}.attention_gate"]) * attended
    x = rms_norm(hidden, w[f"{block}.post_attention_layernorm.weight"])
    return hidden + gate(w[f"{block}.mlp_gate"]) * gated_mlp(x, w, f"{block}.mlp")


@pytest.fixture
def comb_model() -> CombForCausalLM:
    """Two encoder layers, two cross blocks; every trained parameter random, gates far from where tanh(g) is g."""
    torch.manual_seed(4)
    model = CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if not name.startswith("backbone."):
                parameter.normal_(0, 0.3)
            if name.endswith("gate"):
                parameter.fill_(1.1)
            elif "norm" in name and not name.startswith("backbone."):
                parameter.add_(1.0)
    return model


@torch.no_grad()
@pytest.mark.parametrize("mutant", [False, True], ids=["tanh", "control without tanh"])
def test_encoder_and_cross_blocks_are_the_papers(comb_model: CombForCausalLM, mutant: bool) -> None:
    gate = (lambda g: g) if mutant else torch.tanh
    model, config = comb_model, comb_model.encoder.config
    assert abs(config.rms_norm_eps - EPS) < 1e-12
    weights = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    [picache] = model.encode([TOKENS.tolist()])
    embedded = model.backbone.get_input_embeddings()(TOKENS) * model.config.embedding_scale
    outputs = encode(weights, config, 2, embedded)
    hidden = torch.randn(1, 3, config.hidden_size, generator=torch.Generator().manual_seed(1)).double()
    linked = LinkedDocuments([[(picache.keys, picache.values)]], None)
    for index, block in enumerate(model.cross_blocks):
        ours = block(hidden, linked)[0]
        theirs = cross_block(weights, config, index, outputs[model.encoder.sources[index]], hidden[0], gate)
        distance = float((ours - theirs).abs().max())
        # norms and angles are float32 in the modules
        assert distance > 0.1 if mutant else distance < 1e-5
