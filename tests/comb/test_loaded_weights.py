"""Checkpoints that lack a part or hold another model are refused by name; others are quantised as they are loaded."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from comb import CombForCausalLM, PICEngine, methods
from comb.backbones.damage import check_files
from comb.backbones.gguf import cache_folder
from comb.backbones.loading import check_weights, load_backbone, load_model, resolve_name
from comb.backbones.whole import check_finite
from comb.linktokens.modeling import LinkTokensForCausalLM
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import FAMILIES, tiny
from tests.helpers.gguf_files import same_weights, write_gguf
from tests.helpers.hybrids import HYBRIDS

UP = "model.layers.1.mlp.up_proj.weight"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A Llama of two layers with its tokenizer."""
    byte_llama().save_pretrained(tmp_path / "model")
    byte_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def change(folder: Path, **weights: torch.Tensor | None) -> None:
    """Replaces weights; None takes one away."""
    held = {**load_file(folder / "model.safetensors"), **weights}
    kept = {name: tensor for name, tensor in held.items() if tensor is not None}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})


def edit(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda f: change(f, **{"lm_head.weight": None}), r"lacks 1 weight \(lm_head\.weight\)"),
        (lambda f: change(f, **{UP: torch.ones(3, 3)}), rf"other shapes .*{UP} \(3, 3\) \(config\.json says \(48"),
        (lambda f: edit(f, num_hidden_layers=3), r"lacks 9 weights \(model\.layers\.2\.[^)]* and 6 more\)"),
        (lambda f: edit(f, num_hidden_layers=1), r"has 9 weights \(model\.layers\.1\..* another model than"),
        (
            lambda f: change(f, **{"model.layers.0.self_attn.q_proj.bias": torch.ones(32)}),
            r"has 1 weight \(model\.layers\.0\.self_attn\.q_proj\.bias\) that LlamaForCausalLM .* doesn't have",
        ),
    ],
    ids=["head", "shape", "fewer layers", "more layers", "bias"],
)  # fmt: skip
def test_a_checkpoint_is_whole_or_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(ValueError, match=message):
        load_backbone(folder)


def test_parts_that_a_text_model_has_no_use_for_are_named_in_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    change(folder, **{"vision_tower.layers.0.weight": torch.ones(2), "model.rotary_emb.inv_freq": torch.ones(2)})
    with caplog.at_level(logging.WARNING, logger="comb"):
        load_backbone(folder)
    assert "1 weight (vision_tower.layers.0.weight) that LlamaForCausalLM doesn't use" in caplog.text


def test_every_family_is_whole(tmp_path: Path) -> None:
    """Tied heads, buffers and renamed weights aren't missing."""
    for family in FAMILIES:
        tiny(family).save_pretrained(tmp_path / family)
        load_backbone(tmp_path / family)


def test_an_expert_that_is_missing_is_named(tmp_path: Path) -> None:
    tiny("mixtral").save_pretrained(tmp_path)
    name = next(name for name in load_file(tmp_path / "model.safetensors") if name.endswith("experts.1.w1.weight"))
    change(tmp_path, **{name: None})
    with pytest.raises(ValueError, match=r"can't be put together .*mlp\.experts\.gate_up_proj .*some are missing"):
        load_backbone(tmp_path)


@pytest.fixture
def model() -> Any:
    return byte_llama(vocab_size=261).bfloat16()


@pytest.mark.parametrize(
    ("keys", "tensors", "message"),
    [
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, {}, r"rope\.scaling\.type = 'yarn'"),
        ({"llama.rope.scaling.type": "none", "llama.attention.sliding_window": 0}, {}, None),
        ({"llama.rope.freq_base": 5e5}, {}, None),
        ({"llama.rope.scaling.attn_factor": 1.2}, {}, r"attn_factor = 1\.2.* compute with 1\.0"),
        ({"llama.attn_logit_softcapping": 50.0}, {}, "llama.attn_logit_softcapping = 50.0, which transformers"),
        ({"llama.attention.sliding_window": 64}, {}, "llama.attention.sliding_window = 64"),
        ({"llama.attention.sliding_window": 4096}, {}, None),  # beyond all positions
        ({"llama.attention.scale": 0.5}, {}, r"attention\.scale = 0\.5.*compute with 0\.35"),
        ({"llama.attention.key_length": 8, "llama.attention.value_length": 8}, {}, None),
        ({"llama.expert_count": 4, "llama.expert_used_count": 2}, {}, "llama.expert_used_count = 2"),
        ({"llama.embedding_scale": 12.0}, {}, r"embedding_scale = 12\.0"),
        ({"llama.something_new": True}, {}, "llama.something_new = True"),
        ({}, {"rope_freqs.weight": [1.0, 2.0, 4.0, 8.0]}, r"1 weights \(rope_freqs\.weight\)"),
        ({}, {"rope_freqs.weight": [1.0, 1.0, 1.0, 1.0]}, None),
        ({"split.count": 3}, {}, r"m\.gguf is one of the 3 files of a model: join them first"),
        ({}, {"blk.0.attn_norm.weight": None}, r"m\.gguf lacks 1 weight"),
        ({}, {"blk.0.attn_q.bias": [1.0] * 32}, r"1 weights \(blk\.0\.attn_q\.bias\)"),
        ({}, {"blk.2.attn_norm.weight": [1.0] * 32}, r"1 weights \(blk\.2\.attn_norm\.weight\)"),
    ],
)
def test_what_a_gguf_file_says_is_computed_or_refused_by_its_key(
    tmp_path: Path, model: Any, keys: dict[str, Any], tensors: dict[str, Any], message: str | None
) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, byte_tokenizer(), keys=keys, tensors=tensors)
    if message is None:
        assert same_weights(model, load_backbone(file))
        return
    with pytest.raises((OSError, ValueError), match=message):
        resolve_name(file)


