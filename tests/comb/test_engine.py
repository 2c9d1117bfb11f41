"""PICEngine: right answers, right reports, nothing shared between calls, nothing held after them."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from comb import CombForCausalLM, Document, methods
from comb.cache.store import PICacheStore
from comb.engine.engine import PICEngine, Request
from comb.engine.report import format_bytes
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

pytestmark = pytest.mark.usefixtures("one_thread")


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
def test_batch_equals_single_questions(comb_model: CombForCausalLM, tokenizer: Any, method: str) -> None:
    rows = [(QUESTION, [LAKE, CITY]), ("Who?", []), ("What colour is it?", [BOOK, LAKE, CITY]), ("Where?", [CITY])]
    alone = PICEngine(comb_model, tokenizer, method=method)
    expected = [alone.ask(question, documents, max_new_tokens=NEW) for question, documents in rows]
    engine = PICEngine(comb_model, tokenizer, method=method)
    answers = engine.ask_batch(rows, max_new_tokens=NEW)
    assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in expected]
    assert [answer.report.prompt_tokens for answer in answers] == [answer.report.prompt_tokens for answer in expected]
    assert [len(answer.report.documents) for answer in answers] == [2, 0, 3, 1]
    assert len({answer.token_ids for answer in answers}) == 4
    assert engine.ask_batch([]) == []
    idle(engine.store)


@pytest.mark.parametrize("method", ["comb", "full"])
def test_a_batch_is_one_compile_and_one_generate(
    comb_model: CombForCausalLM, tokenizer: Any, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = PICEngine(comb_model, tokenizer, method=method)
    compiled, generated = [], []
    compile_, generate = engine.method.compile, comb_model.backbone.generate
    engine.add_documents([LAKE])
    monkeypatch.setattr(engine.method, "compile", lambda each: compiled.append(len(each)) or compile_(each))
    monkeypatch.setattr(comb_model.backbone, "generate", lambda i, **kw: generated.append(len(i)) or generate(i, **kw))
    engine.ask_batch([(QUESTION, [LAKE, CITY]), Request("Who?"), (QUESTION, [BOOK, CITY])], max_new_tokens=2)
    assert compiled == [2]
    assert generated == [3]


def test_rows_that_end_early_are_cut_at_their_end(backbone: LlamaForCausalLM, tokenizer: Any) -> None:
    engine = PICEngine(backbone, tokenizer, method="full")
    free = engine.ask_batch([(QUESTION, [LAKE]), ("Who?", [CITY])], max_new_tokens=NEW)
    end = free[0].token_ids[1]
    assert end not in free[1].token_ids
    answers = engine.ask_batch([(QUESTION, [LAKE]), ("Who?", [CITY])], max_new_tokens=NEW, eos_token_id=end)
    assert answers[0].token_ids == free[0].token_ids[: free[0].token_ids.index(end) + 1]
    assert answers[1].token_ids == free[1].token_ids


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
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": QUESTION},
        {"role": "assistant", "content": "12 m."},
        {"role": "user", "content": "And wide?"},
    ]
    full = PICEngine(comb_model, tokenizer, method="full")
    answer = full.chat(messages, [LAKE], max_new_tokens=NEW)
    inlined = [dict(message) for message in messages]
    inlined[1]["content"] = f"{LAKE}\n{QUESTION}"
    prompt = tokenizer.encode(
        tokenizer.apply_chat_template(inlined, tokenize=False, add_generation_prompt=True), add_special_tokens=False
    )
    expected = comb_model.backbone.generate(torch.tensor([prompt]), max_new_tokens=NEW, do_sample=False)
    assert list(answer.token_ids) == expected[0, len(prompt) :].tolist()
    comb = PICEngine(comb_model, tokenizer)
    linked = comb.chat(messages, [LAKE], max_new_tokens=NEW)
    assert linked.report.prompt_tokens == len(prompt) - len(LAKE) - 1
    assert linked.token_ids == comb.ask_batch([(messages, [LAKE])], max_new_tokens=NEW)[0].token_ids
    stream = comb.stream(messages, [LAKE], max_new_tokens=NEW)
    assert "".join(stream) == linked.text
    with pytest.raises(ValueError, match="chat_template"):
        PICEngine(comb_model, make_tokenizer()).chat(messages, [LAKE])


def test_from_pretrained(tmp_path: Path, tokenizer: Any) -> None:
    make_backbone().save_pretrained(tmp_path / "backbone")
    tokenizer.save_pretrained(tmp_path / "backbone")
    plain = PICEngine.from_pretrained(tmp_path / "backbone", method="full")
    linked = PICEngine.from_pretrained(tmp_path / "backbone", method="legolink", k=3, quantize="int8")
    assert linked.method.spec == methods.create("legolink:3,quantize=int8", plain.model).spec
    with pytest.raises(ValueError, match="no parameter fronts; it takes: k, front"):
        PICEngine(plain.model, tokenizer, method="legolink", fronts=True)
    loaded = LlamaForCausalLM.from_pretrained(tmp_path / "backbone")
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
