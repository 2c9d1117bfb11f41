"""The prompt is the template's: token for token what `apply_chat_template` gives, with documents and without."""

from __future__ import annotations

import datetime
import json
import time
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

from comb import PromptBuilder
from comb.backbones.tokenizer import load_tokenizer, set_template_defaults
from comb.documents.messages import Generated
from comb.documents.rendering import template_arguments
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.chat_templates import MADE_UP, REFUSED, shipped

TEMPLATES = {**MADE_UP, **shipped()}
DOCUMENT = " The lake is <|end|> 12 m deep.</think>"
MIDNIGHT = datetime.datetime(2024, 2, 29, 23, 59, 59)

WORDS = ["Hi", " ", "\n", "<think>", "</think>", "/no_think", '"', "{x}", "é", "12", "<|end|>", "<|user|>", "/"]
words = st.lists(st.sampled_from(WORDS), max_size=6).map("".join)


@st.composite
def chats(draw: Any) -> list[dict[str, Any]]:
    """Questions and answers that follow each other, perhaps behind a system text, with a tool's answer."""
    chat: list[dict[str, Any]] = [{"role": "system", "content": draw(words)}] if draw(st.booleans()) else []
    for turn in range(draw(st.integers(0, 2))):
        chat += [{"role": "user", "content": draw(words)}, {"role": "assistant", "content": draw(words)}]
        if turn and draw(st.booleans()):
            chat[-1]["reasoning_content"] = draw(words)
            chat.append({"role": "tool", "content": draw(words), "name": "look"})
    return [*chat, {"role": "user", "content": draw(words) + "?"}]


def talk(*contents: Any) -> list[dict[str, Any]]:
    """Questions and answers by turns."""
    return [{"role": ("user", "assistant")[turn % 2], "content": content} for turn, content in enumerate(contents)]


def by_itself(tokenizer: Any, chat: list[dict[str, Any]], **more: Any) -> list[int] | None:
    """Token ids without comb; None where the template refuses the chat."""
    try:
        ids: list[int] = tokenizer.apply_chat_template(
            chat, **{"add_generation_prompt": True, **more}, tokenize=True, return_dict=False
        )
    except Exception:
        return None
    return ids


@pytest.mark.parametrize("name", TEMPLATES)
@settings(max_examples=40, deadline=None)
@given(chat=chats(), parts=st.booleans())
def test_the_prompt_is_the_templates(name: str, chat: list[dict[str, Any]], parts: bool) -> None:
    tokenizer = byte_tokenizer(TEMPLATES[name], bos_token="<|bos|>")
    lists = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in chat]
    as_text, as_parts = by_itself(tokenizer, chat), by_itself(tokenizer, lists)
    takes_parts = name in ("parts or texts", "parts alone", "smolvlm", "qwen2_audio")
    takes_text = name not in ("parts alone", "smolvlm")
    given_chat, expected = (
        (lists, as_parts if takes_parts else as_text) if parts else (chat, as_text if takes_text else as_parts)
    )
    builder = PromptBuilder(tokenizer)
    segment = builder.segment(DOCUMENT)
    assert not set(tokenizer.all_special_ids).intersection(segment)
    if expected is None:
        with pytest.raises(ValueError, match="chat template") as error:
            builder.build(given_chat)
        assert "\n" not in str(error.value)
        return
    assert list(builder.build(given_chat).flat) == expected
    first = next(each["content"] for each in chat if each["role"] == "user")
    if name == "an empty text is no message" and not first.strip():
        return  # with documents it is one
    try:
        prompt = builder.build(given_chat, [segment, segment])
    except ValueError:
        if name not in REFUSED:
            raise
        return
    assert list(prompt.bare) == expected
    assert prompt.segments == (segment, segment)
    assert prompt.gaps == ()


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_where_documents_cannot_be_placed_that_is_said(name: str) -> None:
    builder = PromptBuilder(byte_tokenizer(MADE_UP[name]))
    chat = [{"role": "user", "content": "/how deep is it?"}, {"role": "user", "content": "And wide?"}]
    with pytest.raises(ValueError, match="documents can't be placed in it"):
        builder.build(chat, [builder.segment(DOCUMENT)])


