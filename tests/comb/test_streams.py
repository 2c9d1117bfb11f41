"""PICEngine: settings of generation, and streams, whose pieces, joined, are the text of the answer."""

from __future__ import annotations

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizer, PreTrainedTokenizerFast

from comb.engine.engine import PICEngine, UnknownDocumentError
from comb.mac import mac
from tests.helpers.tiny_engine import CITY, LAKE, NEW, QUESTION, Always, Scores, make_backbone, states

END = "</s>"
BYTES = [f"<0x{byte:02X}>" for byte in (*"é猫😀\n".encode(), 0xFF)]
PIECES = ["▁", "▁▁▁", "▁the", "▁cat", "s", ".", "'", "n", "t", "�", "猫", *BYTES]


def fast(model: Any, decoder: Any, **options: Any) -> Any:
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, unk_token="<unk>", **options)


def numbered(*tokens: str) -> dict[str, int]:
    return {token: number for number, token in enumerate(("<unk>", END, "q", *tokens))}


def byte_level() -> Any:
    letters = {ord(c): c for c in "".join(pre_tokenizers.ByteLevel.alphabet())}
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str("  é猫😀\n.'")
    singles = sorted({letter for word, _ in shown for letter in word} | {letters[ord("n")], "t"})
    return fast(models.BPE(numbered(*singles, "Ġthe", "Ġn", "'t", "ĠĠ"), []), decoders.ByteLevel())


def llama() -> Any:
    """As Llama 2's: spaces replaced, bytes fused, one space taken off in front."""
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return fast(models.BPE(numbered(*PIECES), [], unk_token="<unk>", byte_fallback=True), decoders.Sequence(steps))


def metaspace() -> Any:
    steps = [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="always")]
    vocabulary = [(piece, 0.0) for piece in numbered(*PIECES)]
    return fast(models.Unigram(vocabulary, 0, byte_fallback=True), decoders.Sequence(steps))


def wordpiece() -> Any:
    words = numbered("the", "##s", "##'", "do", "not", "n", "'", "t", "n't", "'s", ".", "?", "猫", "cat")
    cleaned = {"clean_up_tokenization_spaces": True}
    return fast(models.WordPiece(words, unk_token="<unk>"), decoders.WordPiece(cleanup=True), **cleaned)


