"""Models that go their own ways: linked rightly or refused in a line; and models with few positions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as tf

from comb import CombForCausalLM, PICEngine, methods
from comb.cli.doctor import check_methods, run_checks
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import random_of, tiny

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
DOCUMENTS, QUERY, PREFIX = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15]], [20, 21, 22], [3, 4]
PROMPT = torch.tensor([[*PREFIX, *DOCUMENTS[0], *DOCUMENTS[1], *QUERY]])


POSITIONS = {**SMALL, "max_position_embeddings": 128}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
OTHERS: dict[str, dict[str, Any]] = {
    "ModernBertDecoder": {**POSITIONS, **SPECIAL, "cls_token_id": 1, "sep_token_id": 2},
    "Doge": {**POSITIONS, "num_key_value_heads": 2},
    "CpmAnt": {
        **SMALL, "dim_head": 8, "dim_ff": 48, "prompt_types": 2, "prompt_length": 4, "position_bias_num_buckets": 16,
    },
    "ProphetNet": {
        "vocab_size": 96, "hidden_size": 32, "num_encoder_layers": 1, "max_position_embeddings": 128,
        "decoder_ffn_dim": 48, "num_decoder_layers": 2, "num_decoder_attention_heads": 4,
        "is_decoder": True, "is_encoder_decoder": False,
    },
    "Whisper": {
        **SPECIAL, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48, "decoder_start_token_id": 1, "max_target_positions": 64,
    },
    # its cache has a window that its attention doesn't have
    "Moshi": {**SMALL, "num_key_value_heads": 4, "head_dim": 8, "sliding_window": 8, "ffn_dim": 64},
    # its cache has as many layers as the encoder that it doesn't have
    "Bart": {
        "vocab_size": 96, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "decoder_attention_heads": 4,
        "encoder_attention_heads": 4, "decoder_ffn_dim": 48,
    },
    # `generate` puts a token of its own behind the prompt
    "XLM": {
        "vocab_size": 96, "emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True, "use_lang_emb": False,
        "n_langs": 1,
    },
    **{
        kind: {**POSITIONS, "vocab_size": 260, "is_decoder": True, "pad_token_id": 1, "eos_token_id": 256}
        for kind in ("Roberta", "XLMRoberta", "Camembert", "Data2VecText")
    },
    **{
        kind: {**POSITIONS, "ffn_dim": 48, "word_embed_proj_dim": 32, "d_model": 32}
        for kind in ("CTRL", "BioGpt", "XGLM")
    },
}  # fmt: skip


def made(kind: str) -> Any:
    return random_of(getattr(tf, f"{kind}Config")(**OTHERS[kind]), std=0.15)


@pytest.mark.parametrize("kind", ["ModernBertDecoder", "Doge"])
@pytest.mark.parametrize("spec", ["prefix", "legolink:99", "cacheblend:1.0"])
def test_everything_recomputed_is_the_models_own_pass(kind: str, spec: str) -> None:
    model = made(kind)
    method = methods.create(spec, model)
    with torch.no_grad():
        own = model(input_ids=PROMPT).logits[0, -1]
    state = method.link(method.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX)
    assert float((state.logits[0] - own).abs().max() / own.abs().max()) < 1e-4


def test_what_a_question_looks_at_is_seen_under_a_mask_for_each_head() -> None:
    method = methods.create("focus:0.3", made("Doge"))
    assert method.link(method.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX).recomputed_tokens > 0


@pytest.mark.parametrize(
    ("kind", "spec", "reason"),
    [
        ("CpmAnt", "naive", "more tokens into its cache|doesn't go on from a cache"),
        ("CpmAnt", "prefix", "more tokens into its cache|doesn't go on from a cache"),
        ("ProphetNet", "prefix", "doesn't go on from a cache"),
        ("Moshi", "prefix", "doesn't go on from a cache"),
        ("Moshi", "naive", "doesn't go on from a cache"),
        ("Whisper", "naive", "no rotary embedding explains"),
        # what generate does not do as the model does
        ("Bart", "full", "doesn't run"),
        ("XLM", "full", "other tokens"),
    ],
)
def test_what_does_not_work_is_refused_in_a_line(kind: str, spec: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        methods.create(spec, made(kind))
    assert "\n" not in str(refusal.value)


# --- few positions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("positions", [64, 512, 1024])
@pytest.mark.parametrize("window", [None, 16])
def test_documents_stand_behind_a_passage_that_leaves_them_half(positions: int, window: int | None) -> None:
    sizes = {**SMALL, "vocab_size": 260, "max_position_embeddings": positions, "num_key_value_heads": 4}
    model = tf.MistralForCausalLM(tf.MistralConfig(**sizes, sliding_window=window)).eval()
    engine = PICEngine(model, byte_tokenizer(), method="primed")
    assert len(engine.method.compiled_behind) == positions // 2  # of 519 bytes
    assert engine.ask("Who?", ["Ida lives in Rome."], max_new_tokens=2).report.documents[0].state == "compiled"
    shorter = methods.create("primed", model, front=engine.method.compiled_behind[:-1])
    assert shorter.fingerprint != engine.method.fingerprint


@pytest.mark.parametrize("spec", ["primed", "naive", "prefix", "full"])
@pytest.mark.parametrize(
    "make", [lambda: byte_llama(max_position_embeddings=64), lambda: tiny("mpt", vocab_size=260, max_seq_len=64)]
)
def test_what_does_not_fit_is_refused_before_anything_is_computed(make: Any, spec: str) -> None:
    engine = PICEngine(make(), byte_tokenizer(), method=spec)
    passes: list[int] = []
    engine.method.backbone.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    for question, documents in (("Who? " * 12, ["Ida lives in Rome."]), ("Who?", ["Ida lives in Rome. " * 4])):
        with pytest.raises(ValueError, match=r"64 positions|at most \d+ at once"):
            engine.ask(question, documents)
    assert passes == []


@pytest.mark.parametrize("positions", [64, 512])
def test_the_doctor_passes_a_backbone_of_few_positions(positions: int, tmp_path: Path) -> None:
    byte_llama(max_position_embeddings=positions).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = CombForCausalLM.from_backbone(tmp_path)
    assert [check.name for check in run_checks(model) if not check.passed] == []
    assert [each.method for each in check_methods(model, ["primed", "naive", "legolink-0"]) if not each.passed] == []


@pytest.mark.parametrize("spec", ["full", "prefix", "naive", "legolink:2"])
@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert", "Data2VecText"])
def test_positions_that_generate_numbers_otherwise_than_the_model_are_refused(kind: str, spec: str) -> None:
    with pytest.raises(ValueError, match=r"other positions|change with the position|no rotary") as refusal:
        PICEngine(made(kind), byte_tokenizer(), method=spec)
    assert "\n" not in str(refusal.value)
    if spec == "full":
        assert f"{kind}ForCausalLM" in str(refusal.value)


@pytest.mark.filterwarnings("ignore:.*deprecated")
def test_activations_that_are_quantised_by_pass_are_asked_whole_and_not_linked() -> None:
    """Each token's result depends on which tokens are in a pass beside it."""
    model = torch.ao.quantization.quantize_dynamic(byte_llama(hidden_size=64), {torch.nn.Linear}, dtype=torch.qint8)
    engine = PICEngine(model, byte_tokenizer(), method="full")
    asked: Any = ("How deep is it?", ["The lake is deep."])
    ids = engine.tokenizer.apply_chat_template(
        [{"role": "user", "content": "The lake is deep.\n\nHow deep is it?"}], add_generation_prompt=True,
        return_tensors="pt", return_dict=True,
    )  # fmt: skip
    own = model.generate(**ids, max_new_tokens=8, min_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1] :]
    for answer in (engine.ask(*asked, max_new_tokens=8, min_new_tokens=8),
                   engine.ask_batch([asked, asked], max_new_tokens=8, min_new_tokens=8)[1]):  # fmt: skip
        assert list(answer.token_ids) == own.tolist()
    for spec in ("naive", "prefix"):
        with pytest.raises(ValueError, match=r"doesn't go on from a cache .*its layers quantise what they are given"):
            PICEngine(model, byte_tokenizer(), method=spec)