def test_a_gguf_file_is_converted_whole_for_everybody_or_not_at_all(
    tmp_path: Path, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    file = write_gguf(tmp_path / "m.gguf", model, byte_tokenizer())
    with monkeypatch.context() as patched:
        patched.setattr("transformers.modeling_utils.safe_save_file", full)
        with pytest.raises(OSError, match=r"can't be written to .*No space left .*free some space, or move the cache"):
            resolve_name(file)
    assert list(cache_folder().iterdir()) == []
    (killed := cache_folder() / ".tmp-killed").mkdir()
    os.utime(killed, (0, 0))
    folder = Path(resolve_name(file))
    assert list(cache_folder().iterdir()) == [folder]
    assert {path.stat().st_mode for path in folder.iterdir()} == {(folder / "config.json").stat().st_mode}


@pytest.mark.parametrize("wanted", [True, False])
def test_a_gguf_tokenizer_begins_texts_as_the_file_says(tmp_path: Path, model: Any, wanted: bool) -> None:
    file = write_gguf(tmp_path / "m.gguf", model, byte_tokenizer(), keys={"tokenizer.ggml.add_bos_token": wanted})
    tokenizer = AutoTokenizer.from_pretrained(resolve_name(file))
    assert (tokenizer("a")["input_ids"][0] == tokenizer.bos_token_id) == wanted


@pytest.mark.parametrize(
    ("family", "names"),
    [
        ("llama", ["model.layers.0.self_attn.rotary_emb.inv_freq", "model.layers.1.self_attn.k_scale"]),
        ("gptj", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("gpt2", ["transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"]),
        ("opt", ["model.decoder.version"]),
    ],
)
def test_buffers_that_old_checkpoints_hold_are_no_other_model(tmp_path: Path, family: str, names: list[str]) -> None:
    model = tiny(family)
    model.save_pretrained(tmp_path)
    change(tmp_path, **{name: torch.ones(1) for name in names})
    loaded = load_backbone(tmp_path)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in model.state_dict().items())


def test_files_that_nobody_reads_are_no_damage(folder: Path) -> None:
    (folder / "pytorch_model.bin.index.json").write_text('{"weight_map": {"a": "gone.bin"}}')
    (folder / "pytorch_model.bin").write_text("version https://git-lfs.github.com/spec/v1\n")
    (folder / "model_info.json").write_text("[]")
    (folder / "tokenizer_stats.json").write_text("[]")
    check_files(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"git-lfs pointer|gone\.bin"):
        check_files(folder)


# ---- quantised as they are loaded: an adapter gets the backbone that it was trained on ----

ASKED: Any = ("How deep?", ["The lake is deep.", "It is cold."])


@register_quantization_config("rounded")
class RoundedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """To multiples of a step."""

    def __init__(self, step: float = 0.01, **_: Any) -> None:
        self.quant_method, self.step = "rounded", step


@register_quantizer("rounded")
class Rounding(HfQuantizer):  # type: ignore[misc]
    requires_calibration = False

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        pass

    def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
        for name, weight in model.named_parameters():
            if "_proj" in name:
                weight.data = (weight.data / self.quantization_config.step).round() * self.quantization_config.step

    def is_serializable(self) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return True


KINDS: dict[str, Any] = {"rounded": {"quant_method": "rounded", "step": 0.02}}
if find_spec("bitsandbytes") is not None:  # not among what the tests install
    KINDS["bitsandbytes"] = {"load_in_4bit": True, "bnb_4bit_compute_dtype": "float32"}


def answered(model: Any, **options: Any) -> Any:
    return PICEngine(model, byte_tokenizer(), **options).ask(*ASKED, max_new_tokens=8, min_new_tokens=8).token_ids


def test_the_text_part_of_a_model_that_also_sees_is_compared(tmp_path: Path) -> None:
    from transformers import Qwen3_5Config, Qwen3_5ForConditionalGeneration

    text = {**HYBRIDS["qwen3_5"]().to_dict(), "vocab_size": 259}
    sees = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=text, vision_config={**sees, "out_hidden_size": text["hidden_size"]})
    Qwen3_5ForConditionalGeneration(config).save_pretrained(tmp_path)
    check_weights(tmp_path)
    change(tmp_path, **{UP.replace("model.", "model.language_model."): None})
    with pytest.raises(ValueError, match=r"lacks 1 weight .*layers\.1\.mlp\.up_proj"):
        check_weights(tmp_path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [{"num_encoder_layers": 1}, None])
