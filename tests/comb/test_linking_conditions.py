"""Training-free methods where the surroundings change: weights, adapters, precision, threads, generation settings."""

from __future__ import annotations

import sys
import threading
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor

from comb import methods
from comb.backbones.identity import weights_fingerprint
from comb.cache.store import PICacheStore
from comb.documents.document import PromptBuilder
from comb.documents.splitting import Splitter, split_document
from comb.documents.splitting import create as create_splitter
from comb.linking.support import find_support
from comb_training.nano import CHECKPOINT
from tests.helpers.families import tiny

_generator = torch.Generator().manual_seed(1)
DOCUMENTS = [torch.randint(3, 120, (n,), generator=_generator).tolist() for n in (11, 7, 13)]
QUERY = [90, 17, 33, 41, 12]
CACHED = ("naive", "legolink:4", "cacheblend:1.0", "prefix")


def make(spec: str, model: Any) -> Any:
    return methods.create(spec, model, **({"store": PICacheStore(), "salt": "test"} if spec == "prefix" else {}))


def link(model: Any, spec: str, documents: Any = DOCUMENTS, query: Any = QUERY) -> Any:
    method = make(spec, model)
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


def test_a_change_of_dtype_is_noticed() -> None:
    model = tiny("llama", std=0.15)
    method = methods.create("naive", model)
    before = method.support
    model.bfloat16()
    assert method.support is not before
    with torch.no_grad():
        fresh = methods.create("naive", model)
    left, right = (m.link(m.compile(DOCUMENTS), QUERY).logits for m in (method, fresh))
    assert torch.equal(left, right)


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


def test_switching_an_adapter_is_another_model() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.LoraConfig(r=4, target_modules=["k_proj", "v_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny("llama", std=0.15), settings, adapter_name="a").eval()
    model.add_adapter("b", settings)
    names = {weights_fingerprint(model)}
    method = methods.create("legolink:99", model)
    picaches = method.compile(DOCUMENTS)
    model.set_adapter("b")
    names.add(weights_fingerprint(model))
    with pytest.raises(ValueError, match="compiled by another model"):
        method.link(picaches, QUERY)
    assert error(link(model, "legolink:99").logits, link(model, "full").logits) < 1e-4
    with model.disable_adapter():
        names.add(weights_fingerprint(model))
    for module in model.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["b"] *= 5
    names.add(weights_fingerprint(model))
    assert len(names) == 4


def test_prompt_learning_is_refused() -> None:
    peft = pytest.importorskip("peft")
    settings = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    model = peft.get_peft_model(tiny("llama"), settings).eval()
    with pytest.raises(ValueError, match="prompt learning"):
        methods.create("legolink", model)


def test_weights_in_buffers_count() -> None:
    model = tiny("llama")
    layer = model.model.layers[0].mlp.gate_proj
    layer.register_buffer("qweight", torch.tensor([1, 2, 3], dtype=torch.int32))
    before = weights_fingerprint(model)
    layer.qweight[0] = 5
    assert weights_fingerprint(model) != before


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
@pytest.mark.parametrize("settings", [{"use_cache": False}, {"cache_implementation": "static"}, {"num_beams": 3}])
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
    limit = find_support(model).positions.max_segment_tokens
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


@pytest.mark.parametrize("family", ["dynamic_ntk", "longrope"])
def test_everything_recomputed_is_full_prefill_beyond_the_original_length(family: str) -> None:
    model = tiny(family, std=0.15)
    limit = find_support(model).positions.max_segment_tokens
    assert limit is not None
    generator = torch.Generator().manual_seed(3)
    documents = [torch.randint(3, 120, (limit - 2,), generator=generator).tolist() for _ in range(2)]
    reference = link(model, "full", documents).logits
    for spec in ("legolink:9999", "cacheblend:1.0"):
        state = link(model, spec, documents)
        assert state.recomputed == (2 * (limit - 2),)
        assert error(state.logits, reference) < 1e-4, spec


def test_a_prompt_that_ends_with_a_document_counts_its_tokens_once() -> None:
    # the first document is right already, unless its frequencies are another prompt's
    for family, recomputed in (("llama", 2), ("dynamic_ntk", 2)):
        assert link(tiny(family, std=0.15), "legolink:99", [[5, 6, 7], [8, 9]], []).recomputed == (recomputed,)


# ---- threads ----


@pytest.mark.skipif(not (CHECKPOINT / "config.json").exists(), reason=f"needs the nano tokenizer at {CHECKPOINT}")
def test_threads_share_a_tokenizer() -> None:
    """Splitting special tokens is a switch on the tokenizer itself: one thread's must not be another's."""
    tokenizer = tf.AutoTokenizer.from_pretrained(CHECKPOINT)
    special = tokenizer.all_special_tokens[-1]
    builders = [PromptBuilder(tokenizer), PromptBuilder(tokenizer)]
    text = f"a {special} b"
    prompt, segment = builders[0].build("Hm").flat, builders[0].segment(text)
    assert tokenizer.convert_tokens_to_ids(special) not in segment
    wrong: list[Any] = []

    def prompts(builder: PromptBuilder) -> None:
        wrong.extend(found for found in (builder.build("Hm").flat for _ in range(300)) if found != prompt)

    def segments(builder: PromptBuilder) -> None:
        wrong.extend(found for found in (builder.segment(text) for _ in range(300)) if found != segment)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(b,)) for work in (prompts, segments) for b in builders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


# ---- splitters of a user's own ----


class _Own(Splitter):
    def __init__(self, made: list[list[int]]) -> None:
        self.made = made

    def split(self, token_ids: Any, pieces: Any) -> Any:
        return self.made


@pytest.mark.skipif(not (CHECKPOINT / "config.json").exists(), reason=f"needs the nano tokenizer at {CHECKPOINT}")
@pytest.mark.parametrize("made", [[], [[5, 6]], [[6, 5], [7]], [[5, 6], [], [7]]])
def test_a_splitter_that_loses_or_turns_tokens_is_refused(made: list[list[int]]) -> None:
    tokenizer = tf.AutoTokenizer.from_pretrained(CHECKPOINT)
    with pytest.raises(ValueError, match=r"_Own made \d segments that are not the document"):
        split_document(tokenizer, [5, 6, 7], _Own(made))
    assert split_document(tokenizer, [5, 6, 7], _Own([[5], [6, 7]])) == [(5,), (6, 7)]


@pytest.mark.parametrize("found", [None, [1.5], ["x"]])
def test_boundaries_that_are_not_numbers_are_refused(found: Any) -> None:
    splitter = create_splitter(lambda text: found)
    splitter.max_tokens = 2
    with pytest.raises(ValueError, match="whole numbers"):
        splitter.split([5, 6, 7], ["a", "b", "c"])
