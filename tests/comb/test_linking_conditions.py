"""Training-free methods where the surroundings change: weights, adapters, precision, threads, generation settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from comb import methods
from comb.linking.support import find_support
from tests.helpers.families import tiny

_generator = torch.Generator().manual_seed(1)
DOCUMENTS = [torch.randint(3, 120, (n,), generator=_generator).tolist() for n in (11, 7, 13)]
QUERY = [90, 17, 33, 41, 12]
CACHED = ("naive", "legolink:4", "cacheblend:1.0", "prefix")


def link(model: Any, spec: str, documents: Any = DOCUMENTS, query: Any = QUERY) -> Any:
    method = methods.create(spec, model)
    return method.link(method.compile(documents), query)


def error(left: Tensor, right: Tensor) -> float:
    return float((left.float() - right.float()).abs().max() / right.float().abs().max())


def answer(state: Any, **kwargs: Any) -> list[int]:
    ids = state.generate(max_new_tokens=12, do_sample=False, eos_token_id=None, **kwargs)
    return ids[:, state.input_ids.shape[1] :].tolist()


# ---- keys that are hard to read ----


def outlier_model(bias: float, channel: int) -> Any:
    """As Qwen2 and Qwen2.5: a key bias that makes one slowly turning channel much larger than all others."""
    torch.manual_seed(0)
    config = tf.Qwen2Config(
        vocab_size=128, hidden_size=128, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=2048,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
    )  # fmt: skip
    model = tf.Qwen2ForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    for layer in model.model.layers:
        layer.self_attn.k_proj.bias.data[channel] = bias
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("channel", [2, 30, 60])
def test_a_channel_of_great_size_does_not_hide_that_the_others_turn(dtype: torch.dtype, channel: int) -> None:
    model = outlier_model(400.0, channel).to(dtype)
    rotations = find_support(model).positions.layers
    assert all(keys is not None and values is None for keys, values in rotations)
    exact = link(outlier_model(400.0, channel), "naive").logits
    assert error(link(model, "naive").logits, exact) < 0.1
    assert error(link(model, "naive:rotate=false").logits, exact) > 0.2


# ---- the model changes after a method was made ----


def test_refusals_end_when_the_weights_are_right_again() -> None:
    model = tiny("llama", std=0.15)
    weight = model.model.layers[0].self_attn.k_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(torch.nan)
    with pytest.raises(ValueError, match="NaN"):
        methods.create("naive", model)
    with torch.no_grad():
        weight.copy_(kept)
    assert set(methods.create("naive", model).support.positions.layers) != {(None, None)}


def test_prompt_learning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny("llama"), settings).eval()
    with pytest.raises(ValueError, match="prompt learning"):
        methods.create("legolink", model)


# ---- the surroundings of a call ----


def test_autocast_and_inference_mode_of_the_caller_change_nothing() -> None:
    model = tiny("llama", std=0.15)
    expected = link(model, "legolink:4")
    with torch.autocast("cpu", torch.bfloat16):
        method = methods.create("legolink:4", model)
        picaches = method.compile(DOCUMENTS)
        assert torch.equal(method.link(picaches, QUERY).logits, expected.logits)
    assert torch.equal(method.link(picaches, QUERY).logits, expected.logits)
    with torch.inference_mode():
        state = method.link(method.compile(DOCUMENTS), QUERY)
    assert answer(state) == answer(expected)
    with torch.inference_mode():
        born_there = tiny("llama", std=0.15)
    assert answer(link(born_there, "legolink:4")) == answer(expected)


@pytest.mark.parametrize("spec", CACHED)
@pytest.mark.parametrize("settings", [{"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 3},
                                      {"prefill_chunk_size": 2}])  # fmt: skip
def test_generation_settings_of_the_model_hold_as_with_full(spec: str, settings: dict[str, Any]) -> None:
    model = tiny("llama", std=0.15)
    expected = answer(link(model, spec), **({"num_beams": 3} if "num_beams" in settings else {}))
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    assert answer(link(model, spec)) == expected
    if spec in ("cacheblend:1.0", "prefix"):
        assert expected == answer(link(model, "full"))


def test_a_generation_configuration_of_its_own() -> None:
    state = link(tiny("llama", std=0.15), "legolink:99")
    given = tf.GenerationConfig(num_beams=3, max_new_tokens=12, do_sample=False)
    left = state.generate(generation_config=given)
    assert torch.equal(left, state.generate(num_beams=3, max_new_tokens=12, do_sample=False))


@pytest.mark.parametrize("spec", ["legolink:4", "prefix"])
def test_assisted_decoding_is_refused_behind_a_linked_cache(spec: str) -> None:
    model = tiny("llama", std=0.15)
    with pytest.raises(ValueError, match="prompt_lookup_num_tokens"):
        link(model, spec).generate(max_new_tokens=4, prompt_lookup_num_tokens=2)
    link(model, "full").generate(max_new_tokens=4, prompt_lookup_num_tokens=2)


# ---- frequencies that depend on the prompt's length ----


@pytest.mark.parametrize("family", ["dynamic_ntk", "longrope"])
def test_another_prompt_does_not_change_this_one(family: str) -> None:
    model = tiny(family, std=0.15)
    limit = find_support(model).positions.limit
    assert limit is not None
    generator = torch.Generator().manual_seed(3)
    longer = [torch.randint(3, 120, (limit - 2,), generator=generator).tolist() for _ in range(2)]
    method = methods.create("legolink:9999", model)
    state = method.link(method.compile(DOCUMENTS), QUERY)
    before, tokens = state.logits, answer(state)
    method.link(method.compile(longer), QUERY).logits  # noqa: B018  it moves the model's frequencies
    assert error(state.logits, before) < 1e-5
    method.link(method.compile(longer), QUERY).logits  # noqa: B018
    assert answer(state) == tokens