def test_options_of_a_template_are_given_to_it() -> None:
    chat = talk("Hi", "<think>a</think>Hel")
    tool = {"type": "function", "function": {"name": "look", "description": '"', "parameters": {}}}
    for name, options in (
        ("thinking of earlier answers is dropped", {"enable_thinking": False}),
        ("dates, tools, JSON, trimmed", {"tools": [tool]}),
        ("documents of its own", {"documents": [{"title": "a", "text": "b"}]}),
        ("plain", {"add_generation_prompt": False}),
        ("plain", {"continue_final_message": True, "add_generation_prompt": False}),
        ("plain", {"chat_template": MADE_UP["channels"]}),
    ):
        tokenizer = byte_tokenizer(MADE_UP[name])
        builder = PromptBuilder(tokenizer, chat_template_kwargs=options)
        expected = by_itself(tokenizer, chat, **options)
        assert list(builder.build(chat).flat) == expected != by_itself(tokenizer, chat)
        assert list(builder.build(chat, [(1, 2)]).bare) == expected


def test_both_renderings_are_of_one_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_tokenizer(MADE_UP["dates, tools, JSON, trimmed"])
    builder = PromptBuilder(tokenizer)
    builder.build("Hi")  # what a template takes is found out once

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return next(moments)

    monkeypatch.setattr(chat_template_utils, "datetime", Clock)
    days = set()
    for before in range(4):  # readings of the clock until it is midnight
        moments = (MIDNIGHT + datetime.timedelta(seconds=later) for later in count(-before))
        days.add(tokenizer.decode(builder.build("Hi", [(1, 2)]).bare).partition("<|end|>")[0])
    assert days == {"<|system|>Today: 29 Feb 2024", "<|system|>Today: 01 Mar 2024"}


def test_documents_named_in_messages_are_words_of_theirs() -> None:
    """They are there where a template asks whether a text is empty, and white space beside them isn't at its edge."""
    document, others = {"type": "document", "id": "a"}, ("an empty text is no message", "dates, tools, JSON, trimmed")
    for name in ("plain", "no system", "parts or texts", *others):
        tokenizer = byte_tokenizer(MADE_UP[name])
        builder = PromptBuilder(tokenizer)
        segment = builder.segment("The lake.")
        for before, behind in (("First: ", " then"), ("", ""), ("A\n", "")):
            texts = [{"type": "text", "text": text} for text in (before, behind)]
            if name == "parts or texts" and before == "First: ":
                continue  # each part is trimmed by itself
            parts = [each for each in (texts[0], document, texts[1]) if each.get("text") != ""]
            chat = talk("Hi", "Ho", parts)
            marked = talk("Hi", "Ho", f"{before}XX{behind}")
            text = tokenizer.apply_chat_template(marked, tokenize=False, add_generation_prompt=True)
            prompt = builder.build(chat, (), {"a": [segment]})
            assert tokenizer.decode(prompt.flat) == text.replace("XX", "The lake.\n")


def test_documents_in_the_wrong_order_are_refused() -> None:
    template = "{% for m in messages | reverse %}<|{{ m.role }}|>{{ m.content }}{% endfor %}"
    named = [{"role": "user", "content": [{"type": "document", "id": name}]} for name in "ab"]
    with pytest.raises(ValueError, match="another order"):
        PromptBuilder(byte_tokenizer(template)).build(named, (), {"a": [(1,)], "b": [(2,)]})


def test_answers_are_tokens_where_the_template_shows_them_whole() -> None:
    ids = (*range(30, 34), 128, 30)  # not what their text becomes
    for name, text, stays in (
        ("plain", " \ufffd", True), ("no system", "Ho ", False), ("no system", "Ho", True),
        ("thinking of earlier answers is dropped", "<think>a</think>b", False),
    ):  # fmt: skip
        tokenizer = byte_tokenizer(MADE_UP[name])
        chat, held = talk("Hi", text, "So?"), talk("Hi", [Generated(ids, text)], "So?")
        expected, written = by_itself(tokenizer, chat), tuple(tokenizer.encode(text))
        assert expected is not None
        for segments in ((), [(1, 2)]):
            query = PromptBuilder(tokenizer).build(held, segments).bare
            start = next((place for place in range(len(query)) if query[place : place + len(ids)] == ids), None)
            assert (start is not None) == stays
            if start is not None:
                query = (*query[:start], *written, *query[start + len(ids) :])
            assert list(query) == expected


def test_a_long_chat_takes_linear_time() -> None:
    builder = PromptBuilder(byte_tokenizer(MADE_UP["plain"]))
    seconds = []
    for messages in (2_000, 20_000):
        chat, runs = talk(*"a" * messages), []
        for _ in range(3):  # the quickest: a busy machine slows one down
            start = time.process_time()
            builder.build(chat, [(1, 2)])
            runs.append(time.process_time() - start)
        seconds.append(min(runs))
    assert seconds[1] < 35 * seconds[0]  # ten times the text; each message sought in all of it: a hundred times


