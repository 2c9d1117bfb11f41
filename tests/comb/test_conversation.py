"""Conversations: a turn that goes on from the last one gives what linking it all from the start gives."""

from __future__ import annotations

import functools
import gc
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor

from comb import CombForCausalLM, Conversation, LinkTokensForCausalLM, PICEngine
from tests.helpers.byte_text import byte_tokenizer
from tests.helpers.families import open_gates, tiny
from tests.helpers.hybrids import text_model
from tests.helpers.tiny_engine import Scores, states

MILL, CITY, LAKE = "The mill burnt down in spring.", "Rill is a small city by the sea.", "The lake is 12 m deep."
NEW = 6
EXACT = 1e-5
CONTROL = 1e-3
PLAIN = (  # shows answers as they are: tiny models begin and end theirs with any white space
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% if m.role == 'assistant' %}<|end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
THINKING = PLAIN.replace("<|assistant|>{% endif %}", "<|assistant|>Hm.{% endif %}")
HYBRIDS = ("qwen3_next", "bamba", "jamba", "mamba", "mamba2")
ON_LLAMA = ("full", "prefix", "naive", "legolink:2", "legolink-0", "attnlink:4", "cacheblend:1.0", "focus:1.0",
            "naive:quantize=int8", "linktokens", "comb")  # fmt: skip


@functools.cache
def model_of(family: str) -> Any:
    if family in HYBRIDS:
        return text_model(family)[0]
    sizes: dict[str, Any] = {"vocab_size": len(byte_tokenizer()), "max_position_embeddings": 1024}
    if family == "gemma3n":  # its last layers read the keys of others; without windows its cache can be cut
        sizes |= {"layer_types": ["full_attention"] * 4, "vocab_size_per_layer_input": sizes["vocab_size"]}
    model = tiny(family, seed=3, **sizes, tie_word_embeddings=False)  # tied, it says its last token for ever
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, 0.6 * parameter.shape[-1] ** -0.5)
    return model


@functools.cache
def with_encoder(family: str) -> Any:
    torch.manual_seed(4)
    return open_gates(CombForCausalLM.from_backbone(model_of(family), num_encoder_layers=2))


@functools.cache
def with_link_tokens(family: str) -> Any:
    return LinkTokensForCausalLM.from_backbone(model_of(family), num_link_tokens=3, token_ids=[40, 41, 42])


def engine_of(family: str = "llama", method: str = "legolink:2", **options: Any) -> PICEngine:
    made = {"comb": with_encoder, "linktokens": with_link_tokens}.get(method.partition(":")[0], model_of)
    model = made(family)
    tokenizer = byte_tokenizer(options.pop("template", PLAIN))
    return PICEngine(model, tokenizer, method=method, **options)


def asked(chat: Conversation, question: str, *documents: str, **options: Any) -> tuple[Any, Tensor]:
    """The answer, and the logits [answer tokens, vocabulary] that it was chosen from."""
    scores = Scores()
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, **options}
    answer = chat.ask(question, documents, logits_processor=[scores], **settings)
    return answer, torch.stack(scores.steps)


def error(one: Tensor, other: Tensor) -> float:
    seen = torch.isfinite(other)
    return float((one - other)[seen].norm() / other[seen].norm())


def next_turn(chat: Conversation, anew: Conversation, question: str, *new: str) -> tuple[Any, Tensor]:
    """The answer of `chat`, checked against `anew`, which has the same turns and is linked from its start; and that
    one's logits."""
    anew.release()
    (answer, logits), (expected, reference) = (asked(each, question, *new) for each in (chat, anew))
    assert error(logits, reference) < EXACT
    assert answer.token_ids == expected.token_ids
    assert answer.report.prompt_tokens == expected.report.prompt_tokens
    assert expected.report.continued_tokens == 0
    assert "released" in expected.report.relinked
    return answer, reference


def second_turn(engine: PICEngine, *new: str, says: Sequence[int | None] = (), **first: Any) -> tuple[Any, Any, Any]:
    """A conversation, its answers to "When?" and "Where to?"."""
    chat, anew = engine.conversation([MILL]), engine.conversation([MILL])
    for conversation in (chat, anew):
        settings = {"max_new_tokens": NEW, **first}
        answered = conversation.ask("When?", logits_processor=[Scores(says=says)], **settings)
    return chat, answered, next_turn(chat, anew, "Where to?", *new)[0]


