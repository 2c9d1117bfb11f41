"""PICEngine: right answers, right reports, nothing shared between calls, nothing held after them."""

from __future__ import annotations

import gc
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, LogitsProcessor, PreTrainedTokenizerFast

from comb import CombForCausalLM, Document
from comb.backbones.tokenizer import tokenizer_fingerprint
from comb.cache.store import PICacheStore, PICacheTooLargeError
from comb.engine.engine import PICEngine, Request, UnknownDocumentError
from comb.engine.report import format_bytes

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
LAKE, CITY, BOOK = "The lake is 12 m deep.", "Rill is a small city.", "Mira wrote the blue book, in spring."
QUESTION = "How deep?"
NEW = 6


def make_tokenizer(*extra: str, template: str | None = None) -> PreTrainedTokenizerFast:
    """One token per byte, and <pad>, <eos>, <bos> behind them."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for token in ("<pad>", "<eos>", "<bos>", *extra):
        vocabulary[token] = len(vocabulary)
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", bos_token="<bos>", chat_template=template
    )


def make_backbone(**changes: Any) -> LlamaForCausalLM:
    """A tiny random model whose tokens depend on its input, and that never ends by itself."""
    torch.manual_seed(1)
    config = {
        "vocab_size": 259, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
        "initializer_range": 0.25, "eos_token_id": 257, "pad_token_id": 256, "bos_token_id": 258,
    }  # fmt: skip
    model = LlamaForCausalLM(LlamaConfig(**{**config, **changes})).eval()
    with torch.no_grad():
        model.lm_head.weight[256:] = 0.0
    return model


def make_comb(backbone: LlamaForCausalLM | None = None, **options: Any) -> CombForCausalLM:
    model = CombForCausalLM.from_backbone(
        make_backbone() if backbone is None else backbone, num_encoder_layers=2, **options
    )
    with torch.no_grad():
        for block in model.cross_blocks:
            block.attention_gate.fill_(1.5)
            block.mlp_gate.fill_(0.5)
    return model


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="module")
def backbone() -> LlamaForCausalLM:
    return make_backbone()


@pytest.fixture(scope="module")
def comb_model() -> CombForCausalLM:
    return make_comb()


@pytest.fixture
def engine(comb_model: CombForCausalLM, tokenizer: PreTrainedTokenizerFast) -> Iterator[PICEngine]:
    engine = PICEngine(comb_model, tokenizer)
    yield engine
    idle(engine.store)


def idle(store: PICacheStore) -> None:
    """Nothing is referenced and no invariant is broken."""
    assert store.stats().in_use == 0
    store.check_integrity()


def states(answer: Any) -> list[str]:
    return [document.state for document in answer.report.documents]


class Always(LogitsProcessor):
    """Makes generation emit one token for ever, after an optional action at each step."""

    def __init__(self, token: int, action: Callable[[], None] = lambda: None) -> None:
        self.token, self.action, self.steps = token, action, 0

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.steps += 1
        self.action()
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.token] = 0
        return forced


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


def test_prefix_answers_as_full_and_reports_its_hits(backbone: LlamaForCausalLM, tokenizer: Any) -> None:
    full = PICEngine(backbone, tokenizer, method="full")
    prefix = PICEngine(backbone, tokenizer, method="prefix")
    for documents, expected in [
        ([LAKE, CITY], ["compiled", "compiled"]),
        ([LAKE, CITY], ["hit", "hit"]),
        ([LAKE, BOOK], ["hit", "compiled"]),
        ([CITY, LAKE], ["compiled", "compiled"]),
        ([], []),
    ]:
        answer = prefix.ask(QUESTION, documents, max_new_tokens=NEW)
        assert answer.token_ids == full.ask(QUESTION, documents, max_new_tokens=NEW).token_ids
        assert states(answer) == expected
        recomputed = sum(d.tokens for d in answer.report.documents if d.state == "compiled")
        assert answer.report.recomputed_tokens == recomputed
    idle(prefix.store)


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
    # negative control: the documents are what the answer comes from
    assert engine.ask(QUESTION, [CITY], max_new_tokens=NEW).token_ids != cold.token_ids


def test_the_same_document_twice_is_one_picache(engine: PICEngine) -> None:
    once = engine.ask(QUESTION, [LAKE], max_new_tokens=1)
    twice = engine.ask(QUESTION, [LAKE, LAKE], max_new_tokens=1)
    assert twice.report.cache_bytes == once.report.cache_bytes
    assert len(twice.report.documents) == 2


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
    assert [answer.report.prompt_tokens for answer in answers] == [a.report.prompt_tokens for a in expected]
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
    monkeypatch.setattr(engine.method, "compile", lambda segments: compiled.append(len(segments)) or compile_(segments))
    monkeypatch.setattr(
        comb_model.backbone, "generate", lambda ids, **kw: generated.append(len(ids)) or generate(ids, **kw)
    )
    engine.add_documents([LAKE])
    compiled.clear()
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


def test_documents_never_leak_into_another_request(engine: PICEngine, tokenizer: Any) -> None:
    plain = PICEngine(make_backbone(), tokenizer, method="full")
    nothing = plain.ask(QUESTION, max_new_tokens=NEW).token_ids
    first = engine.ask(QUESTION, [LAKE, BOOK], max_new_tokens=NEW)
    assert engine.ask(QUESTION, max_new_tokens=NEW).token_ids == nothing
    others = engine.ask(QUESTION, [CITY], max_new_tokens=NEW)
    assert len({first.token_ids, nothing, others.token_ids}) == 3
    mixed = engine.ask_batch(
        [(QUESTION, [LAKE, BOOK]), (QUESTION, []), (QUESTION, [CITY]), (QUESTION, [])], max_new_tokens=NEW
    )
    assert [a.token_ids for a in mixed] == [first.token_ids, nothing, others.token_ids, nothing]


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
        ({"max_new_tokens": -3}, "got -3"),
        ({"max_new_tokens": True}, "got True"),
        ({"temperature": -1}, "temperature .* got -1"),
        ({"temperature": float("nan")}, "got nan"),
        ({"num_return_sequences": 2}, "one answer per question"),
        ({"max_new_tokens": 600}, "need 609 positions, the backbone has 512: ask for at most 503"),
        ({"max_new_token": 5}, "max_new_token"),
    ],
)
def test_bad_settings(engine: PICEngine, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine.ask(QUESTION, [LAKE], **settings)


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
    with pytest.raises(RuntimeError, match="no answer yet"):
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


def test_added_documents_follow_a_trained_adapter(tokenizer: Any) -> None:
    model = make_comb()
    engine = PICEngine(model, tokenizer)
    ids = engine.add_documents([LAKE])
    before = engine.ask(QUESTION, document_ids=ids, max_new_tokens=NEW)
    with torch.no_grad():
        for parameter in model.encoder.parameters():
            parameter.mul_(1.5)
    after = engine.ask(QUESTION, document_ids=ids, max_new_tokens=NEW)
    assert (states(before), states(after)) == (["hit"], ["compiled"])
    assert after.token_ids == PICEngine(model, tokenizer).ask(QUESTION, [LAKE], max_new_tokens=NEW).token_ids
    engine.remove_documents(ids)
    idle(engine.store)


def test_two_ids_of_one_text(engine: PICEngine) -> None:
    engine.add_documents([Document(LAKE, id="a"), Document(LAKE, id="b")], pin=True)
    engine.remove_documents(["a"])
    assert states(engine.ask(QUESTION, document_ids=["b"], max_new_tokens=1)) == ["hit"]
    assert engine.store.stats().pinned == 1
    engine.remove_documents(["b"])
    assert engine.store.stats().pinned == 0
    assert states(engine.ask(QUESTION, [LAKE], max_new_tokens=1)) == ["compiled"]


def test_an_id_stands_for_one_text(engine: PICEngine) -> None:
    engine.add_documents([Document(LAKE, id="a")])
    engine.add_documents([Document(LAKE, id="a")])
    with pytest.raises(ValueError, match="another text"):
        engine.add_documents([Document(CITY, id="a")])
    with pytest.raises(ValueError, match="another text"):
        engine.add_documents([Document(CITY, id="n"), Document(LAKE, id="n")])


def test_documents_expire(engine: PICEngine) -> None:
    with pytest.raises(ValueError, match="ttl"):
        engine.add_documents([LAKE], ttl=0)
    ids = engine.add_documents([LAKE], pin=True, ttl=0.05)
    time.sleep(0.06)
    with pytest.raises(UnknownDocumentError):
        engine.ask(QUESTION, document_ids=ids)
    assert states(engine.ask(QUESTION, [LAKE], max_new_tokens=1)) == ["compiled"]
    assert engine.store.stats().pinned == 0


def test_expiry_follows_the_last_call(comb_model: CombForCausalLM, tokenizer: Any) -> None:
    now = [0.0]
    store = PICacheStore(clock=lambda: now[0], wall_clock=lambda: now[0])
    engine = PICEngine(comb_model, tokenizer, store=store)
    engine.catalog.clock = lambda: now[0]
    engine.ask("Where?", [LAKE], max_new_tokens=1)  # compiled without an end, which `ttl` then sets
    (name,) = engine.add_documents([LAKE], ttl=5)
    now[0] = 6.0
    assert store.sweep() == 1
    with pytest.raises(UnknownDocumentError):
        engine.ask("Where?", document_ids=[name])

    engine.add_documents([LAKE], pin=True, ttl=5)
    engine.add_documents([LAKE], pin=True)  # renewed, for ever
    now[0] = 60.0
    assert store.sweep() == 0
    assert states(engine.ask("Where?", document_ids=[name], max_new_tokens=1)) == ["hit"]

    engine.add_documents([Document(LAKE, id="other name")], ttl=5)  # the content still has an id without an end
    now[0] = 70.0
    assert store.sweep() == 0
    store.check_integrity()


def test_a_small_store_evicts_and_compiles_again(comb_model: CombForCausalLM, tokenizer: Any) -> None:
    one = PICEngine(comb_model, tokenizer).ask(QUESTION, [LAKE], max_new_tokens=NEW)
    store = PICacheStore(device_bytes=int(one.report.cache_bytes * 1.5))
    engine = PICEngine(comb_model, tokenizer, store=store)
    ids = engine.add_documents([LAKE], pin=False) + engine.add_documents([CITY])
    answer = engine.ask(QUESTION, document_ids=ids[:1], max_new_tokens=NEW)
    assert states(answer) == ["compiled"]
    assert answer.token_ids == one.token_ids
    with pytest.raises(PICacheTooLargeError):
        engine.ask(QUESTION, [BOOK * 3], max_new_tokens=1)
    idle(store)


def test_picaches_survive_on_disk(comb_model: CombForCausalLM, tokenizer: Any, tmp_path: Path) -> None:
    first = PICEngine(comb_model, tokenizer, store=PICacheStore(disk_path=tmp_path / "pics"))
    cold = first.ask(QUESTION, [LAKE], max_new_tokens=NEW)
    first.store.flush()
    second = PICEngine(comb_model, tokenizer, store=PICacheStore(disk_path=tmp_path / "pics"))
    warm = second.ask(QUESTION, [LAKE], max_new_tokens=NEW)
    assert warm.report.documents[0].tier == "disk"
    assert warm.token_ids == cold.token_ids
    # a damaged file is a miss, never a crash
    for path in (tmp_path / "pics").rglob("*.safetensors"):
        path.write_bytes(path.read_bytes()[:-7])
    third = PICEngine(comb_model, tokenizer, store=PICacheStore(disk_path=tmp_path / "pics"))
    again = third.ask(QUESTION, [LAKE], max_new_tokens=NEW)
    assert states(again) == ["compiled"]
    assert again.token_ids == cold.token_ids


# ---- what is refused ----


def test_bad_documents(engine: PICEngine) -> None:
    with pytest.raises(ValueError, match=r"\[\.\.\.\]"):
        engine.ask(QUESTION, LAKE)
    with pytest.raises(ValueError, match="empty document"):
        engine.ask(QUESTION, [""])
    with pytest.raises(ValueError, match="another tokenizer"):
        engine.ask(QUESTION, [Document(token_ids=(3, 259))])
    with pytest.raises(ValueError, match="empty"):
        engine.ask("")
    with pytest.raises(ValueError, match="list"):
        engine.ask(QUESTION, document_ids="lake")


def test_over_long_documents_and_prompts(tokenizer: Any) -> None:
    model = make_comb(max_document_tokens=30)
    engine = PICEngine(model, tokenizer)
    for call in (engine.ask, engine.stream):
        with pytest.raises(ValueError, match=r"'book' has 37 tokens.*at most 30.*split it"):
            call(QUESTION, [LAKE, Document(BOOK, id="book")])
    with pytest.raises(ValueError, match="'book'"):
        engine.add_documents([LAKE, Document(BOOK, id="book")])
    assert engine.store.stats().misses == 0  # nothing was compiled for a call that is refused
    off = engine.ask(QUESTION, [BOOK], encoder=False, max_new_tokens=1)
    assert states(off) == ["inlined"]
    with pytest.raises(ValueError, match=r"529 tokens \(520 of documents, 9 of query\).*512 positions"):
        engine.ask(QUESTION, [BOOK[:25] * 1 for _ in range(20)], encoder=False)
    # the same documents are no problem outside the prompt
    assert engine.ask(QUESTION, [BOOK[:25] for _ in range(20)], max_new_tokens=1).report.prompt_tokens == 9
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


def test_a_plain_model_has_no_encoder(backbone: LlamaForCausalLM, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"from_backbone.*comb train"):
        PICEngine(backbone, tokenizer)
    with pytest.raises(ValueError, match="unknown method"):
        PICEngine(backbone, tokenizer, method="ful")
    with pytest.raises(ValueError, match="no parameter k"):
        PICEngine(backbone, tokenizer, method="full", k=3)


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
