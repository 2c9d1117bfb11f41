"""The form of a fresh adapter that nobody has said anything about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from comb import CombForCausalLM
from comb.backbones.discovery import UnsupportedBackboneError
from comb.backbones.primer import primer_ids
from tests.helpers.families import tiny
from tests.helpers.tiny_engine import make_backbone, make_tokenizer

QUERY = torch.tensor([[4, 5, 6, 20]])
DOCUMENTS = [(5, 6, 7, 8), (9, 10)]
JOINT = ("llama", "qwen3", "mixtral", "phi3", "gpt_neox", "olmo2", "yarn")
BLOCKS = {
    "gemma3": "some layers are sliding", "qwen3_next": "some layers are linear", "falcon_h1": "some layers are both",
    "deepseek_v3": "latent", "glm4": "turns keys by halves", "dynamic_ntk": "length of the prompt",
    "falcon": "lets it read documents", "bloom": "lets it read documents", "mamba2": "some layers are linear",
}  # fmt: skip


@torch.no_grad()
@pytest.mark.parametrize("family", [*JOINT, *BLOCKS])
def test_any_backbone_gets_the_best_form_that_it_takes(family: str, caplog: pytest.LogCaptureFixture) -> None:
    backbone = tiny(family, std=0.3)
    model = CombForCausalLM.from_backbone(backbone)
    form = model.encoder.config
    assert form.shared_layers
    assert form.joint_attention == (family in JOINT)
    if family in JOINT:
        assert model.config.cross_attention_layers == list(range(model.info.num_layers))
    else:
        assert BLOCKS[family] in caplog.text
        assert (form.key_distance, form.cross_mlp) == (32, False)
        assert model.cross_blocks[0].attention_gate.tanh().item() == pytest.approx(0.95)
    plain = backbone(QUERY).logits
    assert torch.equal(model(QUERY).logits, plain)  # off: the plain model
    heard = (model(QUERY, documents=[DOCUMENTS]).logits - plain).abs().max()
    assert heard > 0.01 * plain.abs().max()  # and documents are heard before any training


def test_a_backbone_with_its_tokenizer_gets_a_primer(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert CombForCausalLM.from_backbone(make_backbone()).encoder.config.primer is None
    assert "without a primer" in caplog.text
    make_backbone().save_pretrained(tmp_path)
    make_tokenizer().save_pretrained(tmp_path)
    primer = CombForCausalLM.from_backbone(tmp_path).encoder.config.primer
    assert primer == primer_ids(True, make_tokenizer())[:256]  # half of the positions
    assert CombForCausalLM.from_backbone(tmp_path, primer=False).encoder.config.primer is None


@pytest.mark.parametrize(
    ("options", "joint", "gate"),
    [
        ({"num_encoder_layers": 2}, False, 0.0),
        ({"shared_layers": True}, False, 0.0),
        ({"shared_layers": False}, False, 0.0),
        ({"shared_layers": True, "joint_attention": True}, True, None),
        ({"joint_attention": False}, False, 0.95),
        ({"gate": 0.5}, False, 0.5),
        ({"cross_attention_layers": [1, 2]}, True, None),
    ],
)
def test_what_is_said_holds(options: dict[str, Any], joint: bool, gate: float | None) -> None:
    model = CombForCausalLM.from_backbone(tiny("llama"), **options)
    assert model.places_documents == joint
    assert model.encoder.config.shared_layers == options.get("shared_layers", "num_encoder_layers" not in options)
    if gate is not None:
        assert model.cross_blocks[0].attention_gate.tanh().item() == pytest.approx(gate)
    if "cross_attention_layers" in options:
        assert model.config.cross_attention_layers == [1, 2]


def test_joint_attention_can_be_asked_for_where_it_is_not_the_default() -> None:
    asked = CombForCausalLM.from_backbone(tiny("mistral"), joint_attention=True)
    assert asked.places_documents
    assert not CombForCausalLM.from_backbone(tiny("mistral")).places_documents
    with pytest.raises(ValueError, match="no gates"):
        CombForCausalLM.from_backbone(tiny("mistral"), joint_attention=True, gate=0.5)


@pytest.mark.parametrize("family", ["falcon", "mamba2"])
def test_joint_attention_that_nobody_would_hear_is_refused(family: str) -> None:
    with pytest.raises(UnsupportedBackboneError, match="lets it read documents: use cross blocks"):
        CombForCausalLM.from_backbone(tiny(family), shared_layers=True, joint_attention=True)


@torch.no_grad()
@pytest.mark.parametrize("family", ["falcon_h1", "mistral"])
def test_behind_a_primer_documents_of_a_batch_are_what_they_are_alone(family: str) -> None:
    model = CombForCausalLM.from_backbone(tiny(family, std=0.3), shared_layers=True, primer=[20, 21, 22])
    together = model.encode(DOCUMENTS)
    for document, picache in zip(DOCUMENTS, together, strict=True):
        [alone] = model.encode([document])
        torch.testing.assert_close(picache.keys, alone.keys, atol=1e-4, rtol=1e-4)
