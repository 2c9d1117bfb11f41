"""Documents and prompts: structure is never read out of text; documents stand in messages in any order."""

from __future__ import annotations

import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from comb import Document, PICacheStore, PICEngine, Prompt, PromptBuilder, UnknownDocumentError
from comb.documents.document import as_document
from comb.documents.messages import referenced_documents
from tests.helpers.byte_text import TEMPLATE, byte_llama, byte_tokenizer


def ids(tokenizer: Any, text: str) -> tuple[int, ...]:
    return tuple(tokenizer.encode(text, add_special_tokens=False))


def test_a_document_holds_one_thing() -> None:
    assert as_document("some text") == as_document({"text": "some text"}) == Document("some text")
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


def test_a_document_spells_no_tag_of_the_template() -> None:
    """Parsers look for the last </think> of a whole prompt; added tokens that no template writes are text as any."""
    tokenizer, text = byte_tokenizer(), "a </think> b <table>"
    tokenizer.chat_template += "{# </think> #}"
    assert (spelled := PromptBuilder(tokenizer).segment("</think>"))
    tokenizer.add_tokens(["</think>", "<table>"])
    assert PromptBuilder(tokenizer).segment("</think>") == spelled != ids(tokenizer, "</think>\n")
    segment = PromptBuilder(tokenizer).segment(text)
    assert (260 in segment, 261 in segment) == (False, True)
    assert tokenizer.decode(segment) == f"{text}\n"
    tokenizer.chat_template = TEMPLATE
    assert {260, 261} <= set(PromptBuilder(tokenizer).segment(text))


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
    builder = PromptBuilder(byte_tokenizer(), lead="Read <|end|>.\n")
    prompt = builder.build("why?", [builder.segment("one")])
    assert builder.tokenizer.decode(prompt.flat) == "<|user|>Read <|end|>.\none\nwhy?<|assistant|>"
    assert prompt.bare == builder.build("why?").bare
    assert builder.tokenizer.eos_token_id in prompt.bare


def test_a_title_stands_above_its_text() -> None:
    builder = PromptBuilder(byte_tokenizer())
    assert builder.tokenizer.decode(builder.segment(Document("body", title="Q3"))) == "Q3\nbody\n"
    builder = PromptBuilder(byte_tokenizer(), document_template="# {title}\n{text}\n\n")
    assert builder.tokenizer.decode(builder.segment(Document("f{x}", title="{}"))) == "# {}\nf{x}\n\n"
    with pytest.raises(ValueError, match=r"has no \{text\}"):
        PromptBuilder(byte_tokenizer(), document_template="doc:")


def test_raw_text_is_completed_without_a_chat_template() -> None:
    chatty, plain = byte_tokenizer(), byte_tokenizer(chat_template=None)
    for tokenizer in (chatty, plain):
        prompt = PromptBuilder(tokenizer).complete("Q <|end|>", [(1, 2)])
        assert (prompt.prefix, prompt.segments) == ((), ((1, 2),))
        assert prompt.query == PromptBuilder(plain).build("Q <|end|>").flat == ids(plain, "Q <|end|>")
    assert PromptBuilder(chatty).build("Q").query != PromptBuilder(chatty).complete("Q").query
    with pytest.raises(ValueError, match="empty"):
        PromptBuilder(chatty).complete("")
    with pytest.raises(ValueError, match=r"no chat_template: ask with a text \(.* at /v1/completions"):
        PromptBuilder(plain).build([{"role": "user", "content": "why?"}])
    with pytest.raises(ValueError, match="a prefix takes no messages: ask with a text"):
        PromptBuilder(chatty, prefix="Read. ").build([{"role": "user", "content": "why?"}])
    assert PromptBuilder(chatty).answer("yes") == (*ids(chatty, "yes"), chatty.eos_token_id)
    tokenizer = byte_tokenizer(chat_template=None, bos_token="<|bos|>")
    assert PromptBuilder(tokenizer).build("a").prefix == ()


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
    builder = PromptBuilder(byte_tokenizer("{{ raise_exception('no system messages') }}"))
    with pytest.raises(ValueError, match=r"chat template.*no system messages"):
        builder.build([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}])


@pytest.mark.parametrize(
    ("template", "roles", "shown", "message"),
    [
        (TEMPLATE, ["system"], "<|system|>a<|assistant|>", "no message with role 'user'"),
        ("{{ messages[-1].content }}", ["user", "user"], "b", "leaves out a message"),
        ("{{ messages[0].content }}|{{ messages[0].content }}", ["user"], "a|a", "shows a message more than once"),
    ],
)
def test_chats_that_documents_cannot_stand_in(template: str, roles: list[str], shown: str, message: str) -> None:
    builder = PromptBuilder(byte_tokenizer(template))
    chat = [{"role": role, "content": text} for role, text in zip(roles, "ab", strict=False)]
    assert builder.tokenizer.decode(builder.build(chat).flat) == shown
    with pytest.raises(ValueError, match=message):
        builder.build(chat, [(1, 2)])


