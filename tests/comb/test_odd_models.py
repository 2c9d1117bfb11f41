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

SMALL = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4}
DOCUMENTS, QUERY, HEAD = [[5, 6, 7, 8, 9, 10, 11], [12, 13, 14, 15]], [20, 21, 22], [3, 4]
PROMPT = torch.tensor([[*HEAD, *DOCUMENTS[0], *DOCUMENTS[1], *QUERY]])


def made(model: str, config: str, **changes: Any) -> Any:
    torch.manual_seed(0)
    found = getattr(tf, model)(getattr(tf, config)(**changes)).eval()
    for parameter in found.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.15)
    return found


def modernbert() -> Any:
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}
    return made(
        "ModernBertDecoderForCausalLM", "ModernBertDecoderConfig", **SMALL, max_position_embeddings=128, **special
    )


def doge() -> Any:
    return made("DogeForCausalLM", "DogeConfig", **SMALL, num_key_value_heads=2, max_position_embeddings=128)


def cpmant() -> Any:
    sizes = {"dim_head": 8, "dim_ff": 48, "prompt_types": 2, "prompt_length": 4, "position_bias_num_buckets": 16}
    return made("CpmAntForCausalLM", "CpmAntConfig", **SMALL, **sizes)


def prophetnet() -> Any:
    sizes = {"decoder_ffn_dim": 48, "num_decoder_layers": 2, "num_decoder_attention_heads": 4}
    sizes |= {"vocab_size": 96, "hidden_size": 32, "num_encoder_layers": 1, "max_position_embeddings": 128}
    return made("ProphetNetForCausalLM", "ProphetNetConfig", **sizes, is_decoder=True, is_encoder_decoder=False)


def whisper() -> Any:
    sizes = {
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "decoder_attention_heads": 4,
        "decoder_ffn_dim": 48,
    }
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return made("WhisperForCausalLM", "WhisperConfig", max_target_positions=64, **sizes, **special)


def moshi() -> Any:
    """Its cache has a window that its attention doesn't have."""
    return made(
        "MoshiForCausalLM", "MoshiConfig", **SMALL, num_key_value_heads=4, head_dim=8, sliding_window=8, ffn_dim=64
    )


def mpt(positions: int = 64) -> Any:
    sizes = {"vocab_size": 260, "d_model": 32, "n_layers": 2, "n_heads": 4, "max_seq_len": positions}
    torch.manual_seed(0)
    return tf.MptForCausalLM(tf.MptConfig(**sizes, eos_token_id=256)).eval()


@pytest.mark.parametrize("make", [modernbert, doge])
@pytest.mark.parametrize("spec", ["prefix", "legolink:99", "cacheblend:1.0"])
def test_everything_recomputed_is_the_models_own_pass(make: Any, spec: str) -> None:
    model = make()
    method = methods.create(spec, model)
    with torch.no_grad():
        own = model(input_ids=PROMPT).logits[0, -1]
    state = method.link(method.compile(DOCUMENTS), QUERY, head_ids=HEAD)
    assert float((state.logits[0] - own).abs().max() / own.abs().max()) < 1e-4


def test_what_a_question_looks_at_is_seen_under_a_mask_for_each_head() -> None:
    model = doge()
    method = methods.create("focus:0.3", model)
    assert method.link(method.compile(DOCUMENTS), QUERY, head_ids=HEAD).recomputed_tokens > 0


@pytest.mark.parametrize(
    ("make", "spec", "reason"),
    [
        (cpmant, "naive", "more tokens into its cache|doesn't go on from a cache"),
        (cpmant, "prefix", "more tokens into its cache|doesn't go on from a cache"),
        (prophetnet, "prefix", "doesn't go on from a cache"),
        (moshi, "prefix", "doesn't go on from a cache"),
        (moshi, "naive", "doesn't go on from a cache"),
        (whisper, "naive", "no rotary embedding explains"),
    ],
)
def test_what_does_not_work_is_refused_in_a_line(make: Any, spec: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason) as refusal:
        methods.create(spec, make())
    assert "\n" not in str(refusal.value)


# --- few positions ---------------------------------------------------------------------------------------------------


