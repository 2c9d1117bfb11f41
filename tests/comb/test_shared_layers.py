"""An encoder without layers of its own: documents run through the backbone's, and heads read what its layers read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from comb import PICEngine
from comb.model.modeling import CombForCausalLM
from tests.helpers.families import open_gates, tiny
from tests.helpers.tiny_engine import CITY, LAKE, make_backbone, make_comb

FAMILIES = ("llama", "qwen3", "gemma3", "mixtral", "deepseek_v3", "qwen3_next")
DOCUMENTS = [(5, 6, 7, 8, 9), (10, 11), (3,)]
LAYERS = [1, 2]


def shared(backbone: Any, **options: Any) -> CombForCausalLM:
    options = {"cross_attention_layers": LAYERS, "shared_layers": True, "sink": "null"} | options
    return CombForCausalLM.from_backbone(backbone, **options)


@torch.no_grad()
def layer_input(backbone: Any, info: Any, layer: int, document: tuple[int, ...]) -> torch.Tensor:
    """What a decoder layer is given of a document alone."""
    seen: list[torch.Tensor] = []
    hook = backbone.get_submodule(info.layers_path)[layer].register_forward_pre_hook(
        lambda _, args, kwargs: seen.append(args[0] if args else kwargs["hidden_states"]), with_kwargs=True
    )
    backbone(torch.tensor([document]), use_cache=False)
    hook.remove()
    return seen[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_read_what_the_backbones_layers_are_given(family: str) -> None:
    backbone = tiny(family)
    model = shared(backbone)
    compiled = model.encode(DOCUMENTS)
    for document, picache in zip(DOCUMENTS, compiled, strict=True):
        for place, layer in enumerate(LAYERS):
            first = torch.zeros(1, len(document), dtype=torch.bool)
            first[0, 0] = True
            hidden = layer_input(backbone, model.info, layer, document)
            keys, values = model.encoder.key_value_heads[place](hidden, first)
            torch.testing.assert_close(picache.keys[place], keys[0], atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(picache.values[place], values[0], atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_it_starts_as_the_layers_it_stands_for() -> None:
    """Keys and values are the backbone's own before positions, but for the first token, whose place is empty."""
    backbone = tiny("llama")
    model = shared(backbone, gate=0.5)
    [picache] = model.encode([DOCUMENTS[0]])
    for place, layer in enumerate(LAYERS):
        decoder: Any = backbone.model.layers[layer]
        normed = decoder.input_layernorm(layer_input(backbone, model.info, layer, DOCUMENTS[0]))
        wanted = decoder.self_attn.k_proj(normed).unflatten(-1, (-1, model.info.head_dim))[0]
        torch.testing.assert_close(picache.keys[place][1:], wanted[1:])
        assert not picache.keys[place][0].any()
        assert not picache.values[place][0].any()
        assert torch.equal(model.cross_blocks[place].cross_attn.q_proj.weight, decoder.self_attn.q_proj.weight)
        assert model.cross_blocks[place].attention_gate.tanh().item() == pytest.approx(0.5)


def test_only_heads_and_blocks_are_saved_and_trained(tmp_path: Path) -> None:
    backbone = tiny("llama")
    backbone.save_pretrained(tmp_path / "backbone")
    model = open_gates(shared(tmp_path / "backbone"))
    assert not any(name.startswith("encoder.layers") for name in model.state_dict())
    assert {name.split(".")[0] for name, p in model.named_parameters() if p.requires_grad} == {
        "encoder",
        "cross_blocks",
    }
    model.save_pretrained(tmp_path / "adapter")
    again = CombForCausalLM.from_pretrained(tmp_path / "adapter")
    assert again.fingerprint == model.fingerprint
    ids = torch.tensor([[4, 5, 6]])
    with torch.no_grad():
        assert torch.equal(again(ids, documents=[DOCUMENTS]).logits, model(ids, documents=[DOCUMENTS]).logits)
        assert torch.equal(again(ids).logits, backbone(ids).logits)  # off: the plain model
        assert not torch.equal(again(ids, documents=[DOCUMENTS]).logits, backbone(ids).logits)


@torch.no_grad()
def test_blocks_without_an_mlp_are_blocks_whose_mlp_is_not_heard(tmp_path: Path) -> None:
    tiny("llama").save_pretrained(tmp_path / "backbone")
    made = {mlp: open_gates(shared(tmp_path / "backbone", cross_mlp=mlp), mlp=0.0) for mlp in (True, False)}
    made[False].save_pretrained(tmp_path / "adapter")
    without = CombForCausalLM.from_pretrained(tmp_path / "adapter")
    assert not any("mlp" in name or "post_attention" in name for name in without.cross_blocks.state_dict())
    assert made[True].cross_blocks[0].has_mlp
    ids = torch.tensor([[4, 5, 6]])
    silent = made[True](ids, documents=[DOCUMENTS]).logits
    assert torch.equal(without(ids, documents=[DOCUMENTS]).logits, silent)
    heard = open_gates(made[True])(ids, documents=[DOCUMENTS]).logits
    assert not torch.equal(heard, silent)


def test_a_document_is_compiled_without_those_that_are_linked() -> None:
    model = open_gates(shared(tiny("llama")))
    [alone] = model.encode([DOCUMENTS[0]])
    with model.linked([[DOCUMENTS[1]]]):
        [inside] = model.encode([DOCUMENTS[0]])
    assert torch.equal(alone.keys, inside.keys)


