"""Joint attention: the decoder's own layers read documents, one softmax over both as in a prompt."""

from __future__ import annotations

import copy
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from comb import PICEngine
from comb.mac import mac
from comb.model.modeling import CombForCausalLM
from tests.helpers.families import tiny
from tests.helpers.tiny_engine import make_backbone, make_tokenizer

FAMILIES = ("llama", "qwen3", "mixtral", "phi3")
DOCUMENTS = [(5, 6, 7, 8, 9), (10, 11), (3, 4, 12)]
QUERY = torch.tensor([[4, 5, 6, 20, 21]])


def joint(backbone: Any, layers: list[int] | None = None, **options: Any) -> CombForCausalLM:
    if not isinstance(backbone, (str, Path)):
        layers = list(range(backbone.config.num_hidden_layers)) if layers is None else layers
    options = {"shared_layers": True, "joint_attention": True, "key_distance": 1} | options
    return CombForCausalLM.from_backbone(backbone, cross_attention_layers=layers, **options)


def prompt(document: tuple[int, ...], attention: str) -> dict[str, torch.Tensor]:
    """The document in front of the query, whose first token doesn't see it."""
    ids = torch.cat((torch.tensor([document]), QUERY), 1)
    seen = torch.ones(1, 1, ids.shape[1], ids.shape[1], dtype=torch.bool).tril()
    seen[..., len(document), : len(document)] = False
    if attention == "eager":
        return {"input_ids": ids, "attention_mask": torch.zeros(seen.shape).masked_fill(~seen, -1e30)}
    return {"input_ids": ids, "attention_mask": seen}


@torch.no_grad()
@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_one_document_read_by_all_layers_is_the_prompt_itself(family: str, attention: str) -> None:
    """Nothing is trained yet: keys and values are the backbone's own, and so are their distances to the query."""
    backbone = tiny(family, attn_implementation=attention)
    model = joint(backbone)
    document = DOCUMENTS[0]
    wanted = backbone(**prompt(document, attention)).logits[:, len(document) :]
    found = model(QUERY, documents=[[document]]).logits
    torch.testing.assert_close(found, wanted, atol=2e-5, rtol=1e-4)
    assert (found - backbone(QUERY).logits).abs().max() > 1e-3  # control: without the document it says something else
    fewer = joint(backbone, [1])(QUERY, documents=[[document]]).logits
    assert (fewer - wanted).abs().max() > 1e-4  # and where one layer reads