# ---- tokens at the edges of documents ----

LAKE = "How deep is the lake?\n\nThe lake is 12 m deep."
CORPUS = [LAKE, "user\nHow\n\n\nassistant\nSo deep", "[INST] How deep? [/INST]"]


def trained(kind: str, template: str | None = None) -> Any:
    """A small tokenizer: merges of bytes, or with SentencePiece's two ways with spaces; words; the likeliest pieces."""
    specials = ["<unk>", "<s>", "</s>", "<|user|>", "<|assistant|>", "<|end|>"]
    if kind == "words":
        made = Tokenizer(models.WordPiece(unk_token="<unk>"))
        made.normalizer, made.pre_tokenizer = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
        trainer: Any = trainers.WordPieceTrainer(vocab_size=150, special_tokens=specials)
    elif kind == "pieces":
        made = Tokenizer(models.Unigram())
        trainer = trainers.UnigramTrainer(vocab_size=80, special_tokens=specials, unk_token="<unk>")
    else:
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=specials)
    if kind == "bytes":
        made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
        trainer.initial_alphabet = pre_tokenizers.ByteLevel.alphabet()
    elif kind != "words":
        scheme = "always" if kind == "pieces" else kind
        made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=False)
        made.decoder = decoders.Metaspace(prepend_scheme=scheme)
    made.train_from_iterator(CORPUS * 3, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A" + " </s>" * (kind == "words"), special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="<unk>", bos_token="<s>", eos_token="</s>", chat_template=template,
        additional_special_tokens=specials[3:],
    )  # fmt: skip


@pytest.mark.parametrize("kind", ["bytes", "always", "first", "words", "pieces"])
@pytest.mark.parametrize("name", ["plain", "the system text in the first question", "channels", "no system"])
def test_tokens_around_documents_are_those_of_the_whole_text(kind: str, name: str) -> None:
    tokenizer = trained(kind, MADE_UP[name])
    builder = PromptBuilder(tokenizer)
    segment = builder.segment("The lake is 12 m deep.")
    for question in ("How deep?", "\n\nHow", " deep? <|end|> how", "<|end|>So", "é?"):
        chat = talk(question)
        whole = by_itself(tokenizer, chat)
        assert whole is not None
        assert list(builder.build(chat).flat) == whole
        prompt = builder.build(chat, [segment])
        # a token that a document comes in between is two; no other differs, and no space is added
        pairs = (zip(prompt.bare[::step], whole[::step], strict=False) for step in (1, -1))
        same, rest = (next((n for n, (a, b) in enumerate(pair) if a != b), len(whole)) for pair in pairs)
        if "[INST]" not in MADE_UP[name]:
            assert len(whole) - rest <= same + 3
        assert tokenizer.decode(prompt.bare).replace(" ", "") == tokenizer.decode(whole).replace(" ", "")
        if kind in ("always", "first"):
            ours, theirs = ("".join(tokenizer.convert_ids_to_tokens(list(ids))) for ids in (prompt.bare, whole))
            assert ours.count("▁") == theirs.count("▁")


@pytest.mark.parametrize("kind", ["bytes", "always", "first", "words", "pieces"])
def test_raw_prompts_are_read_as_without_documents(kind: str) -> None:
    tokenizer = trained(kind)
    builder = PromptBuilder(tokenizer)
    segment = builder.segment("The <|end|> lake </s>")
    assert not {1, 2, 3, 4, 5}.intersection(segment)
    assert len(segment) > 8  # spelled, whatever the vocabulary has
    assert builder.segment("The lake") == tuple(tokenizer("The lake\n", add_special_tokens=False)["input_ids"])
    for text in ("<|user|>How deep?<|end|><|assistant|>", "How deep?", "\n\nHow", "<s>[INST] How [/INST]", " deep"):
        for ask in (builder.complete, builder.build):
            prompt = ask(text, [segment])
            assert list(prompt.bare) == tokenizer(text)["input_ids"]
            assert ask(text).flat == prompt.bare
            assert prompt.prefix == (tokenizer.bos_token_id,)
        bare = builder.complete(text, [segment], add_special_tokens=False)
        assert list(bare.bare) == tokenizer(text, add_special_tokens=False)["input_ids"]
        assert bare.prefix == ((tokenizer.bos_token_id,) if text.startswith("<s>") else ())


def test_few_shot_text_is_read_with_the_question() -> None:
    tokenizer = trained("bytes")
    builder = PromptBuilder(tokenizer, prefix="How deep?\n", lead="The <|end|>lake:\n")
    prompt = builder.build("How <|end|>", [(9, 9)])
    assert list(prompt.bare) == tokenizer("How deep?\nThe <|end|>lake:\nHow <|end|>")["input_ids"]
    assert builder.build("How <|end|>").flat == prompt.bare


