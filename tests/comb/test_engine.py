"""PICEngine: right answers and reports, documents by id, what is refused; nothing is shared between calls or held."""

from __future__ import annotations

import copy
import json
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from comb import CombForCausalLM, Document, methods
from comb.backbones.tokenizer import tokenizer_fingerprint
from comb.cache.store import PICacheStore, PICacheTooLargeError, StoreFullError
from comb.documents import splitting
from comb.documents.document import PromptBuilder
from comb.engine.engine import PICEngine, Request, UnknownDocumentError
from comb.engine.report import format_bytes
from comb.methods import MethodSpec
from tests.helpers.families import tiny
from tests.helpers.hybrids import text_model
from tests.helpers.stores import check_store
from tests.helpers.tiny_engine import (
    BOOK,
    CITY,
    LAKE,
    NEW,
    QUESTION,
    TEMPLATE,
    idle,
    make_backbone,
    make_comb,
    make_tokenizer,
    states,
)

# ---- answers ----


def test_full_answers_as_the_plain_model(backbone: LlamaForCausalLM, tokenizer: Any) -> None:
    engine = PICEngine(backbone, tokenizer, method="full")
    answer = engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
    prompt = [*tokenizer.encode(f"{LAKE}\n{CITY}\n{QUESTION}")]
    expected = backbone.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)[0, len(prompt) :].tolist()
    assert list(answer.token_ids) == expected
    assert answer.text == tokenizer.decode(expected)
    assert str(answer) == answer.text
    assert (answer.report.prompt_tokens, answer.report.answer_tokens) == (len(prompt), NEW)
    assert answer.report.recomputed_tokens == len(LAKE) + len(CITY) + 2
    assert states(answer) == ["inlined", "inlined"]
    assert engine.ask(QUESTION, [LAKE], max_new_tokens=NEW).token_ids != answer.token_ids
    idle(engine.store)


def test_comb_compiles_once_then_hits(engine: PICEngine, comb_model: CombForCausalLM, tokenizer: Any) -> None:
    cold = engine.ask(QUESTION, [LAKE, Document(CITY, id="city")], max_new_tokens=NEW)
    warm = engine.ask(QUESTION, [Document(CITY), LAKE], max_new_tokens=NEW)
    assert states(cold) == ["compiled", "compiled"]
    assert states(warm) == ["hit", "hit"]
    assert [d.tier for d in cold.report.documents + warm.report.documents] == [None, None, "device", "device"]
    assert cold.token_ids == warm.token_ids
    assert cold.report.documents[1].id == "city"
    assert warm.report.documents[0].id.startswith("doc-")
    assert (cold.report.prompt_tokens, cold.report.recomputed_tokens) == (len(QUESTION), 0)
    assert cold.report.cache_bytes == sum(d.nbytes for d in cold.report.documents) > 0
    assert 0 < cold.report.ttft_s <= cold.report.total_s
    picaches = comb_model.encode([tokenizer.encode(f"{text}\n") for text in (LAKE, CITY)])
    prompt = torch.tensor([tokenizer.encode(QUESTION)])
    expected = comb_model.generate(prompt, documents=[picaches], max_new_tokens=NEW, do_sample=False)
    assert list(cold.token_ids) == expected[0, len(QUESTION) :].tolist()
    once, twice = (engine.ask(QUESTION, [LAKE] * count, max_new_tokens=1).report for count in (1, 2))
    assert (len(twice.documents), twice.cache_bytes) == (2, once.cache_bytes)  # the same document is one PICache
    # negative control: the documents are what the answer comes from
    assert engine.ask(QUESTION, [CITY], max_new_tokens=NEW).token_ids != cold.token_ids


