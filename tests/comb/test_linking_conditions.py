"""Linking where more is said: tokens chosen by the question, fronts, and surroundings that change."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf
from torch import Tensor
from transformers import DynamicCache

from comb import methods
from comb.backbones.forward import counted_passes
from comb.backbones.tokenizer import PASSAGE
from comb.engine.engine import PICEngine
from comb.linking.support import find_support
from tests.comb.test_linking import DOCUMENTS, FRONT, PREFIX, QUERY, error, link, model_of, recorded, spans_of
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import tiny
from tests.helpers.hybrids import HYBRIDS, tiny_hybrid


@pytest.mark.parametrize(
    ("options", "seam"), [({}, 4), ({"front": [5, 6, 7]}, 0), ({"seam": 2, "front": [5, 6, 7]}, 2)]
)
def test_seams_come_first_where_documents_are_compiled_alone(options: dict[str, Any], seam: int) -> None:
    chosen = []
    for seams in ({}, {"seam": seam}, {"seam": 4 - seam}):
        method = methods.create("focus:0.2", model_of("llama"), **{**options, **seams})
        noted = recorded(method)
        method.link(method.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX)
        chosen += noted
    assert chosen[0] == chosen[1]
    assert (chosen[1] == chosen[2]) == (seam == 2)


@pytest.mark.parametrize("family", ["llama", "qwen3", "glm4", "deepseek_v3"])
def test_the_chosen_are_those_that_the_query_looks_at(family: str) -> None:
    """Against the weights that eager attention returns, over an ordinary cache with the naively linked documents."""
    model = model_of(family)
    spans, _, length = spans_of(DOCUMENTS, PREFIX, QUERY)
    paid = attention_of_query(model)
    documents = torch.tensor([position for span in spans for position in range(span.start, span.end)])
    seams = {position for span in spans for position in (span.start, span.start + 1)}
    for seam, expected in ((0, {*documents[paid[documents].topk(8).indices].tolist()}), (2, seams)):
        method = methods.create(f"focus:0.25,seam={seam}", model)
        chosen = recorded(method)
        state = method.link(method.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX)
        assert state.recomputed == (8,)
        assert {*chosen[0]} >= expected if seam else {*chosen[0]} == expected
    assert paid[documents].topk(8).values[-1] > 1.001 * paid[documents].topk(9).values[-1]  # no close call decides
    assert length == len(paid)


def attention_of_query(model: Any) -> Tensor:
    """Attention [N] by the query's tokens, over layers and heads, behind the naive method's cache of the documents."""
    state = link(model, "naive", prefix=PREFIX)
    before = DynamicCache()
    width = sum(map(len, (PREFIX, *DOCUMENTS)))
    for number, layer in enumerate(state.past_key_values.layers):
        before.update(layer.keys[:, :, :width], layer.values[:, :, :width], number)
    model.set_attn_implementation("eager")
    try:
        with torch.no_grad():
            weights = model(input_ids=torch.tensor([QUERY]), past_key_values=before, output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    return torch.stack([layer.sum(dim=(0, 1, 2)) for layer in weights]).sum(0)


# ---- fronts: what is kept of them, what is exact, and where their tokens come from ----


def primed(model: Any, spec: str = "primed", front: Any = FRONT) -> Any:
    return methods.create(spec, model, front=front)


def logits(method: Any, documents: Any = DOCUMENTS, **fresh: Any) -> torch.Tensor:
    found: torch.Tensor = method.link(method.compile(documents), QUERY, **fresh).logits
    return found


@pytest.mark.parametrize(
    ("spec", "given", "front"), [("primed", FRONT, FRONT), ("naive", "dummies:3", [1, 1, 1])], ids=["ids", "dummies"]
)
def test_a_segment_is_what_it_is_behind_the_front(spec: str, given: Any, front: list[int]) -> None:
    model = model_of("llama")
    method = primed(model, spec, given)
    (picache,) = method.compile(DOCUMENTS[:1])
    behind = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[*front, *DOCUMENTS[0]]]), past_key_values=behind, use_cache=True)
    assert torch.allclose(picache.keys[1], behind.layers[1].keys[0, :, len(front) :], atol=1e-6)
    assert picache.num_tokens == len(DOCUMENTS[0])
    # where the prompt really has the front in front, one document is exact
    reference = logits(methods.create("full", model), DOCUMENTS[:1], prefix_ids=front)
    assert error(logits(method, DOCUMENTS[:1], prefix_ids=front), reference) < 1e-4
    assert error(logits(method, DOCUMENTS[:1], prefix_ids=PREFIX), reference) > 1e-3


def test_a_prompt_that_begins_with_a_document_has_its_own_sink() -> None:
    model = model_of("llama")
    method = primed(model)
    picaches = method.compile(DOCUMENTS)
    state = method.link(picaches, QUERY)
    assert state.recomputed == (1,)
    exact = DynamicCache()
    with torch.no_grad():
        model(input_ids=torch.tensor([[*DOCUMENTS[0], *DOCUMENTS[1]]]), past_key_values=exact, use_cache=True)
    for layer in (0, 1):
        own, right = state.past_key_values.layers[layer].keys[0], exact.layers[layer].keys[0]
        assert torch.allclose(own[:, 0], right[:, 0], atol=1e-5)
    assert not torch.allclose(own[:, 1], right[:, 1], atol=1e-3)
    assert method.link(picaches, QUERY, prefix_ids=PREFIX).recomputed == (0,)  # the prefix has it


@pytest.mark.parametrize(
    ("lacking", "value", "words"),
    [
        ("comb.linking.support.mask_candidates", [], "takes no mask by position, or computes a token otherwise"),
        ("comb.methods.focus.can_set_attention", False, "computes attention in its own code"),
    ],
)
def test_focus_says_what_it_lacks(lacking: str, value: Any, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lacking, lambda _: value)
    model = tiny("llama")
    methods.create("cacheblend:0.3", model)
    with pytest.raises(ValueError, match=rf"LlamaForCausalLM {words}.*use 'cacheblend'"):
        methods.create("focus:0.3", model)


def test_without_a_front_nothing_changes() -> None:
    model = model_of("llama")
    assert methods.create("naive", model, front="none").fingerprint == methods.create("naive", model).fingerprint
    off = methods.create("primed:3", model, front="none")
    assert torch.equal(logits(off, prefix_ids=PREFIX), logits(methods.create("legolink:3", model), prefix_ids=PREFIX))


def test_the_passage_is_tokenised_by_the_engine(tmp_path: Path) -> None:
    model, tokenizer = byte_llama(max_position_embeddings=2048), byte_tokenizer()
    engine = PICEngine(model, tokenizer, method="primed")
    assert tokenizer.decode(engine.method.compiled_behind, skip_special_tokens=True).strip() == PASSAGE.strip()
    # another process gets the ids
    again = methods.create(engine.method.spec.name, model, **engine.method.spec.parameters)
    assert again.fingerprint == engine.method.fingerprint
    own = tmp_path / "front.txt"
    own.write_text("One sentence of mine.")
    mine = PICEngine(model, tokenizer, method=f"focus:0.2,front={own}")
    assert tokenizer.decode(mine.method.compiled_behind, skip_special_tokens=True) == "One sentence of mine."
    assert mine.ask("Who?", ["Ida lives in Rome."]).report.documents[0].state == "compiled"


def test_errors_say_what_to_do(backbone: Any, tokenizer: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    with pytest.raises(ValueError, match="no tokenizer beside its weights: give its token ids"):
        methods.create("primed", model)
    with pytest.raises(ValueError, match="a front has token ids below 128, got 128"):
        primed(model, front=[1, 128])
    with pytest.raises(ValueError, match="the front's 129 tokens take more than half of the 256 positions"):
        primed(model, front=[5] * 129)
    with pytest.raises(ValueError, match="the front's 33 tokens take more than half of the 32 positions"):
        primed(tiny("dynamic_ntk"), front=[5] * 33)  # of its 256, so many that a segment may be compiled in
    for wrong in (3, 0, 0.5, True, []):
        with pytest.raises(ValueError, match="front is none, dummies:n, prose, a text file, token ids, adapter, or"):
            primed(model, front=wrong)
    empty = tmp_path / "empty.txt"
    empty.write_text(" \n")
    for front, said in ((empty, r"empty\.txt is empty"), (tmp_path / "none.txt", "no such file or folder")):
        with pytest.raises(ValueError, match=said):
            PICEngine(backbone, tokenizer, method=f"primed:front={front}")


def test_the_front_is_computed_once_for_all_documents() -> None:
    model = tiny("llama", std=0.15)
    method = primed(model)
    with counted_passes() as first:
        before = method.compile(DOCUMENTS)
    with counted_passes() as second:
        primed(model, "focus:0.2").compile(DOCUMENTS)
    documents = sum(map(len, DOCUMENTS))
    assert (first.tokens, second.tokens) == (len(FRONT) + documents, documents)
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.5)
    after = primed(model).compile(DOCUMENTS)
    fresh = primed(copy.deepcopy(model)).compile(DOCUMENTS)
    assert torch.equal(after[1].values[1], fresh[1].values[1])  # other weights, another front
    assert not torch.allclose(after[1].values[1], before[1].values[1], atol=1e-3)


def answer(state: Any, **kwargs: Any) -> list[int]:
    ids = state.generate(max_new_tokens=12, do_sample=False, eos_token_id=None, **kwargs)
    return ids[:, state.input_ids.shape[1] :].tolist()


# ---- keys that are hard to read ----


def outlier_model(bias: float, channel: int) -> Any:
    """As Qwen2 and Qwen2.5: a key bias that makes one slowly turning channel much larger than all others."""
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    rope = {"rope_type": "default", "rope_theta": 1e6}
    model = tiny("qwen2", std=0.15, **sizes, num_hidden_layers=2, rope_parameters=rope)
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


@pytest.mark.parametrize(("spec", "family"), [("legolink", "llama"), ("prefix", "llama"), ("hypic", "qwen3_5")])
def test_what_peft_puts_around_a_decoder_is_refused(spec: str, family: str) -> None:
    peft = pytest.importorskip("peft")
    learned = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    begun = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"], alora_invocation_tokens=[7])
    for settings, match in ((learned, "prompt learning"), (begun, "activated LoRA")):
        model = peft.get_peft_model(small(family), settings).eval()
        with pytest.raises(ValueError, match=match):
            methods.create(spec, model)
        methods.create("full", model)


@pytest.mark.parametrize(("spec", "family"), [("legolink:4", "llama"), ("prefix", "llama"), ("hypic:4", "qwen3_5")])
def test_a_hook_around_the_decoder_is_refused_and_one_inside_is_not(spec: str, family: str) -> None:
    model, documents = small(family), [[5, 6, 7, 8, 9, 10], [11, 12, 13, 14]]
    method = methods.create(spec, model)
    inside = model.get_input_embeddings().register_forward_hook(lambda *call: call[-1] * 1.5)
    method.link(method.compile(documents), [9, 8])
    inside.remove()

    def other(_: Any, args: Any, kwargs: Any) -> Any:
        return args, {**kwargs, "input_ids": (kwargs["input_ids"] + 1) % 100}

    outside = model.register_forward_pre_hook(other, with_kwargs=True)
    with pytest.raises(ValueError, match="around its decoder"):
        method.link(method.compile(documents), [9, 8])
    outside.remove()
    method.link(method.compile(documents), [9, 8])


@pytest.mark.parametrize("spec", ["prefix", "naive", "legolink:4", "full"])
def test_a_picture_in_an_earlier_prompt_moves_no_later_one(spec: str) -> None:
    """Models that see keep how far the pictures of the last prompt have moved its text."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    text = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "rope_parameters": rope}  # fmt: skip
    vision = {"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2}
    torch.manual_seed(0)
    config = tf.Qwen2VLConfig(text_config=text, vision_config=vision, image_token_id=120, video_token_id=121)
    model: Any = tf.Qwen2VLForConditionalGeneration(config).eval()
    state = link(model, spec)
    expected = state.logits
    for left in ([[-12]], [[0], [0]]):  # of a picture; of a batch of two rows
        model.model.rope_deltas = torch.tensor(left)
        assert torch.equal(state.logits, expected)


def small(family: str) -> Any:
    return tiny_hybrid(family) if family in HYBRIDS else tiny(family, std=0.15)


def test_offloaded_embeddings_are_said_in_one_line() -> None:
    accelerate = pytest.importorskip("accelerate")
    model = tiny("llama")
    accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    with pytest.raises(ValueError, match="embedding table is offloaded"):
        methods.create("full", model)


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


@pytest.mark.parametrize("spec", ["naive", "legolink:4", "cacheblend:1.0", "prefix"])
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


@pytest.mark.parametrize("spec", ["legolink:4", "prefix"])
def test_what_goes_on_otherwise_is_refused_behind_a_linked_cache(spec: str) -> None:
    model = tiny("llama", std=0.15)
    for name, value in (("prompt_lookup_num_tokens", 2), ("assistant_early_exit", 1), ("use_mtp", True),
                        ("adapter_names", ["b"])):  # fmt: skip
        with pytest.raises(ValueError, match=rf"{name}=.*linked cache"):
            link(model, spec).generate(max_new_tokens=4, **{name: value})
    link(model, "full").generate(max_new_tokens=4, prompt_lookup_num_tokens=2)


# ---- frequencies that depend on the prompt's length ----


@pytest.mark.parametrize(
    ("family", "spec"), [
        ("dynamic_ntk", "legolink:9999"), ("longrope", "legolink:9999"),
        ("dynamic_ntk", "naive:rotate=false"), ("dynamic_ntk", "cacheblend:0.3,rotate=false"),
    ],
)  # fmt: skip
def test_another_prompt_does_not_change_this_one(family: str, spec: str) -> None:
    model = tiny(family, std=0.15)
    limit = find_support(model).positions.limit
    assert limit is not None
    generator = torch.Generator().manual_seed(3)
    longer = [torch.randint(3, 120, (limit - 2,), generator=generator).tolist() for _ in range(2)]
    method = methods.create(spec, model)
    picaches = method.compile(DOCUMENTS)
    state = method.link(picaches, QUERY)
    before, tokens = state.logits, answer(state)
    method.link(method.compile(longer), QUERY).logits  # noqa: B018  it moves the model's frequencies
    assert error(method.link(picaches, QUERY).logits, before) < 1e-5
    method.link(method.compile(longer), QUERY).logits  # noqa: B018
    assert error(state.logits, before) < 1e-5
    method.link(method.compile(longer), QUERY).logits  # noqa: B018
    assert answer(state) == tokens
