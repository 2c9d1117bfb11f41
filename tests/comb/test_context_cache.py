"""The papers' explicit API: compiled chunks named in messages, in any order, between any text; and every store tier."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from comb import CombForCausalLM, Document, PICEngine
from comb.cache.store import PICacheStore
from comb.documents.document import PromptBuilder
from comb.documents.messages import referenced_documents
from comb.engine.engine import UnknownDocumentError
from tests.helpers.byte_text import byte_llama, byte_tokenizer
from tests.helpers.families import open_gates, tiny

pytestmark = pytest.mark.usefixtures("one_thread")

CHUNKS = ["The mill burnt down in 1907.", "Its owner was Ada Flint.", "She moved to York."]
SPECS = ["full", "prefix", "naive", "legolink:4", "legolink-0", "attnlink:4", "cacheblend:0.2", "focus:0.2"]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def model() -> Any:
    return byte_llama(num_hidden_layers=3, num_key_value_heads=2, initializer_range=0.2)


def mixed(first: str, second: str) -> list[dict[str, Any]]:
    """Cached chunks in a system message and between the words of a question."""
    return [
        {"role": "system", "content": [{"type": "text", "text": "Facts: "}, {"type": "document", "id": first}]},
        {"role": "user", "content": [
            {"type": "text", "text": "Given "}, {"type": "document", "id": second}, {"type": "text", "text": "who?"},
        ]},
    ]  # fmt: skip


def test_messages_are_laid_out_as_written(tokenizer: Any) -> None:
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
    assert prompt.query == (*prompt.head, *prompt.gaps[0], *prompt.gaps[1], *prompt.tail)


@pytest.mark.parametrize("spec", SPECS)
def test_chat_with_cache_ids_in_any_order(model: Any, tokenizer: Any, spec: str) -> None:
    engine = PICEngine(model, tokenizer, method=spec)
    a, b, c = engine.add_documents(CHUNKS)
    settings = {"max_new_tokens": 6, "eos_token_id": None}
    for first, second in ((a, b), (b, a), (c, c)):
        answer = engine.chat(mixed(first, second), **settings)
        assert [document.id for document in answer.report.documents] == [first, second]
        if spec not in ("full", "prefix"):
            assert {document.state for document in answer.report.documents} == {"hit"}
        if spec == "prefix":
            texts = dict(zip((a, b, c), CHUNKS, strict=True))
            full = PICEngine(model, tokenizer, method="full")
            ids = full.add_documents([Document(texts[name], id=str(i)) for i, name in enumerate((first, second))])
            assert answer.token_ids == full.chat(mixed(*ids), **settings).token_ids
    engine.remove_documents([b])
    with pytest.raises(UnknownDocumentError, match=b):
        engine.chat(mixed(a, b), **settings)
    with pytest.raises(UnknownDocumentError):
        engine.remove_documents([b])
    assert engine.store.stats().in_use == 0


def test_comb_reads_documents_named_in_messages(tokenizer: Any) -> None:
    torch.manual_seed(0)
    backbone = tiny("llama")
    backbone.resize_token_embeddings(len(tokenizer))
    model = open_gates(CombForCausalLM.from_backbone(backbone, num_encoder_layers=2))
    engine = PICEngine(model, tokenizer)
    a, b, _ = engine.add_documents(CHUNKS)
    answer = engine.chat(mixed(a, b), max_new_tokens=4)
    assert answer.report.encoder
    assert answer.report.prompt_tokens == len(tokenizer.encode("<|system|>Facts: <|user|>Given who?<|assistant|>"))
    off = engine.chat(mixed(a, b), encoder=False, max_new_tokens=4)
    assert off.report.prompt_tokens == answer.report.prompt_tokens + sum(len(text) + 1 for text in CHUNKS[:2])


def test_methods_share_what_they_compile_alike(model: Any, tokenizer: Any) -> None:
    store = PICacheStore()
    states = {}
    for spec in (
        "naive",
        "legolink:4",
        "cacheblend:0.2",
        "legolink-0",
        "naive,front=dummies:4",
        "naive,front=dummies:2",
    ):
        engine = PICEngine(model, tokenizer, method=spec, store=store)
        answer = engine.ask("who?", documents=CHUNKS[:1], max_new_tokens=1)
        states[spec] = answer.report.documents[0].state
    assert states == {"naive": "compiled", "legolink:4": "hit", "cacheblend:0.2": "hit", "legolink-0": "compiled",
                      "naive,front=dummies:4": "hit", "naive,front=dummies:2": "compiled"}  # fmt: skip


@pytest.mark.parametrize(
    "part", [{"type": [[]], "text": "a"}, {"type": {}}, {"type": "document", "id": [1]}, 3, None, [["a"]]]
)
def test_malformed_parts_are_refused_by_name(part: Any) -> None:
    """Bodies of requests come here as JSON made them: any type may stand anywhere."""
    with pytest.raises(ValueError, match="message content must be text"):
        referenced_documents([{"role": "user", "content": [{"type": "document", "id": "a"}, part]}])