def test_report_is_readable_and_json(engine: PICEngine) -> None:
    report = engine.ask(QUESTION, [Document(LAKE, id="lake"), CITY], max_new_tokens=NEW).report
    lines = str(report).splitlines()
    assert len(lines) == 3
    assert lines[0].startswith("method comb: first token ")
    assert lines[1].strip().startswith("lake: compiled, 23 tokens, ")
    assert json.loads(json.dumps(report.to_dict()))["documents"][0]["id"] == "lake"
    off = engine.ask(QUESTION, [LAKE], max_new_tokens=1, encoder=False).report
    assert "encoder off" in str(off)
    assert [format_bytes(n) for n in (0, 1023, 1536, 3 * 2**30)] == ["0 B", "1023 B", "1.5 KiB", "3.0 GiB"]


# ---- keys ----


def test_tenants_methods_and_adapters_do_not_share(comb_model: CombForCausalLM, tokenizer: Any) -> None:
    store = PICacheStore()

    def ask(model: Any, **options: Any) -> list[str]:
        return states(PICEngine(model, tokenizer, store=store, **options).ask(QUESTION, [LAKE], max_new_tokens=1))

    assert ask(comb_model) == ["compiled"]
    assert ask(comb_model) == ["hit"]
    assert ask(comb_model, salt="tenant-b") == ["compiled"]
    assert ask(comb_model, method="prefix") == ["compiled"]
    assert ask(comb_model, method="prefix", salt="tenant-b") == ["compiled"]
    assert ask(comb_model, method="prefix", salt="tenant-b") == ["hit"]
    other = make_comb()
    with torch.no_grad():
        next(other.encoder.parameters()).add_(0.5)
    assert ask(other) == ["compiled"]
    assert ask(make_comb(make_backbone().to(torch.bfloat16))) == ["compiled"]
    idle(store)


# ---- batches, requests one after another, threads ----


@pytest.mark.parametrize("method", ["comb", "full", "prefix"])
def test_a_batch_is_single_questions_in_one_compile_and_one_generate(
    comb_model: CombForCausalLM, tokenizer: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [(QUESTION, [LAKE, CITY]), ("Who?", []), ("What colour is it?", [BOOK, LAKE, CITY]), ("Where?", [CITY])]
    alone = PICEngine(comb_model, tokenizer, method=method)
    expected = [alone.ask(question, documents, max_new_tokens=NEW) for question, documents in rows]
    engine = PICEngine(comb_model, tokenizer, method=method)
    compiled, generated = [], []
    compile_, generate = engine.method.compile, comb_model.backbone.generate
    engine.add_documents([LAKE])
    monkeypatch.setattr(engine.method, "compile", lambda each: compiled.append(len(each)) or compile_(each))
    monkeypatch.setattr(comb_model.backbone, "generate", lambda i, **kw: generated.append(len(i)) or generate(i, **kw))
    answers = engine.ask_batch([rows[0], Request("Who?"), *rows[2:]], max_new_tokens=NEW)
    if method != "prefix":
        assert (compiled, generated) == ([2], [4])
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.report.prompt_tokens for answer in answers] == [answer.report.prompt_tokens for answer in expected]
    assert [len(answer.report.documents) for answer in answers] == [2, 0, 3, 1]
    assert len({answer.token_ids for answer in answers}) == 4
    assert engine.ask_batch([]) == []
    idle(engine.store)


@pytest.mark.parametrize("method", ["comb", "full"])
@pytest.mark.parametrize("settings", [{}, {"max_length": 200}])
def test_a_long_prompt_shortens_no_others_answer(
    comb_model: CombForCausalLM, tokenizer: Any, method: str, settings: dict[str, int]
) -> None:
    engine = PICEngine(comb_model, tokenizer, method=method)
    rows = [("a", [LAKE]), ("b", [CITY]), ("x" * (100 if settings else 450), [LAKE])]
    expected = [engine.ask(*row, **settings) for row in rows]
    assert len(expected[0].token_ids) > len(expected[2].token_ids)
    assert [answer.token_ids for answer in engine.ask_batch(rows, **settings)] == [one.token_ids for one in expected]