def passes_of(engine: Any) -> list[int]:
    """A list that gets an entry for every pass from now on."""
    passes: list[int] = []
    engine.method.backbone.get_input_embeddings().register_forward_hook(lambda *_: passes.append(1))
    return passes


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
@pytest.mark.parametrize("make", [lambda: byte_llama(max_position_embeddings=64), mpt])
def test_what_does_not_fit_is_refused_before_anything_is_computed(make: Any, spec: str) -> None:
    engine = PICEngine(make(), byte_tokenizer(), method=spec)
    passes = passes_of(engine)
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


def encoder_decoder_part() -> Any:
    """Its cache has as many layers as the encoder that it doesn't have."""
    sizes = {"d_model": 32, "decoder_attention_heads": 4, "encoder_attention_heads": 4, "decoder_ffn_dim": 48}
    return made("BartForCausalLM", "BartConfig", vocab_size=96, encoder_layers=1, decoder_layers=2, **sizes)


def behind_padding(kind: str) -> Any:
    sizes = {**SMALL, "vocab_size": 260, "max_position_embeddings": 128, "is_decoder": True, "pad_token_id": 1}
    return made(f"{kind}ForCausalLM", f"{kind}Config", **sizes, eos_token_id=256)


def with_mask_token() -> Any:
    """`generate` puts a token of its own behind the prompt."""
    sizes = {"emb_dim": 32, "n_layers": 2, "n_heads": 4, "causal": True, "use_lang_emb": False, "n_langs": 1}
    return made("XLMWithLMHeadModel", "XLMConfig", vocab_size=96, **sizes)


@pytest.mark.parametrize("spec", ["full", "prefix", "naive", "legolink:2"])
@pytest.mark.parametrize("kind", ["Roberta", "XLMRoberta", "Camembert", "Data2VecText"])
def test_positions_that_generate_numbers_otherwise_than_the_model_are_refused(kind: str, spec: str) -> None:
    with pytest.raises(ValueError, match=r"other positions|change with the position|no rotary") as refusal:
        PICEngine(behind_padding(kind), byte_tokenizer(), method=spec)
    assert "\n" not in str(refusal.value)
    if spec == "full":
        assert f"{kind}ForCausalLM" in str(refusal.value)


@pytest.mark.parametrize(("make", "reason"), [(encoder_decoder_part, "doesn't run"), (with_mask_token, "other tokens")])
def test_what_generate_does_not_do_as_the_model_does_is_refused(make: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        methods.create("full", make())


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


@pytest.mark.parametrize("kind", ["OPT", "Bloom", "CTRLLMHead", "BioGpt", "XGLM", "GPT2LMHead"])
def test_positions_of_other_kinds_are_the_models_own(kind: str) -> None:
    """Offsets, ALiBi, tables of sines: the first token and those behind it."""
    sizes = {**SMALL, "max_position_embeddings": 128, "ffn_dim": 48, "word_embed_proj_dim": 32, "d_model": 32}
    if kind == "GPT2LMHead":
        sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 4}
    model = made(f"{kind}{'' if 'LMHead' in kind else 'ForCausalLM'}{'Model' if 'LMHead' in kind else ''}",
                 f"{kind.removesuffix('LMHead')}Config", **sizes)  # fmt: skip
    for spec in ("full", "prefix"):
        method = methods.create(spec, model)
        state = method.link(method.compile(DOCUMENTS), QUERY, head_ids=HEAD)
        answer, logits = state.generate_with_logits(max_new_tokens=4, min_new_tokens=4, do_sample=False)
        with torch.no_grad():
            own = model(input_ids=torch.cat([PROMPT, torch.tensor([answer[:-1]])], dim=1)).logits[0, -4:]
        assert float((logits - own).abs().max() / own.abs().max()) < 1e-4


@pytest.mark.parametrize("name", ["stop_strings", "num_return_sequences"])
def test_a_models_own_generation_settings_dont_keep_it_from_being_asked(name: str, tmp_path: Path) -> None:
    model = byte_llama()
    more: dict[str, Any] = {"stop_strings": {"stop_strings": ["W"]}}.get(name, {"do_sample": True, name: 2})
    for key, value in more.items():
        setattr(model.generation_config, key, value)
    engine = PICEngine(model, byte_tokenizer(), method="full")
    assert model.generation_config.to_diff_dict().items() >= more.items()
    if name == "stop_strings":
        assert engine.ask("How deep?", ["The lake is deep."], max_new_tokens=3).text is not None