@torch.no_grad()
def test_generation_goes_on_from_its_cache() -> None:
    backbone = tiny("llama")
    model = joint(backbone)
    document = DOCUMENTS[0]
    options = {"max_new_tokens": 8, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    plain = torch.cat(backbone.generate(QUERY, **options).logits)
    output = model.generate(QUERY, documents=[[document]], **options)
    found = torch.cat(output.logits)
    again = model(output.sequences[:, :-1], documents=[[document]]).logits[0, QUERY.shape[1] - 1 :]
    torch.testing.assert_close(found, again, atol=2e-5, rtol=1e-4)
    assert (found - plain).abs().amax(-1).min() > 1e-3  # at every step


@torch.no_grad()
def test_rows_read_their_own_documents_and_those_without_are_the_plain_ones() -> None:
    backbone = tiny("llama")
    model = joint(backbone, [1, 2], key_distance=7)
    queries = torch.tensor([[4, 5, 6], [7, 8, 9], [10, 11, 12]])
    rows: list[list[Any]] = [[DOCUMENTS[0]], [], [DOCUMENTS[2], DOCUMENTS[1]]]
    together = model(queries, documents=rows).logits
    assert torch.equal(together[1], backbone(queries).logits[1])
    for index in (0, 2):
        alone = model(queries[index : index + 1], documents=[rows[index]]).logits
        torch.testing.assert_close(together[index], alone[0], atol=1e-5, rtol=1e-5)
    other_order = model(queries[2:], documents=[rows[2][::-1]]).logits
    torch.testing.assert_close(other_order[0], together[2], atol=1e-5, rtol=1e-5)
    padded = torch.tensor([[0, 0, 4, 5, 6], [7, 8, 9, 10, 11]])
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    left = model(padded, mask, documents=[rows[0], rows[2]], position_ids=(mask.cumsum(1) - 1).clamp_min(0)).logits
    torch.testing.assert_close(left[0, 2:], together[0], atol=1e-5, rtol=1e-5)
    beams = model.generate(queries, documents=rows, num_beams=2, max_new_tokens=4, do_sample=False)
    one = model.generate(queries[:1], documents=rows[:1], num_beams=2, max_new_tokens=4, do_sample=False)
    assert torch.equal(beams[0], one[0])


@torch.no_grad()
def test_off_is_the_plain_model_also_beside_a_thread_that_reads() -> None:
    backbone = tiny("llama")
    plain = backbone(QUERY).logits
    model = joint(backbone)
    inside, done = threading.Event(), threading.Event()
    seen = []

    def other() -> None:
        inside.wait(10)
        with torch.no_grad():
            seen.append(model(QUERY).logits)
        done.set()

    thread = threading.Thread(target=other)
    thread.start()
    with model.linked([[DOCUMENTS[0]]]):
        inside.set()
        assert done.wait(10)
        heard = model.backbone(QUERY).logits
        [within] = model.encode([DOCUMENTS[1]])  # documents are compiled without those that are linked
    thread.join()
    assert torch.equal(seen[0], plain)
    assert not torch.equal(heard, plain)
    assert torch.equal(within.keys, model.encode([DOCUMENTS[1]])[0].keys)
    assert torch.equal(model(QUERY).logits, plain)
    assert backbone.config._attn_implementation == "sdpa"


@torch.no_grad()
def test_only_heads_are_saved_and_a_copy_reads_by_itself(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    model = joint(tmp_path / "backbone", [1, 3], primer=[7, 8, 9])
    model.save_pretrained(tmp_path / "adapter")
    again = CombForCausalLM.from_pretrained(tmp_path / "adapter")
    wanted = model(QUERY, documents=[DOCUMENTS]).logits
    for other in (again, copy.deepcopy(model)):
        assert other.fingerprint == model.fingerprint
        assert not [name for name, p in other.named_parameters() if p.requires_grad and "key_value_heads" not in name]
        assert torch.equal(other(QUERY, documents=[DOCUMENTS]).logits, wanted)


def test_gradients_reach_the_heads_with_and_without_checkpointing() -> None:
    gradients = []
    for checkpointing in (False, True):
        model = joint(tiny("llama"), [1, 2]).train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model(QUERY, documents=[list(DOCUMENTS)], labels=QUERY).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.requires_grad})
    for name, gradient in gradients[0].items():
        assert gradient is not None, name
        assert gradient.abs().sum() > 0 or "norm" in name, name
        torch.testing.assert_close(gradients[1][name], gradient)


@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3_next"])
def test_documents_behind_a_primer_are_what_they_are_in_that_text(family: str) -> None:
    backbone = tiny(family)
    primer = [20, 21, 22]
    # another adapter on the same backbone, which needs fewer layers of the primer
    CombForCausalLM.from_backbone(backbone, cross_attention_layers=[1], shared_layers=True, primer=primer).encode(
        [(3, 4)]
    )
    options = {"cross_attention_layers": [1, 3], "shared_layers": True}
    primed = CombForCausalLM.from_backbone(backbone, primer=primer, **options)
    plain = CombForCausalLM.from_backbone(backbone, **options)
    inside = plain.encode([tuple(primer) + document for document in DOCUMENTS])
    for picache, whole, alone in zip(primed.encode(DOCUMENTS), inside, plain.encode(DOCUMENTS), strict=True):
        torch.testing.assert_close(picache.keys, whole.keys[:, len(primer) :], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(picache.values, whole.values[:, len(primer) :], atol=1e-5, rtol=1e-5)
        assert (picache.keys - alone.keys).abs().max() > 1e-3
    assert primed.fingerprint != plain.fingerprint
    assert primed.max_document_tokens == plain.max_document_tokens - len(primer)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"key_distance": 0}, "key_distance, at least 1"),
        ({"shared_layers": False}, "shared_layers"),
        ({"gate": 0.5}, "no gates"),
        ({"primer": True}, "no tokenizer beside its weights"),
    ],
)
def test_what_makes_no_sense_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        joint(tiny("llama"), [1, 2], **options)


def test_mac_beside_it_is_refused() -> None:
    model = joint(tiny("llama"), [1, 2])
    with pytest.raises(ValueError, match="leave mac out"):
        mac(model)
    with pytest.raises(ValueError, match="leave mac out"):
        PICEngine(joint(make_backbone(), [1]), make_tokenizer(), mac="generation")


def test_layers_without_softmax_attention_are_refused() -> None:
    with pytest.raises(ValueError, match="no softmax attention"):
        joint(tiny("qwen3_next"), [0])