@pytest.mark.parametrize(
    ("settings", "ended"),
    [
        ({}, False), ({"eos_token_id": []}, False), ({"eos_token_id": make_tokenizer().encode("b")}, True),
        ({"stop_strings": ["b"]}, True),
    ],
)  # fmt: skip
@pytest.mark.parametrize("method", ["comb", "full"])
def test_rows_are_cut_at_their_end_and_what_looks_like_padding_is_kept(
    method: str, settings: dict[str, Any], ended: bool, tokenizer: Any
) -> None:
    engine = PICEngine(make_comb(), tokenizer, method=method)
    a, b, pad = tokenizer.encode("ab!")
    settings = {"pad_token_id": pad, "max_new_tokens": 4, **settings}
    says = {"q": [a, a, pad, pad], "r": [a, b, pad, a]}

    def say(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for row, own in enumerate(ids.tolist()):
            asked = next(at for at in range(len(own), 0, -1) if tokenizer.decode(own[at - 1]) in says)
            scores[row] = torch.full_like(scores[row], -torch.inf)
            scores[row, says[tokenizer.decode(own[asked - 1])][len(own) - asked]] = 0
        return scores

    rows = [("q", [LAKE]), ("r", [])]
    expected = [engine.ask(*row, logits_processor=[say], **settings).token_ids for row in rows]
    assert expected == [(a, a, pad, pad), (a, b) if ended else (a, b, pad, a)]
    assert [each.token_ids for each in engine.ask_batch(rows, logits_processor=[say], **settings)] == expected


def test_eight_threads_get_their_own_answers(comb_model: CombForCausalLM, tokenizer: Any) -> None:
    requests = [
        (f"Question {n}?", [f"Fact {n} is {n * n}.", LAKE][: n % 3], n % 4 != 3, ("comb", "full", "prefix")[n % 3])
        for n in range(16)
    ]

    def run(engines: dict[str, PICEngine], request: tuple[str, list[str], bool, str]) -> tuple[int, ...]:
        question, documents, encoder, method = request
        if encoder:
            return engines[method].ask(question, documents, max_new_tokens=NEW).token_ids
        stream = engines[method].stream(question, documents, encoder=False, max_new_tokens=NEW)
        assert "".join(stream) == stream.answer.text
        return stream.answer.token_ids

    def engines() -> dict[str, PICEngine]:
        store = PICacheStore()
        return {m: PICEngine(comb_model, tokenizer, method=m, store=store) for m in ("comb", "full", "prefix")}

    alone = engines()
    expected = [run(alone, request) for request in requests]
    together = engines()
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda request: run(together, request), requests))
    assert found == expected
    assert len(set(expected)) > 12
    idle(together["comb"].store)


# ---- encoder on and off ----


def test_encoder_off_is_the_plain_backbone(engine: PICEngine, tokenizer: Any) -> None:
    plain = PICEngine(make_backbone(), tokenizer, method="full").ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
    on = engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW)
    off = [engine.ask(QUESTION, [LAKE, CITY], encoder=False, max_new_tokens=NEW)]
    with engine.model.encoder_disabled():
        off.append(engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW))
    engine.encoder_enabled = False
    off.append(engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=NEW))
    off += engine.ask_batch([(QUESTION, [LAKE, CITY])], max_new_tokens=NEW)
    for answer in off:
        assert answer.token_ids == plain.token_ids
        assert states(answer) == ["inlined", "inlined"]
        assert not answer.report.encoder
        assert answer.report.cache_bytes == 0
        assert answer.report.recomputed_tokens == len(LAKE) + len(CITY) + 2
    assert engine.ask(QUESTION, [LAKE, CITY], encoder=True, max_new_tokens=NEW).token_ids == on.token_ids
    assert on.report.encoder
    assert on.token_ids != plain.token_ids


# ---- chat, loading ----


