"""Backbones that are quantised as they are loaded: an adapter gets the one that it was trained on."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.quantizers import HfQuantizer, register_quantization_config, register_quantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from comb import CombForCausalLM, PICEngine, methods
from comb.backbones.loading import load_model
from comb.linktokens.modeling import LinkTokensForCausalLM
from tests.helpers.byte_text import byte_llama, byte_tokenizer

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


@pytest.fixture
def plain(tmp_path: Path) -> str:
    byte_llama(hidden_size=64, intermediate_size=64).save_pretrained(tmp_path / "plain")
    byte_tokenizer().save_pretrained(tmp_path / "plain")
    return str(tmp_path / "plain")


def answered(model: Any, **options: Any) -> Any:
    return PICEngine(model, byte_tokenizer(), **options).ask(*ASKED, max_new_tokens=8, min_new_tokens=8).token_ids


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", [{"num_encoder_layers": 1}, None])
def test_an_adapter_is_loaded_onto_what_it_was_trained_on(kind: str, form: Any, plain: str, tmp_path: Path) -> None:
    adapter: Any = LinkTokensForCausalLM if form is None else CombForCausalLM
    given = {"quantization_config": KINDS[kind], "dtype": torch.float32}
    made = adapter.from_backbone(plain, **(form or {"token_ids": [40, 41]}), **given)
    for block in getattr(made, "cross_blocks", ()):
        block.attention_gate.data.fill_(0.7)
    made.save_pretrained(tmp_path / "adapter", tokenizer=byte_tokenizer())
    again = adapter.from_pretrained(tmp_path / "adapter", dtype=torch.float32)
    assert answered(again) == answered(made)
    ours, theirs, whole = (
        each.model.layers[1].mlp.up_proj.weight for each in (again.backbone, made.backbone, load_model(plain))
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
def test_its_documents_are_linked_as_any_models(kind: str, spec: str, plain: str) -> None:
    model = load_model(plain, quantization_config=KINDS[kind], dtype=torch.float32)
    method = methods.create(spec, model)
    assert method.fingerprint != methods.create("naive", load_model(plain)).fingerprint
    if spec == "prefix":
        assert answered(model, method=spec) == answered(model, method="full")


def test_what_vllm_would_read_otherwise_is_not_served(plain: str, tmp_path: Path) -> None:
    from comb_serving.config.serve_options import ServeOptions
    from comb_serving.launch import preflight

    made = CombForCausalLM.from_backbone(plain, num_encoder_layers=1, quantization_config=KINDS["rounded"])
    made.save_pretrained(tmp_path / "adapter", tokenizer=byte_tokenizer())
    made.backbone.save_pretrained(tmp_path / "quantised")
    options = ServeOptions(str(tmp_path / "adapter"))
    with pytest.raises(ValueError, match="quantised as it was loaded, which vLLM doesn't do alike: save the quantised"):
        preflight._check_read_alike(options)
    preflight._check_read_alike(ServeOptions(str(tmp_path / "adapter"), backbone=str(tmp_path / "quantised")))