class Words(PreTrainedTokenizer):  # type: ignore[misc]  # transformers is untyped here
    """Written in Python: words between spaces, and bytes."""

    def __init__(self, **options: Any) -> None:
        self.known = numbered("the", "cat", "n", "'", "t", "'t", ".", "", *BYTES)
        super().__init__(eos_token=END, unk_token="<unk>", **options)

    @property
    def vocab_size(self) -> int:
        return len(self.known)

    def get_vocab(self) -> dict[str, int]:
        return {**self.known, **self.added_tokens_encoder}

    def _tokenize(self, text: str, **options: Any) -> list[str]:
        return text.split(" ")

    def _convert_token_to_id(self, token: str) -> int:
        return self.known.get(token, 0)

    def _convert_id_to_token(self, index: int) -> str:
        return list(self.known)[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        written = bytearray()
        for token in tokens:
            written += bytes([int(token[3:5], 16)]) if token in BYTES else f" {token}".encode()
        return written.decode("utf-8", errors="replace").strip()


TOKENIZERS: dict[str, Callable[[], Any]] = {
    "byte-level": byte_level, "llama": llama, "metaspace": metaspace, "wordpiece": wordpiece,
    "python": Words, "python, cleaned up": lambda: Words(clean_up_tokenization_spaces=True),
}  # fmt: skip


@cache
def engine_of(name: str) -> PICEngine:
    tokenizer = TOKENIZERS[name]()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    tokens = {"vocab_size": len(tokenizer), "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": 1}
    return PICEngine(make_backbone(num_key_value_heads=1, **sizes, **tokens), tokenizer, method="full")


def streamed(name: str, token_ids: list[int]) -> list[str]:
    """The pieces of an answer of these tokens, which were checked to be its text."""
    engine = engine_of(name)
    stream = engine.stream("q", max_new_tokens=len(token_ids), logits_processor=[Scores(token_ids)])
    pieces = list(stream)
    assert "".join(pieces) == stream.answer.text == engine.tokenizer.decode(token_ids, skip_special_tokens=True)
    assert all(pieces)
    return pieces


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_joined_are_the_answer(name: str) -> None:
    size = len(engine_of(name).tokenizer)

    @hypothesis.settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @hypothesis.given(st.lists(st.integers(2, size - 1), min_size=1, max_size=9), st.booleans())
    def check(token_ids: list[int], ended: bool) -> None:
        streamed(name, [*token_ids, *([1] if ended else [])])

    check()


@pytest.mark.parametrize(
    ("name", "tokens", "pieces"),
    [
        ("llama", "▁the ▁▁▁ ▁cat s", ["the", "   ", " cat", "s"]),
        ("llama", "▁the <0x0A> ▁▁▁ ▁cat", ["the", "\n   ", " cat"]),
        ("llama", "▁ <0xC3> <0xA9> s", ["és"]),
        # a byte that isn't UTF-8 spoils those in front of it
        ("llama", "▁the <0x0A> <0xFF> s", ["the", "\ufffd\ufffds"]),
        ("byte-level", "Ġthe Ã © Ã", [" the", "é", "\ufffd"]),
        ("byte-level", "ð Ł ĺ Ģ n", ["😀", "n"]),
        ("wordpiece", "do n't the . cat", ["do", "n", "'t", " the.", " cat"]),
    ],
)
def test_pieces_come_as_soon_as_nothing_can_change_them(name: str, tokens: str, pieces: list[str]) -> None:
    known = engine_of(name).tokenizer.get_vocab()
    assert streamed(name, [known[token] for token in tokens.split()]) == pieces


def test_stop_strings_need_no_second_tokenizer_and_stream_their_answer(engine: PICEngine) -> None:
    said = engine.tokenizer.encode(" 猫 é. Stop here")
    for end in ("é. Stop", "é"):
        for settings in ({"stop_strings": [end]}, {"generation_config": GenerationConfig(stop_strings=end)}):
            stream = engine.stream("q", logits_processor=[Scores(said)], max_new_tokens=len(said), **settings)
            assert "".join(stream) == stream.answer.text == " 猫 é. Stop"[: len(" 猫 ") + len(end)]


def test_what_a_closed_stream_gave_is_its_answer() -> None:
    known = engine_of("llama").tokenizer.get_vocab()
    say = Scores([known[token] for token in ("▁the", "<0x0A>")] * 50)
    stream = engine_of("llama").stream("q", max_new_tokens=100, logits_processor=[say])
    first = next(stream)
    stream.close()
    assert first + "".join(stream) == stream.answer.text


def test_a_tokenizer_that_rewrites_what_was_streamed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = PICEngine(engine_of("llama").model, llama(), method="full")
    decode = engine.tokenizer.decode
    turned = lambda ids, **options: decode(ids, **options)[::-1]  # noqa: E731
    monkeypatch.setattr(engine.tokenizer, "decode", turned)
    known = engine.tokenizer.get_vocab()
    say = Scores([known["▁the"], known["▁cat"]])
    stream = engine.stream("q", max_new_tokens=2, logits_processor=[say])
    assert next(stream) == "eht"
    with pytest.raises(RuntimeError, match="has rewritten text that was streamed"):
        next(stream)
    assert stream.answer.text == "tac eht"


# ---- generation settings ----


def test_greedy_is_the_default_whatever_the_model_prefers(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    model = make_backbone()
    greedy = PICEngine(model, tokenizer, method="full").ask(QUESTION, [LAKE], max_new_tokens=NEW)
    sampling = make_backbone()
    sampling.generation_config.update(do_sample=True, temperature=5.0, top_k=200)
    engine = PICEngine(sampling, tokenizer, method="full")
    with caplog.at_level(logging.WARNING):
        assert engine.ask(QUESTION, [LAKE], max_new_tokens=NEW).token_ids == greedy.token_ids
        for settings in ({"temperature": 0}, {"temperature": 0.0, "do_sample": True}, {"do_sample": False}):
            assert engine.ask(QUESTION, [LAKE], max_new_tokens=NEW, **settings).token_ids == greedy.token_ids
    assert not caplog.records
    config = GenerationConfig(max_new_tokens=2)
    assert engine.ask(QUESTION, [LAKE], generation_config=config).token_ids == greedy.token_ids[:2]


def test_sampling_when_it_is_asked_for(engine: PICEngine) -> None:
    def draw(**settings: Any) -> set[tuple[int, ...]]:
        torch.manual_seed(0)
        return {engine.ask(QUESTION, [LAKE], max_new_tokens=NEW, **settings).token_ids for _ in range(4)}

    assert len(draw(temperature=3.0)) > 1
    assert len(draw(do_sample=True, temperature=3.0)) > 1
    assert len(draw(top_k=1)) == 1
    assert len(draw(num_beams=2)) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_new_tokens": 0}, "max_new_tokens must be .* at least 1, got 0"),
        ({"max_new_tokens": True}, "got True"),
        ({"temperature": -1}, "temperature .* got -1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"temperature": "0.7"}, "temperature is a number, not '0.7'"),
        ({"num_beams": 0}, "num_beams=0"),
        ({"num_return_sequences": 2}, "one answer per question"),
        ({"max_new_tokens": 600}, "need 609 positions, the backbone has 512: ask for at most 503"),
        ({"max_new_token": 5}, "max_new_token"),
        ({"max_length": 513}, "the backbone has 512 positions"),
        ({"max_length": 9}, "max_length=9, and the prompt has 9 tokens: ask for more than these"),
        ({"inputs_embeds": torch.ones(1, 3, 32)}, "leave inputs_embeds out"),
        ({"token_healing": True}, "leave token_healing out"),
        ({"penalty_alpha": 0.6, "top_k": 4}, "Contrastive Search requires"),  # transformers' own word
    ],
)
def test_bad_settings(engine: PICEngine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.ask(QUESTION, [LAKE], **settings)


def test_a_longest_text_is_with_its_prompt_whatever_the_model_would_write(tokenizer: Any) -> None:
    model = make_backbone()
    model.generation_config.max_new_tokens = 48
    engine = PICEngine(model, tokenizer, method="naive")
    for settings in ({"max_length": 36}, {"generation_config": GenerationConfig(max_length=36)}):
        answer = engine.ask(QUESTION, [LAKE], min_new_tokens=3, **settings)
        assert answer.report.prompt_tokens + len(answer.token_ids) == 36


@pytest.mark.parametrize("how", ["engine", "conversation"])
def test_a_stream_that_would_wait_for_its_own_reader_is_refused(how: str) -> None:
    engine = engine_of("llama")
    asked = engine if how == "engine" else engine.conversation()
    with mac(make_backbone()):  # another model's
        assert isinstance("".join(asked.stream("q", max_new_tokens=2)), str)
    with mac(engine.method.backbone), pytest.raises(ValueError, match="in another thread"):
        asked.stream("q", max_new_tokens=2)
    assert isinstance("".join(asked.stream("q", max_new_tokens=2)), str)


def test_default_length_stays_within_the_positions(tokenizer: Any) -> None:
    model = make_backbone(max_position_embeddings=40)
    answer = PICEngine(model, tokenizer, method="full").ask("x" * 30)
    assert answer.report.answer_tokens == 10


def test_end_token_of_the_tokenizer_when_the_model_names_none(tokenizer: Any) -> None:
    model = make_backbone(eos_token_id=None)
    assert model.generation_config.eos_token_id is None
    engine = PICEngine(model, tokenizer, method="full")
    answer = engine.ask(QUESTION, max_new_tokens=NEW, logits_processor=[Always(257)])
    assert (answer.token_ids, answer.text) == ((257,), "")


def test_caller_keeps_their_own_stopping_criteria_and_streamer(engine: PICEngine) -> None:
    stopping = [lambda ids, scores, **_: torch.full((len(ids),), ids.shape[1] >= len(QUESTION) + 2)]
    assert len(engine.ask(QUESTION, [LAKE], max_new_tokens=NEW, stopping_criteria=stopping).token_ids) == 2
    assert len(stopping) == 1


# ---- streams ----


def test_stream_gives_the_answer_in_pieces(engine: PICEngine) -> None:
    space = Always(engine.tokenizer.encode(" ")[0])
    stream = engine.stream(QUESTION, [LAKE, CITY], max_new_tokens=NEW, logits_processor=[space])
    pieces = list(stream)
    assert pieces == [" "] * NEW
    assert stream.answer.text == " " * NEW
    assert states(stream) == ["compiled", "compiled"]
    assert 0 < stream.report.ttft_s < stream.report.total_s
    assert list(stream) == []
    free = engine.stream(QUESTION, [LAKE, CITY], max_new_tokens=40)
    text = "".join(free)
    assert text == free.answer.text == engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=40).text


def test_first_piece_comes_before_the_last_token(engine: PICEngine) -> None:
    gate = threading.Event()
    held = Always(engine.tokenizer.encode(" ")[0], lambda: held.steps < 3 or gate.wait(10))
    stream = engine.stream(QUESTION, [LAKE], max_new_tokens=NEW, logits_processor=[held])
    assert next(stream) == " "
    with pytest.raises(RuntimeError, match="no answer: this stream is running"):
        _ = stream.report
    gate.set()
    assert len(list(stream)) == NEW - 1


def test_stream_errors_reach_the_reader(engine: PICEngine) -> None:
    def fail() -> None:
        if space.steps == 3:
            raise OSError("disk on fire")

    space = Always(engine.tokenizer.encode(" ")[0], fail)
    stream = engine.stream(QUESTION, [LAKE], max_new_tokens=NEW, logits_processor=[space])
    pieces: list[str] = []
    with pytest.raises(OSError, match="disk on fire"):
        deque(map(pieces.append, stream))
    assert pieces == [" ", " "]
    assert list(stream) == []
    with pytest.raises(RuntimeError):
        _ = stream.answer
    with pytest.raises(UnknownDocumentError):
        engine.stream(QUESTION, document_ids=["nope"])
    with pytest.raises(ValueError, match="streamer"):
        engine.stream(QUESTION, streamer=object())


@pytest.mark.parametrize("how", ["close", "with", "drop"])
def test_an_abandoned_stream_stops_and_gives_back(engine: PICEngine, how: str) -> None:
    space = Always(engine.tokenizer.encode(" ")[0], lambda: time.sleep(0.002))
    stream = engine.stream(QUESTION, [LAKE], max_new_tokens=500, logits_processor=[space])
    assert next(stream) == " "
    assert engine.store.stats().in_use == 1
    if how == "close":
        stream.close()
        assert 0 < stream.report.answer_tokens < 500
    elif how == "with":
        with stream:
            next(stream)
    del stream
    gc.collect()
    deadline = time.monotonic() + 10
    while engine.store.stats().in_use and time.monotonic() < deadline:
        time.sleep(0.005)
    assert engine.store.stats().in_use == 0
    assert space.steps < 500