def test_chat_puts_documents_into_the_first_user_message(comb_model: CombForCausalLM) -> None:
    tokenizer = make_tokenizer(template=TEMPLATE)
    said = [("system", "Be brief."), ("user", QUESTION), ("assistant", "12 m."), ("user", "And wide?")]
    messages = [{"role": role, "content": text} for role, text in said]
    inlined = [messages[0], {"role": "user", "content": f"{LAKE}\n{QUESTION}"}, *messages[2:]]
    full, comb = PICEngine(comb_model, tokenizer, method="full"), PICEngine(comb_model, tokenizer)
    answer = full.chat(messages, [LAKE], max_new_tokens=NEW)
    assert answer.token_ids == full.chat(inlined, max_new_tokens=NEW).token_ids
    linked = comb.chat(messages, [LAKE], max_new_tokens=NEW)
    assert linked.report.prompt_tokens == answer.report.prompt_tokens - len(LAKE) - 1
    assert linked.token_ids == comb.ask_batch([(messages, [LAKE])], max_new_tokens=NEW)[0].token_ids
    stream = comb.stream(messages, [LAKE], max_new_tokens=NEW)
    assert "".join(stream) == linked.text
    with pytest.raises(ValueError, match="chat_template"):
        PICEngine(comb_model, make_tokenizer()).chat(messages, [LAKE])


def test_from_pretrained(backbone_folder: Path, tmp_path: Path, tokenizer: Any) -> None:
    plain = PICEngine.from_pretrained(backbone_folder, method="full")
    lego = PICEngine.from_pretrained(backbone_folder, method="legolink", k=3, quantize="int8")
    assert lego.method.spec == methods.create("legolink:3,quantize=int8", plain.model).spec
    loaded = LlamaForCausalLM.from_pretrained(backbone_folder)
    expected = PICEngine(make_backbone(), tokenizer, method="full").ask(QUESTION, [LAKE], max_new_tokens=NEW)
    assert plain.ask(QUESTION, [LAKE], max_new_tokens=NEW).token_ids == expected.token_ids
    model = make_comb(loaded)
    model.save_pretrained(tmp_path / "adapter")  # no tokenizer there: the backbone's is taken
    answer = PICEngine(model, tokenizer).ask(QUESTION, [LAKE], max_new_tokens=NEW)
    engine = PICEngine.from_pretrained(tmp_path / "adapter", store=(store := PICacheStore()), salt="s")
    assert (engine.store, engine.salt) == (store, "s")
    assert engine.ask(QUESTION, [LAKE], max_new_tokens=NEW).token_ids == answer.token_ids
    with pytest.raises(OSError):
        PICEngine.from_pretrained(tmp_path / "nothing")


# ---- documents by id ----


def test_added_documents_are_compiled_now_and_used_by_id(engine: PICEngine) -> None:
    ids = engine.add_documents([Document(LAKE, id="lake"), CITY])
    assert ids[0] == "lake"
    assert ids[1].startswith("doc-")
    answer = engine.ask(QUESTION, [BOOK], document_ids=ids, max_new_tokens=NEW)
    assert [d.id for d in answer.report.documents][1:] == ids
    assert states(answer) == ["compiled", "hit", "hit"]
    assert answer.token_ids == engine.ask(QUESTION, [BOOK, LAKE, CITY], max_new_tokens=NEW).token_ids
    by_id = engine.ask_batch([Request(QUESTION, [BOOK], ids)], max_new_tokens=NEW)
    assert by_id[0].token_ids == answer.token_ids
    engine.remove_documents(["lake"])
    with pytest.raises(UnknownDocumentError, match="'lake'"):
        engine.ask(QUESTION, document_ids=["lake"])
    with pytest.raises(UnknownDocumentError, match="'nope'"):
        engine.remove_documents([ids[1], "nope"])
    assert states(engine.ask(QUESTION, document_ids=ids[1:], max_new_tokens=1)) == ["hit"]