@pytest.mark.parametrize(
    ("document", "message"),
    [("a \ud83d", "half of a surrogate pair"), (Document(token_ids=(1, 99999)), "another tokenizer")],
)
def test_documents_that_are_no_tokens(document: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PromptBuilder(byte_tokenizer()).segment(document)


@pytest.mark.parametrize("template", ["{title}", "{{text}}", "{text} {source}", "{text} {0}", "{text} {"])
def test_a_document_template_is_checked_at_once(template: str) -> None:
    with pytest.raises(ValueError, match="document_template"):
        PromptBuilder(byte_tokenizer(), document_template=template)


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


CHUNKS = ["The mill burnt down in 1907.", "Its owner was Ada Flint.", "She moved to York."]
SPECS = ["full", "prefix", "legolink:4", "legolink-0", "cacheblend:0.2"]


def llama() -> Any:
    return byte_llama(num_hidden_layers=3, num_key_value_heads=2, initializer_range=0.2)


def mixed(first: str, second: str) -> list[dict[str, Any]]:
    """Cached chunks in a system message and between the words of a question."""
    return [
        {"role": "system", "content": [{"type": "text", "text": "Facts: "}, {"type": "document", "id": first}]},
        {"role": "user", "content": [
            {"type": "text", "text": "Given "}, {"type": "document", "id": second}, {"type": "text", "text": "who?"},
        ]},
    ]  # fmt: skip


def test_messages_are_laid_out_as_written() -> None:
    tokenizer = byte_tokenizer()
    builder = PromptBuilder(tokenizer)
    a, b, c = (builder.segment(text) for text in CHUNKS)
    messages = mixed("a", "b")
    assert referenced_documents(messages).before == ("a",)
    assert referenced_documents(messages).after == ("b",)
    prompt = builder.build(messages, [c], {"a": [a], "b": [b]})
    # documents of the request stand at the start of the first user message, as ever
    assert tokenizer.decode(prompt.flat) == (
        f"<|system|>Facts: {CHUNKS[0]}\n<|user|>{CHUNKS[2]}\nGiven {CHUNKS[1]}\nwho?<|assistant|>"
    )
    assert prompt.segments == (a, c, b)
    assert [tokenizer.decode(gap) for gap in prompt.gaps] == ["<|user|>", "Given "]
    assert prompt.bare == (*prompt.prefix, *prompt.gaps[0], *prompt.gaps[1], *prompt.query)


@pytest.mark.parametrize("spec", SPECS)
def test_chat_with_cache_ids_in_any_order(spec: str) -> None:
    model, tokenizer = llama(), byte_tokenizer()
    engine = PICEngine(model, tokenizer, method=spec)
    a, b, c = engine.add_documents(CHUNKS)
    settings = {"max_new_tokens": 6, "eos_token_id": None}
    for first, second in ((a, b), (b, a), (c, c)):
        answer = engine.chat(mixed(first, second), **settings)
        assert [document.id for document in answer.report.documents] == [first, second]
        if spec not in ("full", "prefix"):
            assert {document.state for document in answer.report.documents} == {"hit"}
        elif spec == "prefix":
            texts = dict(zip((a, b, c), CHUNKS, strict=True))
            full = PICEngine(model, tokenizer, method="full")
            ids = full.add_documents([Document(texts[name], id=str(i)) for i, name in enumerate((first, second))])
            assert answer.token_ids == full.chat(mixed(*ids), **settings).token_ids
    engine.remove_documents([b])
    with pytest.raises(UnknownDocumentError, match=b):
        engine.chat(mixed(a, b), **settings)
    assert engine.store.stats().in_use == 0


def test_methods_share_what_they_compile_alike() -> None:
    store, model = PICacheStore(), llama()
    expected = {"naive": "compiled", "legolink:4": "hit", "cacheblend:0.2": "hit", "legolink-0": "compiled",
                "naive,front=dummies:4": "hit", "naive,front=dummies:2": "compiled"}  # fmt: skip
    for spec, state in expected.items():
        engine = PICEngine(model, byte_tokenizer(), method=spec, store=store)
        assert engine.ask("who?", documents=CHUNKS[:1], max_new_tokens=1).report.documents[0].state == state


@pytest.mark.parametrize(
    "part", [{"type": [[]], "text": "a"}, {"type": {}}, {"type": "document", "id": [1]}, 3, None, [["a"]]]
)
def test_malformed_parts_are_refused_by_name(part: Any) -> None:
    """Bodies of requests come here as JSON made them: any type may stand anywhere."""
    with pytest.raises(ValueError, match="message content must be text"):
        referenced_documents([{"role": "user", "content": [{"type": "document", "id": "a"}, part]}])
