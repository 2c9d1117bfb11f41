"""PICEngine: documents by id, their pins and times, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from comb import CombForCausalLM, Document, methods
from comb.backbones.tokenizer import tokenizer_fingerprint
from comb.cache.store import PICacheStore, PICacheTooLargeError, StoreFullError
from comb.documents import splitting
from comb.documents.document import PromptBuilder
from comb.engine.engine import PICEngine, Request, UnknownDocumentError
from comb.methods import MethodSpec
from tests.helpers.hybrids import HYBRIDS
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
    with pytest.raises(ValueError, match="ttl"):
        engine.add_documents([LAKE], ttl=0)
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
    store.check_integrity()


def test_a_small_store_evicts_and_compiles_again(comb_model: CombForCausalLM, tokenizer: Any) -> None:
    one = PICEngine(comb_model, tokenizer).ask(QUESTION, [LAKE], max_new_tokens=NEW)
    store = PICacheStore(device_bytes=int(one.report.cache_bytes * 1.5))
    engine = PICEngine(comb_model, tokenizer, store=store)
    ids = engine.add_documents([LAKE], pin=False) + engine.add_documents([CITY])
    answer = engine.ask(QUESTION, document_ids=ids[:1], max_new_tokens=NEW)
    assert states(answer) == ["compiled"]
    assert answer.token_ids == one.token_ids
    assert len(engine.add_documents([LAKE, CITY, BOOK[:20]])) == 3  # no two of them fit at once
    with pytest.raises(PICacheTooLargeError):
        engine.ask(QUESTION, [BOOK * 3], max_new_tokens=1)
    with pytest.raises(StoreFullError):
        engine.add_documents([LAKE, CITY], pin=True)
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
    for question, documents, message in [
        (QUESTION, LAKE, r"\[\.\.\.\]"),
        (QUESTION, [""], "empty document"),
        (QUESTION, [Document(token_ids=(3, 259))], "another tokenizer"),
        ("", [], "empty"),
    ]:
        with pytest.raises(ValueError, match=message):
            engine.ask(question, documents)
    with pytest.raises(ValueError, match="list"):
        engine.ask(QUESTION, document_ids="lake")
    for no_list in (None, 3, b"lake", {"lake": LAKE}):
        with pytest.raises(ValueError, match=f"documents is a list.*{type(no_list).__name__}"):
            engine.ask(QUESTION, no_list)
    for no_request in (QUESTION, {"question": QUESTION}):
        with pytest.raises(ValueError, match=r"\(question, documents\)"):
            engine.ask_batch([no_request])


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


def test_documents_may_be_their_fields_by_name(engine: PICEngine) -> None:
    engine.prompt_builder = PromptBuilder(engine.tokenizer, document_template="{title}: {text}")
    given = [Document(LAKE, id="lake", title="Water"), CITY]
    wanted = engine.ask(QUESTION, given, max_new_tokens=NEW)
    by_name = [{"text": LAKE, "id": "lake", "title": "Water"}, {"text": CITY}]
    assert engine.add_documents(by_name)[0] == "lake"
    for documents in (by_name, [by_name[0], CITY]):
        answer = engine.ask(QUESTION, documents, max_new_tokens=NEW)
        assert answer.token_ids == wanted.token_ids
        assert states(answer) == ["hit", "hit"]
    for wrong, why in (
        ({"text": LAKE, "titel": "Water"}, "no 'titel'"),
        ({"id": "lake"}, "document_ids="),
        ({"text": LAKE, "title": 3}, "title is a str, not int"),
        ({"text": [LAKE]}, "text is a str, not list"),
        ({"text": " "}, "empty document"),
    ):
        with pytest.raises(ValueError, match=why):
            engine.ask(QUESTION, [wrong])


def test_the_default_method_is_primed_where_it_can_be(
    backbone: LlamaForCausalLM, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    wide = make_backbone(max_position_embeddings=4096)
    engine = PICEngine(wide, tokenizer)
    report = engine.ask(QUESTION, [LAKE], max_new_tokens=1).report
    assert (report.method, report.documents[0].state) == ("primed", "compiled")
    assert engine.method.spec is not None
    more = {**engine.method.spec.parameters, "k": 3}
    assert PICEngine(wide, tokenizer, k=3).method.spec == MethodSpec("primed", more)
    assert PICEngine(make_comb(), tokenizer).method.name == "comb"
    assert not caplog.records
    mamba = HYBRIDS["qwen3_5"]()
    mamba.vocab_size = 259
    engine = PICEngine(AutoModelForCausalLM.from_config(mamba), tokenizer)
    assert engine.ask(QUESTION, [LAKE], max_new_tokens=1).report.method == "full"
    assert "documents stand in the prompt" in caplog.text


def test_the_engine_goes_to_a_gpu_as_the_command_line_does(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_backbone().save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    moved: list[Any] = []
    monkeypatch.setattr("transformers.PreTrainedModel.to", lambda self, *places: moved.append(places) or self)
    PICEngine.from_pretrained(tmp_path, method="full")
    with pytest.raises(ValueError, match="device cuda, but there is no GPU"):
        PICEngine.from_pretrained(tmp_path, method="full", device="cuda")
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    PICEngine.from_pretrained(tmp_path, method="full")
    PICEngine.from_pretrained(tmp_path, method="full", device="cpu")
    assert moved == [("cpu",), ("cuda",), ("cpu",)]
    with pytest.raises(ValueError, match="device_map both say"):
        PICEngine.from_pretrained(tmp_path, method="full", device="cpu", device_map="cpu")


def test_a_plain_model_has_no_encoder(backbone: LlamaForCausalLM, tokenizer: Any) -> None:
    with pytest.raises(ValueError, match=r"from_backbone.*comb train"):
        PICEngine(backbone, tokenizer, method="comb")
    with pytest.raises(ValueError, match="unknown method"):
        PICEngine(backbone, tokenizer, method="ful")
    with pytest.raises(ValueError, match="no parameter k"):
        PICEngine(backbone, tokenizer, method="full", k=3)
    with pytest.raises(ValueError, match=r"from_pretrained\('nano'"):
        PICEngine("nano", tokenizer, method="full")
    with pytest.raises(ValueError, match=r"tokenizer.*NoneType"):
        PICEngine(backbone, None, method="full")
    with pytest.raises(ValueError, match="is for another model"):
        PICEngine(make_backbone(), tokenizer, method=methods.create("full", backbone))
    with pytest.raises(ValueError, match="a name, or a Method instance"):
        PICEngine(backbone, tokenizer, method=methods.get("full"))


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