def test_remembered_tokens_follow_what_they_were_made_with(backbone: LlamaForCausalLM) -> None:
    tokenizer = make_tokenizer()
    engine = PICEngine(backbone, tokenizer, method="naive")
    first = engine.segments_of([LAKE, Document(LAKE, title="Lakes")])
    assert engine.segments_of([LAKE, Document(LAKE, title="Lakes")]) == first
    assert first[0].token_ids != first[1].token_ids
    engine.splitter = splitting.create("fixed:3")
    assert len(engine.segments_of([LAKE])) > 1
    engine.splitter = splitting.create("whole")
    engine.prompt_builder = PromptBuilder(tokenizer, document_template="> {text}")
    assert engine.segments_of([LAKE])[0].token_ids == PromptBuilder(tokenizer, "> {text}").segment(LAKE)
    engine.prompt_builder = PromptBuilder(tokenizer)
    tokenizer.add_tokens([LAKE.split()[0]])
    again = engine.segments_of([LAKE])[0].token_ids
    assert again == PromptBuilder(tokenizer).segment(LAKE) != first[0].token_ids


def test_settings_set_anew_are_those_of_a_new_engine(backbone: LlamaForCausalLM) -> None:
    engine = PICEngine(backbone, make_tokenizer(), method="naive")
    settings = {"method": "cacheblend:0.5", "splitter": "fixed:5", "mac": "generation"}
    for name, value in settings.items():
        setattr(engine, name, value)
    new = PICEngine(backbone, engine.tokenizer, **settings)
    one, other = (each.ask(QUESTION, [LAKE], max_new_tokens=NEW) for each in (engine, new))
    assert one.token_ids == other.token_ids
    assert (one.report.documents[0].tokens, engine.mac) == (other.report.documents[0].tokens, new.mac)
    assert len(engine.segments_of([LAKE])) == 5
    with pytest.raises(ValueError, match="for another model"):
        engine.method = methods.create("naive", make_backbone())
    for name in ("model", "tokenizer", "store"):  # a prompt builder or a catalog would be left with the other
        with pytest.raises(AttributeError, match=f"engine's {name} can't be set anew: make another PICEngine"):
            setattr(engine, name, None)


def test_an_id_stands_for_one_text_and_a_text_may_have_two(engine: PICEngine) -> None:
    engine.add_documents([Document(LAKE, id="a"), Document(LAKE, id="b")], pin=True)
    engine.remove_documents(["a"])
    assert states(engine.ask(QUESTION, document_ids=["b"], max_new_tokens=1)) == ["hit"]
    assert engine.store.stats().pinned == 1
    engine.remove_documents(["b"])
    assert engine.store.stats().pinned == 0
    assert states(engine.ask(QUESTION, [LAKE], max_new_tokens=1)) == ["compiled"]
    for _ in range(2):
        engine.add_documents([Document(LAKE, id="a")])
    for documents in ([Document(CITY, id="a")], [Document(CITY, id="n"), Document(LAKE, id="n")]):
        with pytest.raises(ValueError, match="another text"):
            engine.add_documents(documents)


def test_expiry_follows_the_last_call(comb_model: CombForCausalLM, tokenizer: Any) -> None:
    now = [0.0]
    store = PICacheStore(clock=lambda: now[0])
    engine = PICEngine(comb_model, tokenizer, store=store)
    engine.catalog.clock = lambda: now[0]
    for ttl in (0, "5"):
        with pytest.raises(ValueError, match="ttl must be a positive number of seconds"):
            engine.add_documents([LAKE], ttl=ttl)
    with pytest.raises(ValueError, match=r"a folder goes into PICacheStore\(disk_path=...\)"):
        PICEngine(comb_model, tokenizer, store="folder")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="salt is a text, '' for none, not None"):
        PICEngine(comb_model, tokenizer, salt=None)  # type: ignore[arg-type]
    engine.ask("Where?", [LAKE], max_new_tokens=1)  # compiled without an end, which `ttl` then sets
    (name,) = engine.add_documents([LAKE], ttl=5)
    key = engine.segments_of([LAKE])[0].key
    assert store.lookup(key) == "device"
    now[0] = 6.0
    assert store.lookup(key) is None
    with pytest.raises(UnknownDocumentError):
        engine.ask("Where?", document_ids=[name])

    engine.add_documents([CITY], pin=True, ttl=5)
    now[0] = 12.0
    assert states(engine.ask("Where?", [CITY], max_new_tokens=1)) == ["compiled"]  # looked at, not swept
    assert store.stats().pinned == 0

    engine.add_documents([LAKE], pin=True, ttl=5)
    engine.add_documents([LAKE], pin=True)  # renewed, for ever
    now[0] = 60.0
    assert states(engine.ask("Where?", document_ids=[name], max_new_tokens=1)) == ["hit"]

    engine.add_documents([Document(LAKE, id="other name")], ttl=5)  # the content still has an id without an end
    now[0] = 70.0
    assert states(engine.ask("Where?", [LAKE], max_new_tokens=1)) == ["hit"]
    check_store(store)