CASES = [(name, spec) for name in HYBRIDS for spec in ("hypic:4", "full")] + [("llama", spec) for spec in ON_LLAMA]
CASES += [("qwen3_next", "addition"), ("qwen3_next", "prefix"), ("bamba", "comb"), ("jamba", "comb"),
          ("gemma2", "legolink:2"), ("gemma2", "full"), ("gemma3", "naive"), ("gemma3n", "legolink:2"),
          ("deepseek_v2", "legolink:2"), ("gpt2", "full")]  # fmt: skip


@pytest.mark.parametrize(("family", "method"), CASES)
def test_a_turn_goes_on_as_if_linked_in_one_go(family: str, method: str) -> None:
    engine = engine_of(family, method)
    continued, anew, other = (engine.conversation([MILL if part < 2 else LAKE]) for part in range(3))
    first = [asked(chat, "When?")[0] for chat in (continued, anew, other)]
    # every token reads the documents of cross blocks
    new = () if method == "comb" else (CITY,)
    answer, reference = next_turn(continued, anew, "Where to?", *new)
    _, control = asked(other, "Where to?", *new)
    assert error(control, reference) > CONTROL
    if (family, method) == ("jamba", "comb"):
        assert "scan" in answer.report.relinked
        assert continued.relinked == 1
        return
    assert answer.report.relinked == ""
    assert (continued.relinked, anew.relinked) == (0, 1)
    assert answer.report.continued_tokens == first[0].report.prompt_tokens + NEW - 1
    third, _ = next_turn(continued, anew, "Why?")  # and on from there
    assert third.report.continued_tokens == answer.report.prompt_tokens + NEW - 1
    if method != "comb":
        assert states(answer)[0] == "continued"
        assert states(third) == ["continued", "continued"]
    assert engine.store.stats().in_use == 0


@pytest.mark.parametrize("family", ["qwen3_next", "bamba", "llama"])
def test_full_is_what_transformers_makes_of_the_whole_text(family: str) -> None:
    """Its own continuation of its own cache, and one pass over everything."""
    model, engine = model_of(family), engine_of(family, "full")
    chat = engine.conversation([MILL], messages=[{"role": "system", "content": "Be brief."}])
    settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "do_sample": False, "return_dict_in_generate": True}

    def ids(text: str) -> list[int]:
        return list(engine.tokenizer.encode(text, add_special_tokens=False))

    tokens, past = ids(f"<|system|>Be brief.<|user|>{MILL}\nWhen?<|assistant|>"), None
    for question, more in (("When?", ""), ("Where to?", f"<|end|><|user|>{CITY}\nWhere to?<|assistant|>")):
        tokens = tokens + ids(more)
        answer, logits = asked(chat, question, *([CITY] if more else []))
        output = model.generate(torch.tensor([tokens]), past_key_values=past, **settings)
        whole = model.generate(torch.tensor([tokens]), **settings, output_logits=True)
        generated = output.sequences[0, len(tokens) :].tolist()
        assert list(answer.token_ids) == generated == whole.sequences[0, len(tokens) :].tolist()
        assert error(torch.stack([step[0] for step in whole.logits]), logits) < EXACT
        assert answer.report.prompt_tokens == len(tokens)
        tokens, past = output.sequences[0].tolist(), output.past_key_values
    assert answer.report.continued_tokens > 0
    assert [message["role"] for message in chat.messages] == ["system", "user", "assistant", "user", "assistant"]
    assert chat.messages[3] == {"role": "user", "content": "Where to?"}


