"""Streams: their pieces, joined, are the answer's text, whatever a tokenizer does with what stands beside a token."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LogitsProcessor, PreTrainedTokenizer, PreTrainedTokenizerFast

from comb.engine.engine import PICEngine
from tests.helpers.tiny_engine import make_backbone

pytestmark = pytest.mark.usefixtures("one_thread")

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


class Say(LogitsProcessor):
    """Makes generation give these tokens."""

    def __init__(self, token_ids: list[int]) -> None:
        self.rest = iter(token_ids)

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, -torch.inf).index_fill(1, torch.tensor([next(self.rest)]), 0.0)


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
    stream = engine.stream("q", max_new_tokens=len(token_ids), logits_processor=[Say(token_ids)])
    pieces = list(stream)
    assert "".join(pieces) == stream.answer.text == engine.tokenizer.decode(token_ids, skip_special_tokens=True)
    assert all(pieces)
    return pieces


@pytest.mark.parametrize("name", TOKENIZERS)
def test_pieces_joined_are_the_answer(name: str) -> None:
    size = len(engine_of(name).tokenizer)

    @settings(max_examples=40, deadline=None, database=None, derandomize=True)
    @given(st.lists(st.integers(2, size - 1), min_size=1, max_size=9), st.booleans())
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


def test_stop_strings_stream_their_answer(engine: PICEngine) -> None:
    said = engine.tokenizer.encode(" 猫 é. Stop here")
    for end in ("é. Stop", "é"):
        stream = engine.stream("q", logits_processor=[Say(said)], stop_strings=[end])
        assert "".join(stream) == stream.answer.text == " 猫 é. Stop"[: len(" 猫 ") + len(end)]


def test_conversations_stream_their_answers() -> None:
    known = engine_of("llama").tokenizer.get_vocab()
    said = [known[token] for token in ("▁the", "<0x0A>", "▁▁▁", "▁cat", "s", "<0xC3>")]
    chat = engine_of("llama").conversation()
    for _ in range(2):
        turn = chat.stream("q", max_new_tokens=len(said), logits_processor=[Say(said)])
        assert "".join(turn) == turn.answer.text == "the\n    cats\ufffd"


def test_what_a_closed_stream_gave_is_its_answer() -> None:
    known = engine_of("llama").tokenizer.get_vocab()
    say = Say([known[token] for token in ("▁the", "<0x0A>")] * 50)
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
    say = Say([known["▁the"], known["▁cat"]])
    stream = engine.stream("q", max_new_tokens=2, logits_processor=[say])
    assert next(stream) == "eht"
    with pytest.raises(RuntimeError, match="has rewritten text that was streamed"):
        next(stream)
    assert stream.answer.text == "tac eht"