def test_an_adapter_is_loaded_onto_what_it_was_trained_on(kind: str, form: Any, folder: Path, tmp_path: Path) -> None:
    adapter: Any = LinkTokensForCausalLM if form is None else CombForCausalLM
    given = {"quantization_config": KINDS[kind], "dtype": torch.float32}
    made = adapter.from_backbone(str(folder), **(form or {"token_ids": [40, 41]}), **given)
    for block in getattr(made, "cross_blocks", ()):
        block.attention_gate.data.fill_(0.7)
    made.save_pretrained(tmp_path / "adapter", tokenizer=byte_tokenizer())
    again = adapter.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert answered(again) == answered(made)
    ours, theirs, whole = (
        each.model.layers[1].mlp.up_proj.weight for each in (again.backbone, made.backbone, load_model(str(folder)))
    )
    assert torch.equal(ours, theirs)
    assert not torch.equal(ours, whole)
    # a checkpoint that is quantised itself is taken as it is, and a loaded one, too
    made.backbone.save_pretrained(tmp_path / "quantised")
    for backbone, more in ((str(tmp_path / "quantised"), {"dtype": torch.float32}), (made.backbone, {})):
        same = adapter.from_pretrained(tmp_path / "adapter", backbone=backbone, **more)
        assert answered(same) == answered(made)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("spec", ["legolink:2", "naive", "prefix"])
def test_its_documents_are_linked_as_any_models(kind: str, spec: str, folder: Path) -> None:
    model = load_model(str(folder), quantization_config=KINDS[kind], dtype=torch.float32)
    method = methods.create(spec, model)
    assert method.fingerprint != methods.create("naive", load_model(str(folder))).fingerprint
    if spec == "prefix":
        assert answered(model, method=spec) == answered(model, method="full")


def test_what_a_quantiser_lacks_is_no_damage(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Lacking:
        def convert(self, *_: Any, **__: Any) -> None:
            raise ImportError("Requires mslk >= 1.0.0")

    monkeypatch.setattr(Rounding, "param_needs_quantization", lambda _, __, name, **___: name == UP)
    monkeypatch.setattr(Rounding, "get_quantize_ops", lambda _: Lacking())
    with pytest.raises(ValueError, match=r"model can't be quantised \(Requires mslk >= 1\.0\.0\): mend that"):
        load_model(str(folder), quantization_config=KINDS["rounded"])
    monkeypatch.setattr(Rounding, "get_quantize_ops", HfQuantizer.get_quantize_ops)  # as HQQ's
    with pytest.raises(ValueError, match=r"not available yet .*: upgrade transformers, or choose another quantization"):
        load_model(str(folder), quantization_config=KINDS["rounded"])


class Wrapped(torch.Tensor):
    """A quantised weight as torchao has them: numbers and a scale, for which few operations are written."""

    def __new__(cls, numbers: torch.Tensor, scale: torch.Tensor) -> Wrapped:
        return torch.Tensor._make_wrapper_subclass(cls, numbers.shape, dtype=scale.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, numbers: torch.Tensor, scale: torch.Tensor) -> None:
        self.numbers, self.scale = numbers, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["numbers", "scale"], None

    def __tensor_unflatten__(self, *_: Any) -> Any:
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            return function(args[0], args[1].numbers * args[1].scale, *args[2:], **kwargs or {})
        return super().__torch_function__(function, types, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].numbers, args[0].scale)
        raise NotImplementedError(f"unimplemented {function}")


def test_a_quantiser_s_wrappers_are_looked_into() -> None:
    model = byte_llama()
    for layer in model.model.layers:
        scale = layer.mlp.up_proj.weight.detach().abs().amax(1, keepdim=True) / 127
        numbers = (layer.mlp.up_proj.weight.detach() / scale).round().to(torch.int8)
        layer.mlp.up_proj.weight = torch.nn.Parameter(Wrapped(numbers, scale), requires_grad=False)
    check_finite(model, "here")
    assert answered(CombForCausalLM.from_backbone(model, num_encoder_layers=1))  # without what is in them
    scale[0] = torch.nan
    with pytest.raises(ValueError, match=r"NaN or infinity in 1 weight \(model\.layers\.1\.mlp\.up_proj\.weight\)"):
        check_finite(model, "here")


def test_what_vllm_would_read_otherwise_is_not_served(folder: Path, tmp_path: Path) -> None:
    from comb_serving.config.serve_options import ServeOptions
    from comb_serving.launch import preflight

    made = CombForCausalLM.from_backbone(str(folder), num_encoder_layers=1, quantization_config=KINDS["rounded"])
    made.save_pretrained(tmp_path / "adapter", tokenizer=byte_tokenizer())
    made.backbone.save_pretrained(tmp_path / "quantised")
    options = ServeOptions(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="quantised as it was loaded, which vLLM doesn't do alike: save the quantised"):
        preflight._check_read_alike(options)
    preflight._check_read_alike(ServeOptions(str(tmp_path / "adapter"), backbone=str(tmp_path / "quantised")))