def test_the_first_turn_is_the_question_alone_and_added_documents_have_ids() -> None:
    engine = engine_of("qwen3_next", "hypic:4")
    (mill,) = engine.add_documents([MILL])
    system = [{"role": "system", "content": [{"type": "text", "text": "Read:"}, {"type": "document", "id": mill}]}]
    user = {"role": "user", "content": "When?"}
    chat = engine.conversation(document_ids=[mill], messages=system)
    answer = chat.ask("When?", [CITY], max_new_tokens=NEW)
    assert answer.token_ids == engine.chat([*system, user], [MILL, CITY], max_new_tokens=NEW).token_ids
    assert answer.token_ids != engine.chat([*system, user], [CITY, MILL], max_new_tokens=NEW).token_ids
    assert states(answer) == ["hit", "hit", "compiled"]
    # what is held needs nothing of the store or the library
    engine.remove_documents([mill])
    assert states(chat.ask("And?", max_new_tokens=NEW)) == ["continued"] * 3
    chat.release()
    assert states(chat.ask("So?", max_new_tokens=NEW)) == ["compiled", "compiled", "hit"]


@pytest.mark.parametrize(("family", "method"), [("qwen3_next", "hypic:4"), ("llama", "legolink:2"), ("llama", "comb"),
                                                ("gemma3n", "legolink:2")])  # fmt: skip
def test_a_template_that_writes_earlier_turns_in_another_way(family: str, method: str) -> None:
    """Keys and values are cut where the texts part, states can't be; both answer as if linked from the start."""
    # every token reads the documents of cross blocks
    new = () if method == "comb" else (CITY,)
    chat, first, answer = second_turn(engine_of(family, method, template=THINKING), *new)
    if family != "qwen3_next":
        assert (answer.report.continued_tokens, chat.relinked) == (first.report.prompt_tokens - len("Hm."), 0)
    else:
        assert (answer.report.continued_tokens, chat.relinked) == (0, 1)
        assert "states or sliding windows can't be cut" in answer.report.relinked
        assert "linked from the start" in str(answer.report)


@pytest.mark.parametrize(("family", "method"), [("qwen3_next", "hypic:4"), ("llama", "legolink:2"), ("llama", "full")])
def test_a_remembered_part_of_an_answer(family: str, method: str) -> None:
    """A hybrid goes on from the cache in front of the answer, the others are cut there."""

    def shorter(text: str) -> str:
        return "It did."

    engine = engine_of(family, method)
    chat, anew, whole = (engine.conversation([MILL], remember=part) for part in (shorter, shorter, None))
    for conversation in (chat, anew, whole):
        first, _ = asked(conversation, "When?")
    answer, reference = next_turn(chat, anew, "Where?", CITY)
    assert error(asked(whole, "Where?", CITY)[1], reference) > CONTROL
    assert chat.messages[1]["content"] == "It did." != first.text
    assert first.report.prompt_tokens - 1 <= answer.report.continued_tokens < first.report.prompt_tokens + NEW - 1


@pytest.mark.parametrize("method", ["naive", "full"])
def test_what_is_remembered_of_answers_is_gone_on_from_behind_sliding_windows(method: str) -> None:
    """Every turn from the cache in front of the last answer, which can't be cut off; `full` leaves none there."""
    engine = engine_of("mistral", method)
    chat, anew = (engine.conversation([MILL], remember=lambda _: "It did.") for _ in range(2))
    prompts = [asked(conversation, "When?")[0].report.prompt_tokens for conversation in (chat, anew)]
    for turn in range(1, 4):
        answer, _ = next_turn(chat, anew, "When?")
        if method == "full":
            assert "remembered otherwise where a cache can't be cut" in answer.report.relinked
        else:
            assert answer.report.relinked == ""
            # behind the documents first, then behind the last question
            assert answer.report.continued_tokens == prompts[-1] - (len("When?<>") - 1 if turn == 1 else 1)
        prompts.append(answer.report.prompt_tokens)


@pytest.mark.parametrize(("family", "method"), [("qwen3_next", "hypic:4"), ("bamba", "full"), ("llama", "legolink:2"),
                                                ("llama", "comb")])  # fmt: skip
