"""The hybrid nano backbone: what it takes over from the nano, how its linear layers learn, and what it can do."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM, PreTrainedTokenizerFast

from comb import methods
from comb_training.nano import CHECKPOINT, HYBRID_CHECKPOINT, World
from scripts.nano.evaluate import exact_match
from scripts.nano.hybrid import LINEAR, HybridRecipe, build_hybrid, distil, match_layers, row_stream
from scripts.nano.packing import encode


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return AutoTokenizer.from_pretrained(CHECKPOINT)


@pytest.fixture(scope="module")
def nano() -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(CHECKPOINT).eval().requires_grad_(False)


def test_all_but_the_linear_layers_is_the_nano(nano: LlamaForCausalLM) -> None:
    hybrid = build_hybrid(nano, seed=0).eval()
    ids = torch.arange(5, 45)[None]
    without = LlamaForCausalLM.from_pretrained(CHECKPOINT).eval()
    for index in LINEAR:
        hybrid.model.layers[index].mamba.out_proj.weight.data.zero_()
        without.model.layers[index].self_attn.o_proj.weight.data.zero_()
    with torch.no_grad():
        found, expected, whole = hybrid(ids).logits, without(ids).logits, nano(ids).logits
    assert torch.allclose(found, expected, atol=1e-4)
    assert (expected - whole).abs().max() > 1


def test_both_steps_learn(nano: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> None:
    recipe = HybridRecipe(scenes=2, questions=1, matching_steps=8, distillation_steps=3)
    hybrid, ids = build_hybrid(nano, seed=0), torch.arange(5, 60)[None]
    mixer = hybrid.model.layers[0].mamba

    def distance() -> float:
        with torch.no_grad():
            return (hybrid(ids).logits.softmax(-1) - nano(ids).logits.softmax(-1)).abs().sum().item()

    start, untrained = distance(), mixer.in_proj.weight.clone()
    others = hybrid.model.layers[1].self_attn.q_proj.weight.clone()
    match_layers(hybrid, nano, row_stream(tokenizer, recipe), recipe)
    assert not torch.equal(mixer.in_proj.weight, untrained)
    assert torch.equal(hybrid.model.layers[1].self_attn.q_proj.weight, others)
    matched = distance()
    distil(hybrid, nano, row_stream(tokenizer, recipe), recipe)
    assert not torch.equal(hybrid.model.layers[1].self_attn.q_proj.weight, others)
    assert matched < start


@pytest.mark.slow
def test_the_checkpoint_answers_and_needs_its_linear_layers(tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(HYBRID_CHECKPOINT).eval()
    assert [index for index, kind in enumerate(model.config.layer_types) if kind == "linear_attention"] == list(LINEAR)
    assert exact_match(model, tokenizer, num_scenes=5, seed=20_000)["all"]["exact_match"] > 0.9
    for index in LINEAR:
        model.model.layers[index].mamba.out_proj.weight.data.zero_()
    assert exact_match(model, tokenizer, num_scenes=2, seed=20_000)["all"]["exact_match"] < 0.1


def streams(model: Any, ids: list[int], held: dict[int, list[Tensor]]) -> tuple[list[Tensor], Tensor]:
    """What every layer reads, and the last log-probabilities, of one pass with places `held` at given streams."""
    seen: list[Tensor] = []

    def hold(index: int) -> Any:
        def hook(_: object, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            stream = arguments[0].clone()
            for place, given in held.items():
                stream[0, place] = given[index]
            seen.append(stream[0])
            return stream, *arguments[1:]

        return hook

    hooks = [layer.register_forward_pre_hook(hold(index)) for index, layer in enumerate(model.model.layers)]
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, -1]
    for hook in hooks:
        hook.remove()
    return seen, logits.log_softmax(-1)


@pytest.mark.parametrize("width", [3, 8])
def test_hypic_is_a_pass_whose_interiors_stay_as_they_are_alone(width: int, tokenizer: PreTrainedTokenizerFast) -> None:
    model = AutoModelForCausalLM.from_pretrained(HYBRID_CHECKPOINT).eval()
    method = methods.create("hypic", model, w=width)
    scene = encode(tokenizer, World(20_000, "heldout").scene(5, 2))
    newline = tokenizer("\n", add_special_tokens=False)["input_ids"][0]
    ends = [place + 1 for place, token in enumerate(scene.context) if token == newline]
    segments = [scene.context[start:end] for start, end in zip([1, *ends], ends, strict=False)]
    for ask in scene.asks:
        linked = method.link(method.compile(segments), ask, head_ids=scene.context[:1]).logits[0].log_softmax(-1)
        held, at = {}, 1
        for segment in segments:
            alone, _ = streams(model, segment, {})
            held |= {at + t: [layer[t] for layer in alone] for t in range(width, len(segment) - width)}
            at += len(segment)
        _, expected = streams(model, scene.context + ask, held)
        _, full = streams(model, scene.context + ask, {})
        assert (linked - expected).abs().max() < 1e-4
        assert (linked - full).abs().max() > 0.05
