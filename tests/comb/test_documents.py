"""Documents and prompts: structure is never read out of text."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comb import Document, Prompt, PromptBuilder
from comb.documents.document import as_document
from tests.helpers.byte_text import byte_tokenizer


def ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def test_a_document_holds_one_thing() -> None:
    assert as_document("some text") == Document("some text")
    assert Document(token_ids=[1, 2]).token_ids == (1, 2)
    for arguments in ({}, {"text": "a", "token_ids": (1,)}, {"text": ""}, {"text": " \n"}, {"token_ids": ()}):
        with pytest.raises(ValueError, match="document"):
            Document(**arguments)
    with pytest.raises(ValueError, match=r"a str, a comb\.Document or a dict with text, not int"):
        as_document(3)
    for arguments in ({"text": b"a"}, {"text": Path("a.txt")}, {"token_ids": [[1, 2]]}, {"token_ids": (1.5,)}):
        with pytest.raises(ValueError, match="document's"):
            Document(**arguments)


def test_a_document_without_an_id_is_called_after_its_content() -> None:
    assert Document("some text", id="mill").name("ab" * 32) == "mill"
    assert Document("some text").name("ab" * 32) == Document("some text", id="").name("ab" * 32) == "doc-abababababab"


@pytest.mark.parametrize(
    "prompt",
    [
        Prompt((1,), ((2, 3), (4,)), (5, 6)),
        Prompt((), ((1, 2), (3, 4, 5)), (), gaps=((7, 8),)),
        Prompt((1, 2), ((3,), (4,), (5, 6)), (7,), gaps=((), (8, 9))),
        Prompt((1, 2), (), (3,)),
    ],
)
def test_what_is_left_behind_a_number_of_tokens(prompt: Prompt) -> None:
    inside: set[int] = set()
    for (start, tokens), segment in zip(prompt.spans, prompt.segments, strict=True):
        assert prompt.flat[start : start + tokens] == segment
        inside |= set(range(start + 1, start + tokens))
    for count in range(len(prompt.flat) + 1):
        cut, segments, rest = prompt.behind(count)
        assert rest.flat == prompt.flat[cut:]
        assert rest.segments == prompt.segments[segments:]
        assert (cut < count) == (count in inside)
        assert cut <= count


def test_documents_stand_in_front_of_the_first_user_message() -> None:
    tokenizer = byte_tokenizer()
    builder = PromptBuilder(tokenizer)
    segments = [builder.segment("one"), builder.segment(Document("two"))]
    prompt = builder.build("why?", segments)
    assert tokenizer.decode(prompt.flat) == "<|user|>one\ntwo\nwhy?<|assistant|>"
    assert prompt.head == ids(tokenizer, "<|user|>")
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "a?"},
        {"role": "assistant", "content": "b"}, {"role": "user", "content": "c?"},
    ]  # fmt: skip
    chat = builder.build(messages, segments)
    assert tokenizer.decode(chat.flat) == (
        "<|system|>Be brief.<|user|>one\ntwo\na?<|assistant|>b<|end|><|user|>c?<|assistant|>"
    )


@pytest.mark.parametrize("text", ["a <|end|> b", "<|user|>", "<|assistant|>done<|end|>"])
def test_a_document_that_spells_a_special_token_stays_text(text: str) -> None:
    tokenizer = byte_tokenizer()
    builder = PromptBuilder(tokenizer)
    special = set(tokenizer.all_special_ids)
    segment = builder.segment(text)
    assert not special & set(segment)
    assert tokenizer.decode(segment) == text + "\n"
    # in messages and raw prompts it is what it is without documents
    for built, same in ((builder.build(text, [segment]), builder.build(text)),
                        (builder.complete(text, [segment]), builder.complete(text))):  # fmt: skip
        assert built.query == same.query
        assert special & set(ids(tokenizer, text)) <= set(same.query)


def test_threads_share_a_tokenizer() -> None:
    """Splitting special tokens is a switch on the tokenizer itself: one thread's must not be another's."""
    tokenizer = byte_tokenizer()
    builders, text = [PromptBuilder(tokenizer), PromptBuilder(tokenizer)], "a <|end|> b"
    prompt, segment = builders[0].build("Hm").flat, builders[0].segment(text)
    assert tokenizer.eos_token_id not in segment
    work = [lambda b=b: b.build("Hm").flat == prompt for b in builders]
    work += [lambda b=b: b.segment(text) == segment for b in builders]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(lambda same: all(same() for _ in range(300)), work))
    finally:
        sys.setswitchinterval(interval)


def test_a_lead_stands_in_front_of_the_documents() -> None:
    tokenizer = byte_tokenizer()
    for head in (None, "Head. "):
        builder = PromptBuilder(tokenizer, head=head, lead="Read <|end|>.\n")
        prompt = builder.build("why?", [builder.segment("one")])
        text = tokenizer.decode(prompt.flat)
        assert text.endswith("Read <|end|>.\none\nwhy?" + ("" if head else "<|assistant|>"))
        assert prompt.query == builder.build("why?").query
        plain = PromptBuilder(tokenizer, head=head).build("why?", [builder.segment("one")])
        assert len(prompt.flat) == len(plain.flat) + len("Read .\n") + 1


def test_a_title_stands_above_its_text() -> None:
    builder = PromptBuilder(byte_tokenizer())
    assert builder.tokenizer.decode(builder.segment(Document("body", title="Q3"))) == "Q3\nbody\n"
    builder = PromptBuilder(byte_tokenizer(), document_template="# {title}\n{text}\n\n")
    assert builder.tokenizer.decode(builder.segment(Document("f{x}", title="{}"))) == "# {}\nf{x}\n\n"
    with pytest.raises(ValueError, match=r"has no \{text\}"):
        PromptBuilder(byte_tokenizer(), document_template="doc:")


def test_a_tokenizer_without_chat_template_takes_text() -> None:
    plain = PromptBuilder(byte_tokenizer(chat_template=None))
    assert plain.build("why?").flat == ids(plain.tokenizer, "why?")
    with pytest.raises(ValueError, match="need a tokenizer with a chat_template"):
        plain.build([{"role": "user", "content": "why?"}])


def test_bos_is_kept_where_the_tokenizer_adds_it() -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = byte_tokenizer(chat_template=None, bos_token="<|bos|>")
    assert PromptBuilder(tokenizer).build("a").head == ()
    bos = tokenizer.bos_token_id
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|bos|> $A", special_tokens=[("<|bos|>", bos)]
    )
    assert PromptBuilder(tokenizer).build("a").head == (bos,)


def test_raw_text_is_completed_without_the_chat_template() -> None:
    chatty, plain = byte_tokenizer(), byte_tokenizer(chat_template=None)
    for tokenizer in (chatty, plain):
        prompt = PromptBuilder(tokenizer).complete("Q <|end|>", [(1, 2)])
        assert (prompt.head, prompt.segments) == ((), ((1, 2),))
        assert prompt.tail == PromptBuilder(plain).build("Q <|end|>").tail == ids(plain, "Q <|end|>")
    assert PromptBuilder(chatty).build("Q").tail != PromptBuilder(chatty).complete("Q").tail
    with pytest.raises(ValueError, match="empty"):
        PromptBuilder(chatty).complete("")


def test_answers_end() -> None:
    tokenizer = byte_tokenizer()
    assert PromptBuilder(tokenizer).answer("yes") == (*ids(tokenizer, "yes"), tokenizer.eos_token_id)


@pytest.mark.parametrize(
    ("query", "message"),
    [
        ([], "no messages"),
        ([{"role": "user", "content": ["a"]}], "content must be text"), ([{"role": "user"}], "content must be text"),
        (None, "a question is text"), (["Who?"], "a question is text"), ({"role": "user"}, "a question is text"),
    ],
)  # fmt: skip
def test_chats_that_cannot_be_built(query: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptBuilder(byte_tokenizer()).build(query)


def test_documents_need_a_user_message() -> None:
    builder, system = PromptBuilder(byte_tokenizer()), [{"role": "system", "content": "a"}]
    assert builder.tokenizer.decode(builder.build(system).flat) == "<|system|>a<|assistant|>"
    with pytest.raises(ValueError, match="no message with role 'user'"):
        builder.build(system, [(1, 2)])


def test_a_template_that_leaves_out_a_message_is_refused() -> None:
    only_last = "{{ messages[-1].content }}"
    builder = PromptBuilder(byte_tokenizer(chat_template=only_last))
    chat = [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}]
    assert builder.tokenizer.decode(builder.build(chat).flat) == "b"
    with pytest.raises(ValueError, match="leaves out a message"):
        builder.build(chat, [(1, 2)])


def test_a_template_that_shows_a_message_twice_is_refused() -> None:
    builder = PromptBuilder(byte_tokenizer(chat_template="{{ messages[0].content }}|{{ messages[0].content }}"))
    assert builder.tokenizer.decode(builder.build("a").flat) == "a|a"
    with pytest.raises(ValueError, match="shows a message more than once"):
        builder.build("a", [(1, 2)])


def test_what_a_template_refuses_is_an_error_of_the_messages() -> None:
    builder = PromptBuilder(byte_tokenizer(chat_template="{{ raise_exception('no system messages') }}"))
    with pytest.raises(ValueError, match=r"chat template.*no system messages"):
        builder.build([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize("template", ["{title}", "{{text}}", "{text} {source}", "{text} {0}", "{text} {"])
def test_a_document_template_is_checked_at_once(template: str) -> None:
    with pytest.raises(ValueError, match="document_template"):
        PromptBuilder(byte_tokenizer(), document_template=template)


def test_text_that_is_no_unicode_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        PromptBuilder(byte_tokenizer()).segment("a \ud83d")


def test_token_ids_of_another_tokenizer() -> None:
    with pytest.raises(ValueError, match="another tokenizer"):
        PromptBuilder(byte_tokenizer()).segment(Document(token_ids=(1, 99999)))


def test_calls_of_tools_stand_in_prompts_and_a_template_may_show_them_alone() -> None:
    template = (
        "{% for m in messages %}[{{ m.role }}]{% if m.tool_calls and not (both and m.content) %}"
        "{{ m.tool_calls[0].name }}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = byte_tokenizer(chat_template=template)
    question = {"role": "user", "content": "Where?"}
    for content in (None, "", "I look."):
        call = {"role": "assistant", "content": content, "tool_calls": [{"name": "look"}]}
        for both in (False, True):
            builder = PromptBuilder(tokenizer, chat_template_kwargs={"both": both})
            prompt = builder.build([question, call], [builder.segment("A text.")])
            said = "I look." if both and content else "look"
            assert tokenizer.decode(prompt.flat) == f"[user]A text.\nWhere?[assistant]{said}"
    named = {**call, "content": [{"type": "document", "id": "a"}]}
    with pytest.raises(ValueError, match="leaves out a message"):
        PromptBuilder(tokenizer).build([question, named], (), {"a": [(1, 2)]})