def test_a_turn_that_fails_leaves_everything_as_it_was(family: str, method: str) -> None:
    engine = engine_of(family, method)
    chat, untouched = engine.conversation([MILL]), engine.conversation([MILL])
    for conversation in (chat, untouched):
        asked(conversation, "When?")
    before, size = chat.messages, chat.nbytes
    # every token reads the documents of cross blocks
    new = () if method == "comb" else (CITY,)
    with pytest.raises(ZeroDivisionError):
        chat.ask("Where to?", new, logits_processor=[Scores(step_3=lambda: 1 / 0)], max_new_tokens=NEW)
    with pytest.raises(ValueError, match="max_new_tokens"):
        chat.ask("Where to?", new, max_new_tokens=0)
    reached, known = threading.Event(), threading.Event()

    def hold() -> None:
        """Until somebody closes the stream: it never ends by itself."""
        reached.set()
        assert known.wait(60)
        assert stream._generation.stop.wait(60)

    held = Scores(step_2=hold)
    with chat.stream("Where to?", new, max_new_tokens=NEW, min_new_tokens=NEW, logits_processor=[held]) as stream:
        known.set()
        assert reached.wait(60)
    with pytest.raises(RuntimeError, match="no answer"):
        _ = stream.answer
    assert len(held.steps) == 3
    assert (chat.messages, chat.nbytes) == (before, size)
    _, logits = asked(chat, "Where to?", *new)
    _, reference = asked(untouched, "Where to?", *new)
    assert torch.equal(logits, reference)
    assert engine.store.stats().in_use == 0


def test_a_stream_whose_answer_is_whole_is_a_turn_read_or_not() -> None:
    engine = engine_of("bamba", "hypic:4")
    chat, twin = engine.conversation([MILL]), engine.conversation([MILL])
    for read in (True, False):
        expected = chat.ask("When?", max_new_tokens=NEW)
        with twin.stream("When?", max_new_tokens=NEW) as stream:
            if read:
                assert "".join(stream) == expected.text
            else:
                stream._generation.thread.join(60)
        assert stream.answer.token_ids == expected.token_ids
        assert stream.report.continued_tokens == expected.report.continued_tokens
    assert twin.messages == chat.messages


@pytest.mark.parametrize(("family", "method"), [("qwen3_next", "hypic:4"), ("llama", "legolink:2")])
def test_conversations_side_by_side(family: str, method: str) -> None:
    """Turns of one wait for each other, those of several take turns on the model; none sees another's."""
    engine = engine_of(family, method)
    documents = [MILL, CITY, LAKE]

    def three_turns(first: int) -> list[tuple[int, ...]]:
        chat = engine.conversation([documents[first]])
        rest = documents[first + 1 :] + documents[:first]
        return [asked(chat, "So?", *new)[0].token_ids for new in ([], rest[:1], rest[1:])]

    alone = [three_turns(first) for first in range(3)]
    assert alone[0] != alone[1] != alone[2] != alone[0]
    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(three_turns, range(3))) == alone
        chat = engine.conversation([MILL])
        answers = list(pool.map(lambda _: asked(chat, "So?")[0], range(3)))
    assert sorted(answer.report.continued_tokens > 0 for answer in answers) == [False, True, True]
    assert [message["role"] for message in chat.messages] == ["user", "assistant"] * 3
    assert chat.relinked == 0


@pytest.mark.parametrize("call", [lambda chat: asked(chat, "Why?"), lambda chat: chat.stream(""), Conversation.release])
@pytest.mark.parametrize("how", ["ask", "stream", "remember"])
def test_a_turn_that_calls_its_own_conversation_is_refused(how: str, call: Callable[[Conversation], Any]) -> None:
    calls = [call]

    def remember(text: str) -> str:
        while how == "remember" and calls:
            calls.pop()(chat)
        return text

    engine = engine_of("llama", "naive")
    chat, other = engine.conversation([MILL], remember=remember), engine.conversation([CITY])
    at = {} if how == "remember" else {"step_1": lambda: asked(other, "Why?"), "step_2": lambda: call(chat)}

    def turns() -> None:
        for scores in (Scores(**at), Scores()):
            settings = {"max_new_tokens": NEW, "min_new_tokens": NEW, "logits_processor": [scores]}
            try:
                "".join(chat.stream("When?", **settings)) if how == "stream" else chat.ask("When?", **settings)
            except RuntimeError as refused:
                said.append(str(refused))

    said: list[str] = []
    thread = threading.Thread(target=turns, daemon=True)  # which would be left waiting for itself
    thread.start()
    thread.join(60)
    assert ["inside a turn of this conversation" in each for each in said] == [True]
    assert len(chat.messages) == 2  # of the second


