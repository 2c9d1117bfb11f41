"""COMB on every family: encoder off is the backbone, order doesn't matter, rows don't see each other."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import transformers as tf
from packaging.version import Version

from comb import CombForCausalLM
from comb.backbones.identity import forget_identity
from comb.cli.doctor import run_checks
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import BASE, FAMILIES, MIXTURES, open_gates, tiny

SEGMENTS = [[5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15, 16, 17]]


def hooks_on(model: CombForCausalLM) -> int:
    return sum(len(layer._forward_pre_hooks) for layer in model.backbone.get_submodule(model.info.layers_path))


@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_family(family: str, query: torch.Tensor) -> None:
    backbone = tiny(family)
    plain = backbone(query).logits
    tokens = backbone.generate(query, max_new_tokens=5, do_sample=False)
    model = CombForCausalLM.from_backbone(backbone, num_encoder_layers=2)
    a, b, c = model.encode(SEGMENTS)

    # a fresh model, with documents and without, and the encoder off
    assert torch.equal(model(query).logits, plain)
    fresh = model(query, documents=[[a, b], [c]]).logits
    assert torch.equal(fresh, plain)

    check_by_doctor(model)
    open_gates(model)
    if family not in MIXTURES:
        assert torch.equal(model(query, documents=[[a, b, c], []]).logits[1], plain[1])

    with model.encoder_disabled():
        assert torch.equal(model(query).logits, plain)
        assert torch.equal(model.generate(query, max_new_tokens=5, do_sample=False), tokens)
        assert hooks_on(model) == 0
    with_documents = model.generate(query, documents=[[a], []], max_new_tokens=5, do_sample=False)
    assert torch.equal(with_documents[1], tokens[1])
    assert hooks_on(model) == 0


def check_by_doctor(model: CombForCausalLM) -> None:
    """Order, rows alone and beside others, documents from files; with gates open, and closed again."""
    assert [check for check in run_checks(model) if not check.passed] == []
    assert all(block.attention_gate.item() == 0.0 for block in model.cross_blocks)


def test_an_adapter_in_sixteen_bits_rounds_as_they_do() -> None:
    check_by_doctor(CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2, adapter_dtype=torch.bfloat16))


def test_doctor_finds_a_broken_model(model: CombForCausalLM, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = model.encoder.forward  # one that leaks the other segments of its batch into a document
    monkeypatch.setattr(model.encoder, "forward", lambda batch: honest([each + batch[-1][0] for each in batch]))
    failed = {check.name for check in run_checks(model) if not check.passed}
    assert "cached == fresh (file round trip, encoded alone)" in failed


@torch.no_grad()
def test_generation_continues_from_documents_at_every_step(model: CombForCausalLM, query: torch.Tensor) -> None:
    pics = model.encode(SEGMENTS)
    documents = [[pics[0], pics[2]], [pics[1]]]
    generated = model.generate(query, documents=documents, max_new_tokens=6, do_sample=False)
    ids = query
    for _ in range(6):  # the same without a K/V cache
        step = model(ids, documents=documents, use_cache=False).logits[:, -1].argmax(-1)
        ids = torch.cat([ids, step[:, None]], dim=1)
    assert torch.equal(generated[:, : ids.shape[1]], ids[:, : generated.shape[1]])


@torch.no_grad()
def test_left_padded_batch_equals_single_rows(model: CombForCausalLM, query: torch.Tensor) -> None:
    pics = model.encode(SEGMENTS)
    short = query[1, 4:]
    padded = torch.stack([query[0], torch.cat([torch.zeros(4, dtype=torch.long), short])])
    mask = torch.ones_like(padded)
    mask[1, :4] = 0
    batch = model.generate(
        padded, attention_mask=mask, documents=[[pics[0]], [pics[1], pics[2]]], max_new_tokens=5, do_sample=False
    )
    single = model.generate(short[None], documents=[[pics[1], pics[2]]], max_new_tokens=5, do_sample=False)
    count = single.shape[1] - len(short)
    assert torch.equal(batch[1, 9 : 9 + count], single[0, len(short) :])


@torch.no_grad()
def test_beams_and_several_sequences_keep_their_rows(model: CombForCausalLM, query: torch.Tensor) -> None:
    row = model.encode(SEGMENTS)[::2]
    beams: dict[str, Any] = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 4, "do_sample": False}
    both = model.generate(query, documents=[row, []], **beams)
    first = model.generate(query[:1], documents=[row], **beams)
    plain = model.generate(query[1:], **beams)
    assert torch.equal(both[:2, : first.shape[1]], first)
    assert torch.equal(both[2:, : plain.shape[1]], plain)


@torch.no_grad()
def test_sampling_and_streaming(model: CombForCausalLM, query: torch.Tensor) -> None:
    (pic,) = model.encode([SEGMENTS[0]])
    streamer = Mock()
    torch.manual_seed(0)
    out = model.generate(query[:1], documents=[[pic]], max_new_tokens=4, do_sample=True, streamer=streamer)
    assert torch.equal(torch.cat([call.args[0].flatten() for call in streamer.put.call_args_list]), out[0])
    streamer.end.assert_called_once()
    with pytest.raises(ValueError, match="guidance_scale: its pass without the prompt"):
        model.generate(query[:1], documents=[[pic]], max_new_tokens=4, guidance_scale=1.5)
    with pytest.raises(ValueError, match="assistant_early_exit"):
        model.generate(query[:1], documents=[[pic]], max_new_tokens=4, assistant_early_exit=1)
    model.generate(query[:1], max_new_tokens=4, guidance_scale=1.5)


@torch.no_grad()
def test_a_request_without_documents_after_one_with(model: CombForCausalLM, query: torch.Tensor) -> None:
    plain = model(query).logits
    (pic,) = model.encode([SEGMENTS[0]])
    assert not torch.equal(model(query, documents=[[pic], [pic]]).logits, plain)
    assert torch.equal(model(query).logits, plain)
    with pytest.raises(IndexError):  # a failing forward also lets go of its documents
        model(query + 1000, documents=[[pic], [pic]])
    assert hooks_on(model) == 0
    assert torch.equal(model(query).logits, plain)


@torch.no_grad()
def test_threads_see_only_their_own_documents(model: CombForCausalLM, query: torch.Tensor) -> None:
    pics = model.encode(SEGMENTS)
    given = [None, *([[pic], []] for pic in pics)]
    wanted = [model(query, documents=documents).logits for documents in given]

    @torch.no_grad()
    def same(index: int) -> bool:
        found = [model(query, documents=given[index]).logits for _ in range(10)]
        return all(torch.equal(logits, wanted[index]) for logits in found)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(same, [*range(4)] * 2))
    assert hooks_on(model) == 0


@torch.no_grad()
def test_nested_models_keep_their_documents_apart(query: torch.Tensor) -> None:
    left = open_gates(CombForCausalLM.from_backbone(tiny("llama"), num_encoder_layers=2))
    right = open_gates(CombForCausalLM.from_backbone(tiny("llama", seed=3), num_encoder_layers=2))
    wanted = right(query, documents=[right.encode([SEGMENTS[1]])] * 2).logits
    with left.linked([left.encode([SEGMENTS[0]])] * 2):
        assert torch.equal(right(query, documents=[right.encode([SEGMENTS[1]])] * 2).logits, wanted)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_copies_are_independent(model: CombForCausalLM, query: torch.Tensor, copied: Any) -> None:
    twin = copied(model)
    with torch.no_grad():
        documents = [model.encode([SEGMENTS[0]]), []]
        assert torch.equal(twin(query, documents=documents).logits, model(query, documents=documents).logits)
        twin.cross_blocks[0].attention_gate.fill_(-2.0)
        assert not torch.equal(twin(query, documents=documents).logits, model(query, documents=documents).logits)


@torch.no_grad()
def test_a_compiled_model_never_answers_without_its_documents(model: CombForCausalLM, query: torch.Tensor) -> None:
    documents = [model.encode([SEGMENTS[0]]), []]
    wanted = model(query, documents=documents).logits
    model.backbone.compile(backend="eager")

    def check(run: Callable[[], torch.Tensor]) -> None:
        # but in torch 2.14, what was compiled without hooks is not asked whether there are some
        refused = Version(torch.__version__).release[:2] != (2, 14)
        with pytest.raises(RuntimeError, match="documents were not read") if refused else nullcontext():
            torch.testing.assert_close(run(), wanted[:, -1], rtol=1e-5, atol=1e-5)

    model(query)  # compiled now, without hooks
    check(lambda: model(query, documents=documents).logits[:, -1])
    torch._dynamo.reset()
    asked: Any = {"max_new_tokens": 4, "output_logits": True, "return_dict_in_generate": True}
    model.generate(query, **asked)
    check(lambda: model.generate(query, documents=documents, **asked).logits[0])
    torch._dynamo.reset()
    with torch._dynamo.config.patch(skip_nnmodule_hook_guards=False):  # what the message says helps
        model(query)
        torch.testing.assert_close(model(query, documents=documents).logits, wanted, rtol=1e-5, atol=1e-6)
    torch._dynamo.reset()


@torch.no_grad()
def test_the_switch_belongs_to_a_thread(model: CombForCausalLM, query: torch.Tensor) -> None:
    documents = [model.encode([SEGMENTS[0]]), []]
    wanted = model(query, documents=documents).logits
    with model.encoder_disabled(), ThreadPoolExecutor(1) as pool:
        assert not model.encoder_enabled
        assert torch.equal(pool.submit(model, query, documents=documents).result().logits, wanted)


def test_what_transformers_and_peft_ask_of_a_model(
    model: CombForCausalLM, query: torch.Tensor, capsys: pytest.CaptureFixture[str]
) -> None:
    model.generation_config = tf.GenerationConfig(max_new_tokens=3, eos_token_id=None)
    assert model.backbone.generation_config.max_new_tokens == 3
    assert model.generate(query).shape[1] == query.shape[1] + 3
    model.print_trainable_parameters()
    trainable = sum(p.numel() for p in [*model.encoder.parameters(), *model.cross_blocks.parameters()])
    assert f"trainable params: {trainable:,d}" in capsys.readouterr().out
    assert not any(p.requires_grad for p in model.backbone.parameters())
    for name in ("disable_adapters", "enable_adapters", "set_adapter", "active_adapters", "add_adapter"):
        with pytest.raises(ValueError, match=r"model\.backbone\..*encoder=False"):
            getattr(model, name)()
    with pytest.raises(ValueError, match="adapter on a backbone already"):
        CombForCausalLM.from_backbone(model)
    with pytest.raises(ValueError, match=r"before CombForCausalLM\.from_backbone"):
        model.resize_token_embeddings(200)


@torch.no_grad()
def test_pipeline() -> None:
    backbone = byte_llama(**{**BASE, "vocab_size": 300})
    comb = CombForCausalLM.from_backbone(backbone, num_encoder_layers=1)
    options = {"max_new_tokens": 4, "do_sample": False, "return_tensors": True}
    tokenizer = byte_tokenizer()
    ours = tf.pipeline("text-generation", model=comb, tokenizer=tokenizer)("hello", **options)
    plain = tf.pipeline("text-generation", model=backbone, tokenizer=tokenizer)("hello", **options)
    assert ours == plain


def test_a_fingerprint_covers_all_weights_and_outlives_an_upgrade(model: CombForCausalLM, query: torch.Tensor) -> None:
    before = model.fingerprint
    model.encoder.config.transformers_version = "9.9.9"
    forget_identity(model)
    assert model.fingerprint == before
    (pic,) = model.encode([SEGMENTS[0]])
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(1.01)
    assert model.fingerprint != before
    with pytest.raises(ValueError, match="compiled by another model or adapter"):
        model(query, documents=[[pic], []])


# --- bad input ---------------------------------------------------------------------------------------------


def test_documents_while_the_encoder_is_off(model: CombForCausalLM, query: torch.Tensor) -> None:
    pics = model.encode(SEGMENTS[:1])
    with model.disable_adapter():  # `encoder_disabled`, as peft calls it
        with pytest.raises(ValueError, match="encoder is disabled"):
            model(query, documents=[pics, []])
        model(query, documents=[[], []])


@pytest.mark.parametrize(
    "documents", ["text", [[8, 9]], [["text"], []], [[None], []], [[torch.ones(2, 2)], []], [[[1.5]], []], ["ab", "cd"]]
)
def test_documents_nested_wrongly(model: CombForCausalLM, query: torch.Tensor, documents: Any) -> None:
    with pytest.raises(ValueError, match=r"one list per row|flat list of token ids|lists for 2 rows"):
        model(query, documents=documents)
    (pic,) = model.encode([SEGMENTS[0]])
    with pytest.raises(ValueError, match=r"write documents=\[\[\.\.\.\]\]"):
        model(query, documents=[pic, pic])
    with pytest.raises(ValueError, match="flat list of token ids"):
        model.encode([8, 9])


def test_one_list_of_documents_per_row(model: CombForCausalLM, query: torch.Tensor) -> None:
    documents = [model.encode([SEGMENTS[0]]), []]
    for call in (model, model.generate):
        with pytest.raises(ValueError, match="1 lists for 2 rows"):
            call(query, documents=documents[:1])
    embedded = model.get_input_embeddings()(query.repeat(2, 1))  # embeddings have rows too
    with pytest.raises(ValueError, match="2 lists for 4 rows"):
        model.generate(inputs_embeds=embedded, documents=documents, max_new_tokens=2)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "bfloat16", "revision": "main"}, "dtype, revision can't apply to a backbone that is loaded"),
        ({"max_document_tokens": 0}, "max_document_tokens must be at least 1"),
        ({"cross_attention_layers": []}, "names no layer that reads documents"),
        ({"cross_attention_layers": [-1]}, "must ascend from 0"),
        ({"cross_attention_layers": [1, 4]}, "exceed the backbone's 4 layers"),
        ({"cross_attention_layers": [1, 1]}, "without repeats"),
        ({"num_encoder_layers": 0}, "num_encoder_layers"),
        ({"initialization": "zeros"}, "'backbone' or 'first' or 'random'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CombForCausalLM.from_backbone(tiny("llama"), **{"num_encoder_layers": 2, **options})


@pytest.mark.parametrize(
    ("segment", "message"),
    [([], "empty document"), (list(range(3, 120)) * 3, "longer than the encoder's 256"), ([5, 128], "token id 128"),
     ([-1, 5], "document holds token id -1")],
)  # fmt: skip
def test_segments_that_cannot_be_encoded(model: CombForCausalLM, segment: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model.encode([[5, 6], segment])


# --- options -----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_first_layers_give_blocks_what_the_backbone_has_of_a_document_alone() -> None:
    backbone = tiny("llama")
    options: dict[str, Any] = {"cross_attention_layers": [1, 2, 3], "encoder_causal": True, "initialization": "first"}
    model = CombForCausalLM.from_backbone(backbone, num_encoder_layers=2, **options)
    assert model.config.cross_encoder_layers == [0, 1, 1]
    (pic,) = model.encode([SEGMENTS[0]])
    states = backbone(torch.tensor([SEGMENTS[0]]), output_hidden_states=True).hidden_states
    same = []
    for place, layer in enumerate(model.config.cross_attention_layers):
        block = backbone.model.layers[layer]
        values = block.self_attn.v_proj(block.input_layernorm(states[layer]))[0].view_as(pic.values[place])
        same.append(torch.allclose(pic.values[place], values, atol=1e-5))
    assert same == [True, True, False]  # the third is deeper than the encoder
    with pytest.raises(ValueError, match="4 layers, of which 5 can't be"):
        CombForCausalLM.from_backbone(backbone, num_encoder_layers=5, **options)


@torch.no_grad()
def test_random_initialisation_has_no_trace_of_the_backbone(query: torch.Tensor) -> None:
    backbone = tiny("llama")
    model = CombForCausalLM.from_backbone(backbone, num_encoder_layers=2, initialization="random")
    theirs = {parameter.detach().sum().item() for parameter in backbone.model.layers.parameters() if parameter.ndim > 1}
    ours = {parameter.detach().sum().item() for parameter in model.encoder.parameters() if parameter.ndim > 1}
    assert not theirs & ours
    assert torch.equal(model(query, documents=[model.encode([SEGMENTS[0]]), []]).logits, backbone(query).logits)


@torch.no_grad()
def test_adapter_in_float32_on_a_bf16_backbone(query: torch.Tensor) -> None:
    backbone = tiny("llama").bfloat16()
    model = open_gates(CombForCausalLM.from_backbone(backbone, num_encoder_layers=2, adapter_dtype=torch.float32))
    (pic,) = model.encode([SEGMENTS[0]])
    assert pic.keys.dtype == torch.float32
    linked = model(query, documents=[[pic], []]).logits
    assert linked.dtype == torch.bfloat16
    assert torch.equal(linked[1], backbone(query).logits[1])


@pytest.mark.parametrize("implementation", ["eager", "sdpa", "flex_attention"])
@torch.no_grad()
def test_attention_implementations_agree(implementation: str, query: torch.Tensor) -> None:
    def logits(name: str, causal: bool) -> torch.Tensor:
        torch.manual_seed(1)
        backbone = tiny("llama")
        model = open_gates(CombForCausalLM.from_backbone(backbone, num_encoder_layers=2, encoder_causal=causal))
        model.config._attn_implementation = name
        pics = model.encode(SEGMENTS)
        backbone.config._attn_implementation = "sdpa"
        return model(query, documents=[pics[:2], pics[2:]]).logits

    for causal in (False, True):
        torch.testing.assert_close(logits(implementation, causal), logits("sdpa", causal), rtol=1e-5, atol=1e-6)
    assert not torch.equal(logits("sdpa", False), logits("sdpa", True))


def test_works_on_an_untied_backbone_with_scaled_embeddings() -> None:
    config = tf.GraniteConfig(**BASE, embedding_multiplier=3.0, tie_word_embeddings=False)
    model = CombForCausalLM.from_backbone(tf.AutoModelForCausalLM.from_config(config).eval(), num_encoder_layers=1)
    expected = model.backbone.get_input_embeddings()(torch.tensor([5, 6])) * 3.0
    torch.testing.assert_close(model._embed([(5, 6)])[0], expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_meta_device_has_the_same_parameters(family: str) -> None:
    """Parameter counts need no weights: the same names, shapes, dtypes and settings come out."""

    def built(device: str) -> tuple[dict[str, Any], dict[str, Any]]:
        with torch.device(device):
            backbone = tf.AutoModelForCausalLM.from_config(FAMILIES[family]())
            model = CombForCausalLM.from_backbone(backbone, num_encoder_layers=2)
        assert {parameter.device.type for parameter in model.parameters()} == {device}
        parameters = {name: (p.shape, p.dtype, p.requires_grad) for name, p in model.named_parameters()}
        return parameters, model.config.encoder_config.to_dict()

    assert built("meta") == built("cpu")