@pytest.mark.parametrize("again", ["evicted", "evicted, by its text", "other weights"])
def test_what_is_compiled_again_keeps_the_time_of_its_id(again: str, tokenizer: Any, tmp_path: Path) -> None:
    now, model = [0.0], make_backbone()
    room = PICEngine(model, tokenizer, method="naive").ask(QUESTION, [LAKE], max_new_tokens=1).report.cache_bytes
    store = PICacheStore(device_bytes=room, disk_path=tmp_path, clock=lambda: now[0])
    engine = PICEngine(model, tokenizer, method="naive", store=store)
    engine.catalog.clock = store._index.clock
    ids = engine.add_documents([Document(LAKE, id="lake")], ttl=60)
    if again == "other weights":
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
    else:
        engine.ask(QUESTION, [CITY], max_new_tokens=1)
    asked = {"documents": [LAKE]} if again.endswith("text") else {"document_ids": ids}
    assert states(engine.ask(QUESTION, **asked, max_new_tokens=1)) == ["compiled"]
    (segment,) = engine.segments_of([LAKE])
    assert store.lookup(segment.key) == "device"
    store.flush()
    assert segment.key not in str(list(tmp_path.iterdir()))
    now[0] = 61.0
    assert store.lookup(segment.key) is None


def test_other_weights_keep_pins_and_removals(tokenizer: Any) -> None:
    model = make_backbone()
    engine = PICEngine(model, tokenizer, method="naive", splitter="fixed:9")
    ids = engine.add_documents([Document(LAKE, id="lake")], pin=True)
    keys = [segment.key for segment in engine.segments_of(document_ids=ids)]
    assert engine.store.stats().pinned == len(keys) > 1
    for _ in range(2):
        with torch.no_grad():
            model.model.layers[0].mlp.down_proj.weight.mul_(1.5)
        engine.ask(QUESTION, document_ids=ids, max_new_tokens=1)
        now = [segment.key for segment in engine.segments_of(document_ids=ids)]
        assert set(engine.store._index.pins) == set(now)  # those of before may go
        keys += now
    engine.add_documents([Document(LAKE, id="lake")])
    assert engine.store.stats().pinned == 0
    engine.remove_documents(ids)
    assert [engine.store.lookup(key) for key in keys] == [None] * len(keys)
    idle(engine.store)


def test_a_small_store_evicts_and_compiles_again(comb_model: CombForCausalLM, tokenizer: Any) -> None:
    one = PICEngine(comb_model, tokenizer).ask(QUESTION, [LAKE], max_new_tokens=NEW)
    store = PICacheStore(device_bytes=int(one.report.cache_bytes * 1.5))
    engine = PICEngine(comb_model, tokenizer, store=store)
    ids = engine.add_documents([LAKE]) + engine.add_documents([CITY])
    answer = engine.ask(QUESTION, document_ids=ids[:1], max_new_tokens=NEW)
    assert states(answer) == ["compiled"]
    assert answer.token_ids == one.token_ids
    assert len(engine.add_documents([LAKE, CITY, BOOK[:20]])) == 3  # no two of them fit at once
    with pytest.raises(PICacheTooLargeError):
        engine.ask(QUESTION, [BOOK * 3], max_new_tokens=1)
    with pytest.raises(StoreFullError):
        engine.add_documents([LAKE, CITY], pin=True)
    idle(store)