@pytest.mark.parametrize(("family", "method"), [("qwen3_next", "hypic:4"), ("llama", "legolink:2"), ("llama", "full")])
def test_only_the_last_turn_is_held(family: str, method: str) -> None:
    engine = engine_of(family, method)
    chat = engine.conversation([MILL])

    def held(chat: Conversation) -> weakref.WeakSet[Any]:
        gc.collect()
        left = chat._history.past
        return weakref.WeakSet(left.cache.layers if left is not None else ())

    assert chat.nbytes == 0
    asked(chat, "When?")
    first, size = held(chat), chat.nbytes
    assert len(first) > 0
    asked(chat, "Where?", 4 * MILL)
    second = held(chat)
    assert (len(first), len(second) > 0, chat.nbytes > size) == (0, True, True)
    chat.release()
    assert (len(held(chat)), len(second), chat.nbytes) == (0, 0, 0)
    asked(chat, "And?")
    third = held(chat)
    assert len(third) > 0
    del chat
    gc.collect()
    assert len(third) == 0


@pytest.mark.parametrize(("method", "settings"), [("full", {"num_beams": 2}), ("legolink:2", {"num_beams": 2}),
                                                  ("full", {"use_cache": False})])  # fmt: skip
def test_an_answer_that_leaves_no_cache(method: str, settings: dict[str, Any]) -> None:
    """Beams: the prompt's own cache is gone on from, where the method has made one."""
    _, first, answer = second_turn(engine_of("llama", method), CITY, **settings)
    assert answer.report.continued_tokens == (0 if method == "full" else first.report.prompt_tokens - 1)
    assert ("left no cache" in answer.report.relinked) == (method == "full")