def test_gradients_reach_heads_and_blocks_only() -> None:
    model = open_gates(shared(tiny("llama"))).train()
    model(torch.tensor([[4, 5, 6]]), documents=[list(DOCUMENTS)], labels=torch.tensor([[4, 5, 6]])).loss.backward()
    missing = [name for name, p in model.named_parameters() if p.requires_grad and p.grad is None]
    assert missing == []
    assert all(p.grad is None for p in model.backbone.parameters())
    assert model.encoder.key_value_heads[0].null_key.grad.abs().sum() > 0


@torch.no_grad()
def test_picaches_belong_to_the_layers_that_made_them() -> None:
    model = shared(tiny("llama"))
    before = model.fingerprint
    [picache] = model.encode([DOCUMENTS[0]])
    model.backbone.model.layers[0].mlp.down_proj.weight.mul_(3)
    assert model.fingerprint != before
    with pytest.raises(ValueError, match="compiled by another model"):
        model.check_picache(picache)
    own_layers = CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2)
    before = own_layers.fingerprint
    own_layers.backbone.model.layers[0].mlp.down_proj.weight.mul_(3)
    assert own_layers.fingerprint == before  # an encoder of its own shares the embedding alone


def test_documents_are_compiled_without_dropout_in_training_too() -> None:
    model = shared(tiny("llama"))
    for module in model.backbone.modules():
        if hasattr(module, "attention_dropout"):
            module.attention_dropout = 0.5
    [expected] = model.encode([DOCUMENTS[0]])
    model.train()
    [again] = model.encode([DOCUMENTS[0]])
    assert torch.equal(again.keys, expected.keys)
    assert model.backbone.training


@torch.no_grad()
@pytest.mark.parametrize("distance", [1, 40])
def test_keys_are_seen_from_behind_their_document(distance: int) -> None:
    """A query that isn't turned scores them as the backbone's own attention does so far behind the document's end."""
    backbone = tiny("llama")
    model, plain = shared(backbone, key_distance=distance), shared(backbone)
    for document in DOCUMENTS[:2]:
        [picache], [unturned] = model.encode([document]), plain.encode([document])
        query = torch.randn(1, 1, model.info.head_dim, generator=torch.Generator().manual_seed(0))
        places = torch.tensor([[*range(len(document)), len(document) - 1 + distance]])
        cosine, sine = backbone.model.rotary_emb(query, places)
        keys = unturned.keys.transpose(1, 2)
        _, turned_keys = apply_rotary_pos_emb(keys, keys, cosine[:, :-1], sine[:, :-1])
        turned_query, _ = apply_rotary_pos_emb(query, query, cosine[:, -1:], sine[:, -1:], 0)
        scores = picache.keys @ query.flatten()  # [cross layers, tokens, heads]
        wanted = (turned_keys @ turned_query.flatten()).transpose(1, 2)
        torch.testing.assert_close(scores[:, 1:], wanted[:, 1:], atol=1e-5, rtol=1e-5)
        assert (scores - unturned.keys @ query.flatten())[:, 1:].abs().max() > 1e-3  # without positions they are others
        assert torch.equal(picache.keys[:, 0], unturned.keys[:, 0])  # the null key is nowhere
        assert torch.equal(picache.values, unturned.values)
    assert model.fingerprint != plain.fingerprint


@pytest.mark.parametrize(("options", "named"), [({"key_distance": -1}, "key_distance"), ({"sink": "none"}, "sink")])
def test_what_makes_no_sense_is_refused(options: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=f"{named} is "):
        shared(tiny("llama"), **options)


@pytest.mark.parametrize("distance", [0, 9])
@pytest.mark.parametrize("documents", [DOCUMENTS[:1], DOCUMENTS, [DOCUMENTS[0], DOCUMENTS[0][::-1]]])
def test_packed_rows_are_the_padded_ones(documents: list[tuple[int, ...]], distance: int) -> None:
    """Heads call no attention, so what flash attention would be given can be looked at without it."""
    model = shared(tiny("llama"), key_distance=distance)
    padded = model.encode_batch(list(documents))
    model.encoder.config._attn_implementation = "flash_attention_2"
    for (keys, values), (same_keys, same_values) in zip(padded, model.encode_batch(list(documents)), strict=True):
        torch.testing.assert_close(keys, same_keys)
        torch.testing.assert_close(values, same_values)


def test_what_documents_pass_of_the_backbone_is_computed(tokenizer: Any) -> None:
    model = CombForCausalLM.from_backbone(make_backbone(num_hidden_layers=4), cross_attention_layers=[1, 3],
                                          shared_layers=True)  # fmt: skip
    engine = PICEngine(model, tokenizer)
    cold, warm = (engine.ask("Deep?", [LAKE, CITY], max_new_tokens=1).report for _ in range(2))
    text = sum(document.tokens for document in cold.documents)
    assert cold.compiled_tokens == round(0.75 * text)  # three of four layers
    assert cold.computed_tokens == warm.computed_tokens + cold.compiled_tokens
    assert warm.compiled_tokens == 0
    assert f"({cold.compiled_tokens} to compile)" in str(cold)
    own = PICEngine(make_comb(), tokenizer).ask("Deep?", [LAKE], max_new_tokens=1).report
    assert own.compiled_tokens == 0