# ---- what is refused ----


def test_bad_documents(engine: PICEngine) -> None:
    no_lists = [(each, f"documents is a list.*{type(each).__name__}") for each in (None, 3, b"lake", {"lake": LAKE})]
    for documents, message in [
        *no_lists,
        (LAKE, r"\[\.\.\.\]"),
        ([{"text": LAKE, "titel": "Water"}], "no 'titel'"),
        ([{"id": "lake"}], "document_ids="),
        ([{"text": LAKE, "title": 3}], "title is a str, not int"),
        ([{"token_ids": 5}], "one row of integers"),
        ([{"text": [LAKE]}], "text is a str, not list"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.ask(QUESTION, documents)
    with pytest.raises(ValueError, match="empty"):
        engine.ask("", [])
    with pytest.raises(ValueError, match="half of a surrogate pair"):
        engine.ask("How \ud83d?", [LAKE])
    with pytest.raises(ValueError, match="list"):
        engine.ask(QUESTION, document_ids="lake")
    for no_request in (QUESTION, {"question": QUESTION}):
        with pytest.raises(ValueError, match=r"\(question, documents\)"):
            engine.ask_batch([no_request])


def test_a_token_without_an_embedding_is_refused_wherever_it_stands(backbone: LlamaForCausalLM) -> None:
    tokenizer = make_tokenizer()
    engine = PICEngine(backbone, tokenizer, method="naive")
    tokenizer.add_tokens(["<new>"])
    for question, document in (("What is <new>?", LAKE), (QUESTION, "A lake is <new>.")):
        for encoder in (True, False):
            with pytest.raises(ValueError, match=r"token id 259 is outside of the model's 0\.\.258"):
                engine.ask(question, [document], encoder=encoder)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_an_engine_says_that_it_can_t_be_copied(engine: PICEngine, copied: Any) -> None:
    for whole in (engine, engine.store):
        with pytest.raises(TypeError, match="PICEngine with it, can't be copied or pickled"):
            copied(whole)


def test_over_long_documents_and_prompts(tokenizer: Any) -> None:
    engine = PICEngine(make_comb(max_document_tokens=30), tokenizer)
    for call in (engine.ask, engine.stream):
        with pytest.raises(ValueError, match=r"'book' has 37 tokens.*at most 30.*split it"):
            call(QUESTION, [LAKE, Document(BOOK, id="book")])
    with pytest.raises(ValueError, match="'book'"):
        engine.add_documents([LAKE, Document(BOOK, id="book")])
    assert engine.store.stats().misses == 0  # nothing was compiled for a call that is refused
    assert states(engine.ask(QUESTION, [BOOK], encoder=False, max_new_tokens=1)) == ["inlined"]
    with pytest.raises(ValueError, match=r"529 tokens \(520 of documents, 9 of query\).*512 positions"):
        engine.ask(QUESTION, [BOOK[:25]] * 20, encoder=False)
    # the same documents are no problem outside the prompt
    assert engine.ask(QUESTION, [BOOK[:25]] * 20, max_new_tokens=1).report.prompt_tokens == 9
    idle(engine.store)


def test_a_failing_compile_leaves_nothing_behind(engine: PICEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine.add_documents([LAKE])
    with monkeypatch.context() as patch:
        patch.setattr(engine.model, "encode", lambda segments: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.ask(QUESTION, [LAKE, CITY])
        with pytest.raises(ZeroDivisionError):
            list(engine.stream(QUESTION, [LAKE, CITY]))
        idle(engine.store)
    assert states(engine.ask(QUESTION, [LAKE, CITY], max_new_tokens=1)) == ["hit", "compiled"]


def test_the_default_method_is_primed_where_it_can_be(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    wide = make_backbone(max_position_embeddings=4096)
    engine = PICEngine(wide, tokenizer)
    report = engine.ask(QUESTION, [LAKE], max_new_tokens=1).report
    assert (report.method, report.documents[0].state) == ("primed", "compiled")
    assert engine.method.spec is not None
    more = {**engine.method.spec.parameters, "k": 3}
    assert PICEngine(wide, tokenizer, k=3).method.spec == MethodSpec("primed", more)
    assert PICEngine(make_comb(), tokenizer).method.name == "comb"
    assert not caplog.records
    engine = PICEngine(text_model("qwen3_5")[0], tokenizer)  # on hybrids hypic, behind the same passage
    assert engine.method.name == "hypic"
    assert engine.method.compiled_behind == PICEngine(wide, tokenizer).method.compiled_behind
    assert "documents stand in the prompt" not in caplog.text
    engine = PICEngine(tiny("gpt2", vocab_size=len(tokenizer)), tokenizer)
    assert engine.ask(QUESTION, [LAKE], max_new_tokens=1).report.method == "full"
    assert "documents stand in the prompt" in caplog.text


def test_the_engine_goes_to_a_gpu_as_the_command_line_does(
    backbone_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved: list[Any] = []
    monkeypatch.setattr("transformers.PreTrainedModel.to", lambda self, *places: moved.append(places) or self)
    PICEngine.from_pretrained(backbone_folder, method="full")
    with pytest.raises(ValueError, match="device cuda, but there is no GPU"):
        PICEngine.from_pretrained(backbone_folder, method="full", device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    PICEngine.from_pretrained(backbone_folder, method="full")
    PICEngine.from_pretrained(backbone_folder, method="full", device="cpu")
    assert moved == [("cpu",), ("cuda",), ("cpu",)]
    with pytest.raises(ValueError, match="device_map both say"):
        PICEngine.from_pretrained(backbone_folder, method="full", device="cpu", device_map="cpu")


def test_a_plain_model_has_no_encoder(backbone: LlamaForCausalLM, tokenizer: Any) -> None:
    for model, tokens, options, message in (
        (backbone, tokenizer, {"method": "comb"}, r"from_backbone.*comb train"),
        (backbone, tokenizer, {"method": "ful"}, "unknown method"),
        (backbone, tokenizer, {"method": "full", "k": 3}, "no parameter k"),
        (backbone, tokenizer, {"method": "legolink", "fronts": True}, "no parameter fronts; it takes: k, front"),
        ("nano", tokenizer, {"method": "full"}, r"from_pretrained\('nano'"),
        (backbone, None, {"method": "full"}, r"tokenizer.*NoneType"),
        (backbone, "nano", {"method": "primed"}, r"tokenizer.*not str"),
        (make_backbone(), tokenizer, {"method": methods.create("full", backbone)}, "is for another model"),
        (backbone, tokenizer, {"method": methods.get("full")}, "a name, or a Method instance"),
    ):
        with pytest.raises(ValueError, match=message):
            PICEngine(model, tokens, **options)


def test_another_tokenizer_is_refused(tokenizer: Any) -> None:
    model = make_backbone()
    with pytest.raises(ValueError, match=r"260 tokens.*259 rows"):
        PICEngine(model, make_tokenizer("<more>"), method="full")
    model.config.tokenizer_fingerprint = tokenizer_fingerprint(tokenizer)
    PICEngine(model, make_tokenizer(template=TEMPLATE), method="full")  # how prompts look is not what ids mean
    other = make_backbone(vocab_size=300)
    other.config.tokenizer_fingerprint = model.config.tokenizer_fingerprint
    with pytest.raises(ValueError, match="not the one this checkpoint was trained with"):
        PICEngine(other, make_tokenizer("<more>"), method="full")