@pytest.mark.parametrize("own", [False, True])
def test_a_turn_that_cannot_be_decoded_behind_a_cache_is_linked_from_its_start(
    own: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of("llama", "full")
    chat, anew = engine.conversation([MILL]), engine.conversation([MILL])
    for conversation in (chat, anew):
        conversation.ask("When?", max_new_tokens=NEW)
    with monkeypatch.context() as patch:
        patch.setattr(engine.model.generation_config, "prompt_lookup_num_tokens", 3 if own else None)
        given = {} if own else {"prompt_lookup_num_tokens": 3}
        answer = chat.ask("Where to?", [CITY], max_new_tokens=NEW, **given)
    assert "prompt_lookup_num_tokens" in answer.report.relinked
    anew.release()
    assert answer.token_ids == anew.ask("Where to?", [CITY], max_new_tokens=NEW).token_ids
    assert next_turn(chat, anew, "Why?")[0].report.continued_tokens > 0


def test_new_documents_with_an_encoder_are_read_by_all_turns() -> None:
    engine = engine_of("llama", "comb")
    chat = engine.conversation([MILL], remember=lambda text: "It did.")
    asked(chat, "When?")
    answer, logits = asked(chat, "Where?", CITY)
    assert "new documents" in answer.report.relinked
    assert (chat.relinked, states(answer)) == (1, ["hit", "compiled"])
    question = [*chat.messages[:2], {"role": "user", "content": "Where?"}]
    for documents, same in (([MILL, CITY], True), ([MILL], False)):
        scores = Scores()
        engine.chat(question, documents, max_new_tokens=NEW, min_new_tokens=NEW, logits_processor=[scores])
        assert (error(logits, torch.stack(scores.steps)) < EXACT) == same


@pytest.mark.parametrize(("family", "method"), [("qwen3_next", "hypic:4"), ("llama", "comb")])
def test_an_answer_that_ends_by_itself(family: str, method: str) -> None:
    """Its end token is the template's business."""
    engine = engine_of(family, method)
    end = engine.tokenizer.eos_token_id
    ends = torch.tensor([end])  # as `generate` takes it, too
    _, first, answer = second_turn(engine, says=[None, None, None, end], max_new_tokens=9, eos_token_id=ends)
    assert (first.token_ids[-1], len(first.token_ids)) == (end, 4)
    assert answer.report.continued_tokens == first.report.prompt_tokens + 3
    # <|end|><|user|>Where to?<|assistant|> behind it: no end token twice
    assert answer.report.prompt_tokens == answer.report.continued_tokens + len("<>") + 1 + len("Where to?")


def test_a_word_that_ends_an_answer_stays_in_it() -> None:
    engine = engine_of("llama", "full")
    (comma,) = engine.tokenizer.encode(",")
    said, ends = [*engine.tokenizer.encode("Yes"), comma], [engine.tokenizer.eos_token_id, comma]
    _, first, answer = second_turn(engine, says=said, max_new_tokens=9, eos_token_id=ends)
    assert first.text == "Yes,"
    assert answer.report.continued_tokens == first.report.prompt_tokens + len("Yes")
    assert answer.report.prompt_tokens == answer.report.continued_tokens + len(",") + len("<><") + len("Where to?")


def test_a_conversation_notices_another_method() -> None:
    engine = engine_of("llama", "legolink:2")
    chat = engine.conversation([MILL])
    asked(chat, "When?")
    engine.encoder_enabled = False
    answer, _ = asked(chat, "Where?")
    assert "another method" in answer.report.relinked
    assert states(answer) == ["inlined"]


def test_rotary_embeddings_of_the_whole_length_are_linked_anew() -> None:
    model = tiny("dynamic_ntk", vocab_size=len(byte_tokenizer()), max_position_embeddings=512)
    for method in ("full", "legolink:2"):
        chat = PICEngine(model, byte_tokenizer(), method=method).conversation([MILL])
        asked(chat, "When?")
        assert "rotary embedding" in asked(chat, "Where?")[0].report.relinked


def test_mac_attention_goes_on() -> None:
    engine = engine_of("llama", "legolink:2", mac="generation")
    chat = engine.conversation([MILL])
    asked(chat, "When?")
    answer, _ = asked(chat, "Where?", CITY)
    assert answer.report.mac is not None
    assert answer.report.continued_tokens > 0


@pytest.mark.parametrize(("family", "method"), [("llama", "naive"), ("qwen3_next", "hypic:4")])
def test_history_is_what_the_template_makes_of_it(family: str, method: str) -> None:
    """It may drop an answer's thinking, or the white space around it: as in a chat with the same messages."""
    template = PLAIN.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
    engine = engine_of(family, method, template=template)
    chat = engine.conversation([MILL])
    for said in ("<think>a</think> b", "no ", "It did."):
        words = engine.tokenizer.encode(said)
        chat.ask("When?", logits_processor=[Scores(says=words)], max_new_tokens=len(words))
    assert [each["content"] for each in chat.messages[1::2]] == ["<think>a</think> b", "no ", "It did."]
    messages = [*chat.messages, {"role": "user", "content": "So?"}]
    answer, logits = asked(chat, "So?")
    scores = Scores()
    same = engine.chat(messages, [MILL], max_new_tokens=NEW, min_new_tokens=NEW, logits_processor=[scores])
    rendered = engine.tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    tokens = len(engine.tokenizer.encode(rendered)) + sum(report.tokens for report in same.report.documents)
    assert answer.report.prompt_tokens == same.report.prompt_tokens == tokens
    assert error(logits, torch.stack(scores.steps)) < EXACT


def test_bad_input() -> None:
    engine = engine_of("llama", "full")
    with pytest.raises(ValueError, match="chat_template"):
        PICEngine(model_of("llama"), byte_tokenizer(chat_template=None), method="full").conversation()
    with pytest.raises(ValueError, match="unknown document id"):
        engine.conversation(document_ids=["nobody"])
    chat = engine.conversation([MILL])
    with pytest.raises(ValueError, match="streamer"):
        chat.stream("When?", streamer=object())
    with pytest.raises(ValueError, match="positions"):
        chat.ask("x" * 2000)
    assert chat.messages == []
    assert states(chat.ask("When?", max_new_tokens=1)) == ["inlined"]  # the first documents are still there