@pytest.mark.parametrize("kind", ["CTRL", "BioGpt", "XGLM"])
def test_positions_of_other_kinds_are_the_models_own(kind: str) -> None:
    """Offsets, ALiBi, tables of sines: the first token and those behind it."""
    model = made(kind)
    for spec in ("full", "prefix"):
        method = methods.create(spec, model)
        state = method.link(method.compile(DOCUMENTS), QUERY, prefix_ids=PREFIX)
        answer, logits = state.generate_with_logits(max_new_tokens=4, min_new_tokens=4, do_sample=False)
        with torch.no_grad():
            own = model(input_ids=torch.cat([PROMPT, torch.tensor([answer[:-1]])], dim=1)).logits[0, -4:]
        assert float((logits - own).abs().max() / own.abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["stop_strings", "num_return_sequences"])
def test_a_models_own_generation_settings_dont_keep_it_from_being_asked(name: str) -> None:
    model = byte_llama()
    more: dict[str, Any] = {"stop_strings": {"stop_strings": ["W"]}}.get(name, {"do_sample": True, name: 2})
    for key, value in more.items():
        setattr(model.generation_config, key, value)
    engine = PICEngine(model, byte_tokenizer(), method="full")
    assert model.generation_config.to_diff_dict().items() >= more.items()
    if name == "stop_strings":
        assert engine.ask("How deep?", ["The lake is deep."], max_new_tokens=3).text is not None