def test_a_tokenizer_that_reads_structure_in_any_text_is_refused() -> None:
    class Careless(PreTrainedTokenizerFast):
        is_fast = False

        def encode(self, text: Any, *args: Any, split_special_tokens: bool = False, **options: Any) -> Any:
            return super().encode(text, *args, **options)

    tokenizer = Careless(tokenizer_object=byte_tokenizer().backend_tokenizer, eos_token="<|end|>")
    with pytest.raises(ValueError, match="documents would be read as structure"):
        PromptBuilder(tokenizer).segment("a <|end|> b")
    assert PromptBuilder(tokenizer).segment("a b")


@pytest.mark.parametrize("front", ["", "\n", "\n\n"])
def test_what_a_template_is_given_by_default_goes_with_the_tokenizer(tmp_path: Path, front: str) -> None:
    chat = talk("Hi")
    plain = byte_tokenizer(front + MADE_UP["thinking of earlier answers is dropped"])
    plain.save_pretrained(tmp_path)
    told = load_tokenizer(tmp_path, chat_template_kwargs={"enable_thinking": False})
    expected = by_itself(plain, chat, enable_thinking=False)
    assert by_itself(told, chat) == expected != by_itself(plain, chat)
    assert list(PromptBuilder(told).build("Hi", [(1, 2)]).bare) == expected
    assert by_itself(told, chat, enable_thinking=True) == by_itself(plain, chat)
    told.save_pretrained(tmp_path / "again")
    assert by_itself(load_tokenizer(tmp_path / "again"), chat) == expected
    again = load_tokenizer(tmp_path / "again", chat_template_kwargs={"enable_thinking": False})
    assert again.chat_template == told.chat_template


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"enable_thinkin": False}, "knows no 'enable_thinkin'"),
        ({"messages": "x"}, "can't set 'messages'"),
        ({"enable_thinking": None}, "is a text, a number, true or false"),
        ({"enable_thinking": float("inf")}, "is a text, a number, true or false"),
    ],
)
def test_what_no_template_can_be_given_is_refused(arguments: dict[str, Any], message: str) -> None:
    tokenizer = byte_tokenizer(MADE_UP["thinking of earlier answers is dropped"])
    with pytest.raises(ValueError, match=message):
        set_template_defaults(tokenizer, arguments)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="has no chat template"):
        set_template_defaults(tokenizer, {"enable_thinking": True})


def test_thinking_that_a_template_does_not_speak_of_is_off_already() -> None:
    """A recipe that turns it off is one for any model."""
    tokenizer = byte_tokenizer(None)
    set_template_defaults(tokenizer, {"enable_thinking": False})
    assert tokenizer.chat_template is None
    plain = tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    set_template_defaults(tokenizer, {"enable_thinking": False})
    assert tokenizer.chat_template == plain
    with pytest.raises(ValueError, match="knows no 'enable_thinking'"):
        set_template_defaults(tokenizer, {"enable_thinking": True})


def test_the_last_default_of_a_template_counts() -> None:
    front = "  {% if true %}{{ '>' }}{% endif %}"
    tokenizer = byte_tokenizer(front + MADE_UP["thinking of earlier answers is dropped"])
    chat = talk("Hi")
    wanted = {value: by_itself(tokenizer, chat, enable_thinking=value) for value in (True, False)}
    assert wanted[True] != wanted[False]
    for value in (False, True, False):
        set_template_defaults(tokenizer, {"enable_thinking": value})
        assert by_itself(tokenizer, chat) == wanted[value]
    assert tokenizer.chat_template.count("enable_thinking is not defined") == 1


def test_any_text_can_be_a_default() -> None:
    tokenizer = byte_tokenizer("{{ persona }}" + MADE_UP["plain"])
    chat = talk("Hi")
    for persona in ("😀", 'it\'s {{ 1 }} %} "x"\n'):
        wanted = by_itself(tokenizer, chat, persona=persona)
        set_template_defaults(tokenizer, {"persona": persona})
        assert by_itself(tokenizer, chat) == wanted


def test_arguments_of_the_renderer_itself_are_not_a_templates() -> None:
    for name in ("messages", "tokenize", "documents"):
        with pytest.raises(ValueError, match=rf"--x can't set '{name}'"):
            template_arguments(json.dumps({name: 1}), "--x")
    assert template_arguments('{"enable_thinking": false}') == {"enable_thinking": False}
